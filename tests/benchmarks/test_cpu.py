"""The CPU benchmark on tiny sizes: what it writes, and what stops it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cpu
import cpu_contenders as contenders
from whence.bench import peak_memory, wall_time

TINY = contenders.Setting(n_heads=2, d_head=8, threads=1)


@pytest.fixture(scope="module", autouse=True)
def _tiny() -> Iterator[None]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "Setting", lambda: TINY)
        patch.setattr(cpu, "QUICK", {16: 2, 32: 1})
        patch.setattr(cpu, "peak_in_fresh_process", lambda command: 1000 * int(command[4]))
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    assert cpu.main(["--quick", "--out", str(out)]) == 0
    return out


def row(results: dict[str, Any], contender: str, n: int, group: str = "tisa") -> dict[str, Any]:
    (found,) = (
        row
        for row in results["rows"]
        if (row["group"], row["contender"], row["n"]) == (group, contender, n)
    )
    return found


def test_the_benchmark_writes_results_and_figures_and_says_how_the_bars_held(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = json.loads((written / "attention.json").read_text())
    names = [(group, c) for group, members in contenders.GROUPS.items() for c in members]
    assert len(results["rows"]) == 2 * len(names)
    for group, contender in names:
        found = row(results, contender, 32, group)
        assert found["peak_bytes"] == 32_000
        assert found["skipped"] is None
        seconds = found["seconds"]
        assert 0 < seconds["q20"] <= seconds["median"] <= seconds["q80"]
    assert results["config"]["threads"] == 1
    assert {"cpu", "cores", "torch", "python", "commit"} <= set(results["machine"])
    assert set(results["largest_error_in_float64"]) == {
        "tisa whence",
        "tisa sdpa_dense",
        "shaw whence",
    }
    assert [bar["held"] for bar in results["bars"]] == [True, None, None]
    cpu.say_bars(results)
    assert "pass: 1.00 exponent of memory" in capsys.readouterr().out
    figures = {f"{name}.{kind}" for name in ("attention", "shaw") for kind in ("png", "svg")}
    assert {path.name for path in written.iterdir()} == {"attention.json"} | figures


def test_the_figures_are_drawn_again_without_measuring_and_come_out_equal(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "measure", None)
    (tmp_path / "attention.json").write_bytes((written / "attention.json").read_bytes())
    assert cpu.main(["--figure-only", "--out", str(tmp_path)]) == 0
    before, after = (
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in (written, tmp_path)
    )
    assert after == before


@pytest.mark.parametrize("group", ["tisa", "shaw"])
def test_a_contender_that_is_not_exact_stops_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    def wrong(*arguments: Any) -> torch.Tensor:
        return contenders.whence(*arguments) * (1 + 1e-7)

    monkeypatch.setitem(contenders.GROUPS[group], "whence", wrong)
    with pytest.raises(AssertionError, match=f"not exact: {group} whence, n=256, out"):
        cpu.main(["--quick", "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_gradient_alone_stops_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Any) -> torch.Tensor:
        out, offset = contenders.whence(problem), problem.method.offset
        return out + 1e-6 * (offset - offset.detach()).sum()

    monkeypatch.setitem(contenders.GROUPS["tisa"], "whence", wrong)
    with pytest.raises(AssertionError, match="not exact: tisa whence, n=256, raw_offset"):
        contenders.check_exactness(TINY)


def test_a_length_that_memory_has_no_room_for_is_skipped_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "available", lambda: 4 * 16_000)
    results = cpu.measure(TINY, cpu.QUICK, article_up_to=32)
    assert row(results, "eager", 16)["skipped"] is None
    skipped = row(results, "eager", 32)
    assert skipped["skipped"].startswith("needs about")
    assert skipped["seconds"] is skipped["peak_bytes"] is None


@pytest.mark.slow
def test_the_peak_of_a_fresh_process_grows_by_what_the_n_x_n_way_holds() -> None:
    setting = json.dumps({"n_heads": 2, "d_head": 8, "threads": 1})
    small, large = (
        peak_memory.peak_in_fresh_process([cpu.__file__, "--peak", "tisa", "eager", n, setting])
        for n in ("512", "1536")
    )
    assert small is not None
    assert large is not None
    square = 2 * (1536**2 - 512**2) * 4  # bytes of one [h, n, n]
    assert 2.5 * square < large - small < 6 * square


def test_a_process_that_the_system_kills_gives_no_peak_and_a_failing_one_raises() -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert peak_memory.peak_in_fresh_process(["-c", kill]) is None
    with pytest.raises(RuntimeError, match="no such thing"):
        peak_memory.peak_in_fresh_process(["-c", "raise SystemExit('no such thing')"])


def test_a_bar_is_missed_where_the_figure_is_on_the_wrong_side() -> None:
    seconds = {
        ("whence", 512): 1.0,
        ("eager", 512): 0.89,
        ("whence", 4096): 1.0,
        ("eager", 4096): 2.1,
    }
    rows = [
        {
            "group": "tisa",
            "contender": contender,
            "n": n,
            "seconds": {"median": time},
            "peak_bytes": n**1.2,
            "skipped": None,
        }
        for (contender, n), time in seconds.items()
    ]
    found = cpu.bars(rows, cpu.exponents(rows))
    assert [bar["held"] for bar in found] == [False, True, False]
    assert found[0]["value"] == pytest.approx(1.2)


def test_disturbed_samples_are_taken_again_and_the_quietest_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = iter([wall_time.Sample(1.0, 1.0, others) for others in (0.9, 0.0, 0.5, 0.05, 0.0)])
    monkeypatch.setattr(wall_time, "sample", lambda step: next(given))
    found = wall_time.take_turns({"step": lambda: None}, 3)
    assert [s.others for s in found["step"]] == [0.0, 0.05, 0.0]
    assert wall_time.summary(found["step"])["disturbed"] == 0.0


def test_where_others_never_rest_the_limit_ends_it_and_the_share_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wall_time, "sample", lambda step: wall_time.Sample(1.0, 1.0, 0.9))
    calls: list[int] = []
    found = wall_time.take_turns({"step": lambda: calls.append(1)}, 2)
    assert len(found["step"]) == 2
    assert calls == [1]  # the one that does not count; the rest was replaced
    assert wall_time.summary(found["step"])["disturbed"] == 1.0
