"""`whence bench` on tiny sizes: what it measures, what it leaves out and why, what it writes."""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from typer.testing import CliRunner

import gpu
from whence.bench import CONTENDERS, Point, Session, exactness, peak_memory, session, timing
from whence.bench.contenders import Contender, ours
from whence.bench.exactness import Check
from whence.bench.machine import commit
from whence.bench.plan import Plan
from whence.bench.problem import Problem
from whence.cli.root import app
from whence.kernels.reference import attend_rows

TINY = Point("", "tisa", 24, n_heads=2, d_head=8, batch=2, dtype="float32", device="cpu")


def point(contender: str, method: str = "tisa", **changes: Any) -> Point:
    return replace(TINY, contender=contender, method=method, **changes)


def session_in(folder: Path, **options: Any) -> Session:
    return Session(folder / "bench.json", device="cpu", effort=0.0, **options)


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "peak_of", lambda point, threads: 1000 * point.n)


def contender(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> None:
    monkeypatch.setitem(CONTENDERS, name, replace(CONTENDERS["whence:auto"], **changes))


@pytest.mark.parametrize("mode", ["forward", "both", "decode"])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("whence:auto", "tisa"),
        ("whence:reference", "shaw:clip=3"),
        ("eager", "t5"),
        ("eager", "fire"),
        ("eager-index", "tisa"),
        ("eager-index", "alibi"),
        ("sdpa-dense", "kerple"),
        ("article", "shaw:clip=3"),
        ("naive", "shaw:clip=3"),
        ("plain", "nope"),
    ],
)
def test_every_peer_of_a_cpu_is_exact_and_has_all_its_figures(
    tmp_path: Path, name: str, method: str, mode: str
) -> None:
    found = session_in(tmp_path).measure(point(name, method, mode=mode, causal=True))
    assert found is not None
    assert found["skipped"] is None
    assert 0 < found["ms"]["q20"] <= found["ms"]["median"] <= found["ms"]["q80"]
    assert found["extra_bytes"] == 24_000
    assert found["error"] <= 2
    assert found["graph_ms"] is None


@pytest.mark.parametrize("wrong", ["out", "gradient"])
def test_a_backend_that_is_not_exact_has_no_figures_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    def attention(problem: Problem) -> Tensor:
        out = ours("reference")(problem)
        if wrong == "out":
            return out * (1 + 1e-4)
        offset = problem.method.raw_offset
        return out + 1e-2 * (offset - offset.detach()).sum()

    contender(monkeypatch, "wrong", attentions=lambda: {"": attention})
    run = session_in(tmp_path)
    found, right = run.measure(point("wrong")), run.measure(point("whence:auto"))
    assert found is not None
    assert right is not None
    where = "out|q|k|v" if wrong == "out" else "raw_offset"
    assert "not exact: " in found["skipped"]
    assert found["skipped"].split()[2] in where.split("|")
    assert found["ms"] is found["extra_bytes"] is None
    assert right["ms"] is not None
    written = json.loads((tmp_path / "bench.json").read_text())["records"]
    assert [record["skipped"] is None for record in written] == [False, True]


def test_plain_pytorch_with_a_wrong_formula_is_found_in_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(problem: Problem) -> Tensor:
        return CONTENDERS["eager"].attentions()[""](problem) * (1 + 1e-9)

    contender(monkeypatch, "wrong", attentions=lambda: {"": attention}, formula=True)
    found = session_in(tmp_path).measure(point("wrong", dtype="bfloat16"))
    assert found is not None
    assert "times rounding" in found["skipped"]


def test_only_a_few_heads_of_a_large_problem_are_compared_and_a_wrong_one_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(exactness.ALL_PAIRS, "cpu", 100)
    monkeypatch.setitem(exactness.TILE, "cpu", 200)  # many blocks of rows
    for method in ("tisa", "shaw:clip=2", "shaw:clip=2,per_head=true", "alibi", "fire", "tupe"):
        problem = Problem(replace(TINY, method=method, n_heads=3, batch=3, causal=True))
        check = Check(problem)
        assert check.heads.tolist() == check.batches.tolist() == [0, 2]
        whole = problem.double()
        wanted = whole.run(
            lambda p: attend_rows(p.call(), slice(0, 24)), d_out=check.d_out.double()
        )
        for name, truth in check.truth.items():
            want = wanted[name]
            want = check._select(want) if name in ("out", "q", "k", "v") else want
            assert_close(truth, want)
        assert check(ours("auto")).exact

        def wrong(problem: Problem) -> Tensor:
            out = ours("auto")(problem)
            return torch.cat([out[:, :2], out[:, 2:] * 1.001], dim=1)

        assert not check(wrong).exact


def test_nan_is_not_exact() -> None:
    check = Check(Problem(TINY))
    verdict = check(lambda problem: ours("auto")(problem) * float("nan"))
    assert not verdict.exact
    assert verdict.where == "out"


def test_what_cannot_run_here_does_not_fit_or_fails_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(problem: Problem) -> Tensor:
        raise NotImplementedError("no such kernel\nand a long story")

    contender(monkeypatch, "fails", attentions=lambda: {"": fails})
    contender(monkeypatch, "huge", needs=lambda point: 10**15)

    def full(problem: Problem) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate")

    contender(monkeypatch, "full", attentions=lambda: {"": full})
    run = session_in(tmp_path)
    for name, method, why in (
        ("flash", "nope", "does not run on cpu"),
        ("fails", "tisa", "NotImplementedError: no such kernel"),
        ("full", "tisa", "ran out of memory"),
        ("eager", "shaw", "a dense bias has no place for values by lag"),
        ("article", "tisa", "the article's attention is for the method shaw"),
        ("naive", "shaw:per_head=true", "with tables that heads share"),
        ("whence:fused", "fire", "cannot run this call"),
        ("whence:auto", "cope", "for causal attention only"),
        ("huge", "tisa", "needs about 1000000 GB"),
        ("nobody", "tisa", "Unknown contender 'nobody'"),
    ):
        found = run.measure(point(name, method))
        assert found is not None
        assert why in found["skipped"], name
        assert found["ms"] is None
    # The system killed the process that measured the memory.
    monkeypatch.setattr(peak_memory, "peak_of", lambda point, threads: None)
    found = run.measure(point("plain", "nope"))
    assert found is not None
    assert found["skipped"] == "ran out of memory"


def test_of_several_variants_the_fastest_counts_and_those_that_fail_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(problem: Problem) -> Tensor:
        raise RuntimeError("out of shared memory\n...")

    slow, fast = (lambda problem: ours("auto")(problem) for _ in range(2))
    times = iter([{"median": 3.0}, {"median": 2.0}, timing.quantiles([2.0])])
    monkeypatch.setattr(timing, "timed", lambda *_, **__: next(times))
    contender(monkeypatch, "tiled", attentions=lambda: {"a": fails, "b": slow, "c": fast})
    found = session_in(tmp_path).measure(point("tiled"))
    assert found is not None
    assert found["variant"] == "c"
    assert found["notes"] == {"a": "out of shared memory"}
    contender(monkeypatch, "none fits", attentions=lambda: {"a": fails, "b": fails})
    found = session_in(tmp_path).measure(point("none fits"))
    assert found is not None
    assert found["skipped"] == "a: out of shared memory; b: out of shared memory"


def test_when_the_time_is_spent_it_stops_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 1.0, 99.0, 99.0, 99.0, 99.0])
    monkeypatch.setattr(session.time, "monotonic", lambda: next(clock, 99.0))
    monkeypatch.setattr(timing, "timed", lambda *_, **__: timing.quantiles([2.0]))
    run = session_in(tmp_path, seconds=50.0)
    first, second = point("plain", "nope"), point("whence:auto")
    assert run.measure(first) is not None
    assert run.measure(second) is None
    assert run.measure(first) is not None  # what is known costs no time
    written = json.loads((tmp_path / "bench.json").read_text())
    assert len(written["records"]) == 1
    assert written["stopped"] == "the 50 seconds given were spent"
    assert {"cpu", "torch", "python", "commit"} <= set(written["machine"])
    assert list(tmp_path.iterdir()) == [tmp_path / "bench.json"]


def test_a_plan_is_a_product_that_puts_contenders_of_one_problem_together() -> None:
    plan = Plan("cpu", methods=("tisa", "t5"), lengths=(64, 32), tokens=64, n_heads=2)
    points = list(plan.points())
    assert {p.contender for p in points} == {
        "whence:auto",
        "plain",
        "eager",
        "eager-index",
        "sdpa-dense",
        "article",
        "naive",
    }
    problems = [p.problem for p in points]
    changes = sum(a != b for a, b in itertools.pairwise(problems))
    assert changes == len(set(problems)) - 1
    assert {p.batch for p in points if p.mode == "both"} == {1, 2}
    assert {p.batch for p in points if p.mode == "decode"} == {1, 2}
    assert points[0].n == 32
    with pytest.raises(ValueError, match=r"Unknown peer 'flsh'\. Did you mean 'flash'"):
        Plan("cpu", peers=("flsh",))
    with pytest.raises(ValueError, match="nothing to measure"):
        Plan("cpu", lengths=())


def test_the_command_writes_json_and_figures_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "timed", lambda *_, **__: timing.quantiles([2.0]))
    out = tmp_path / "bench"
    options = ["--methods", "tisa,shaw:clip=2", "--lengths", "16,24", "--modes", "both,decode"]
    options += ["--heads", "2", "--head-sizes", "8", "--tokens", "24", "--device", "cpu"]
    options += ["--peers", "plain,eager"]
    done = CliRunner().invoke(app, ["bench", *options, "--out", str(out)], env={"COLUMNS": "150"})
    assert done.exit_code == 0, done.output
    results = json.loads((out / "bench.json").read_text())
    assert results["config"]["methods"] == ["tisa", "shaw:clip=2"]
    assert {r["n"] for r in results["records"]} == {16, 24}
    assert all(r["skipped"] is None or r["ms"] is None for r in results["records"])
    names = {path.name for path in out.iterdir()}
    assert "both-tisa-d8.png" in names
    assert "decode-shaw-clip2-d8-b2.png" in names
    assert "both, heads of 8" in done.output
    assert "left out: eager, shaw:clip=2: a dense bias has no place" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "tsia"], "Unknown method 'tsia'"),
        (["--lengths", "12,many"], "--lengths takes whole numbers"),
        (["--modes", "backwards"], "Unknown mode 'backwards'"),
        (["--dtype", "int8"], "Unknown dtype 'int8'"),
        (["--seconds", "0"], "--seconds must be positive"),
        (["--device", "tpu"], "Unknown device 'tpu'"),
    ],
)
def test_bad_options_are_one_line_and_leave_nothing(
    tmp_path: Path, options: list[str], message: str
) -> None:
    done = CliRunner().invoke(app, ["bench", "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def small_bar(bar: gpu.Bar) -> gpu.Bar:
    """The same on a CPU: n / 512, the limits of a GPU by PyTorch's own choice."""
    names = {"whence:fused": "whence:auto", "flash": "plain", "cudnn": "plain"}

    def small(p: Point) -> Point:
        n = max(16, p.n // 512)
        name = names.get(p.contender, p.contender)
        changes = {"n": n, "n_heads": 2, "d_head": 8, "batch": min(p.batch, 2)}
        return replace(p, contender=name, device="cpu", dtype="float32", **changes)

    return replace(bar, a=small(bar.a), b=small(bar.b))


def test_the_bars_of_the_gpu_are_judged_and_written_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "timed", lambda *_, **__: timing.quantiles([2.0]))
    bars = list(gpu.bars())
    whats = [bar.what for bar in bars]
    assert len(set(whats)) == len(whats)
    assert whats[0] == "TISA, one layer, as called, over FA2 without bias, n=128"
    run = session_in(tmp_path)
    found = gpu.measure(run, [small_bar(bar) for bar in bars])
    by_name = {bar["what"]: bar for bar in found}
    first = by_name["TISA over FA2 without bias, n=512"]
    assert (first["value"], first["limit"], first["held"]) == (1.0, 1.6, True)
    assert by_name["eager over TISA, n=16,384, time"]["held"] is False
    flex = by_name["Flex, best tiles, over TISA, n=8,192"]
    assert flex["held"] is flex["value"] is None
    assert "does not run on cpu" in flex["why_not"]
    assert "MISS  eager over TISA, n=16,384, time: 1.00 (at least 60)" in capsys.readouterr().out
    assert json.loads((tmp_path / "bench.json").read_text())["bars"] == found


def test_the_bars_script_says_that_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert gpu.main([]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_the_memory_of_a_point_is_that_of_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    big = point("eager", n=1024)
    peak = peak_memory.peak_of(big, 1)
    square = 2 * 2 * 1024**2 * 4  # bytes of one [b, h, n, n]
    assert peak is not None
    assert 2 * square < peak < 8 * square


def test_a_fresh_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(RuntimeError) as caught:
        peak_memory.peak_in_fresh_process(["-c", "raise SystemExit('no memory here')"])
    assert session.first_line(caught.value) == "no memory here (in a fresh process)"
    assert peak_memory.peak_in_fresh_process(["-c", "import os; os.kill(os.getpid(), 9)"]) is None


def test_without_linux_memory_is_not_measured_and_the_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak_memory, "PROC", tmp_path)
    found = session_in(tmp_path).measure(point("plain", "nope"))
    assert found is not None
    assert "memory can be measured on Linux alone" in found["skipped"]


def test_the_commit_is_that_of_our_sources_and_of_no_repository_around_them(tmp_path: Path) -> None:
    def git(*command: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True)

    ours, installed = tmp_path / "ours.py", tmp_path / "installed.py"
    ours.touch()
    git("init")
    git("add", "ours.py")
    git("commit", "-m", "first")
    installed.touch()
    assert re.fullmatch(r"[0-9a-f]{12}", commit(ours) or "")
    assert commit(installed) is None
    ours.write_text("changed")
    assert (commit(ours) or "").endswith("-dirty")


def test_a_missing_extra_for_figures_shows_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("whence.report")]:
        monkeypatch.delitem(sys.modules, name)
    done = CliRunner().invoke(app, ["bench", "--out", str(tmp_path / "out"), "--device", "cpu"])
    assert done.exit_code == 1
    assert "whence[plot]" in done.stderr
    assert not (tmp_path / "out").exists()


def test_every_contender_has_a_title_and_ours_are_the_backends() -> None:
    assert all(isinstance(entry, Contender) and entry.title for entry in CONTENDERS.values())
    assert [name for name in CONTENDERS if name.startswith("whence:")] == [
        "whence:auto",
        "whence:fused",
        "whence:sdpa",
        "whence:reference",
    ]


@pytest.mark.triton
@pytest.mark.parametrize("method", ["tisa", "shaw:clip=3", "t5"])
@pytest.mark.parametrize("mode", ["both", "decode"])
def test_the_fused_kernels_are_measured_in_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, mode: str
) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("run with TRITON_INTERPRET=1, as `make test` does")
    monkeypatch.setattr(timing, "timed", lambda *_, **__: timing.quantiles([2.0]))
    found = session_in(tmp_path).measure(point("whence:fused", method, mode=mode, causal=True))
    assert found is not None
    assert found["skipped"] is None
    assert found["error"] <= 2
