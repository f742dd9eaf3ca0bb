"""What position costs in training: how it is measured, on sizes that any machine can run."""

import itertools
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import lm_clock
import lm_contender
import lm_cost
from lm_contender import ARTICLE, BASELINE, SHAW, TISA
from tables.lm_cost import lm_alone, lm_bars
from tables.results_folder import ResultsFolder
from whence.models import WhenceForCausalLM

SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES = ["--layers", "1", "--heads", "2", "--width", "32", "--lengths", "16", "--tokens", "32,64"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_cost.gc, "unfreeze", lambda: None)  # what conftest.py froze
    monkeypatch.setattr(lm_contender, "VOCABULARY", 64)
    monkeypatch.setattr(lm_clock, "ENOUGH", 3)
    monkeypatch.setattr(lm_cost, "EACH", 0.0)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The modes of torch.compile, which compiles nothing and fails for one graph, and "step"s."""
    modes: list[str | None] = []

    def compile_nothing(model: Any, *, mode: str | None) -> Any:
        modes.append(mode)
        if mode == "reduce-overhead" and model.config.position == SHAW:
            raise RuntimeError("a graph cannot be recorded")
        return model

    monkeypatch.setattr(torch, "compile", compile_nothing)
    begun = torch.compiler, "cudagraph_mark_step_begin"
    monkeypatch.setattr(*begun, lambda: modes.append("step"))
    return modes


@pytest.mark.slow
def test_bars_are_measured_with_each_number_of_tokens_and_in_each_mode(
    tmp_path: Path, compiled: list[str | None]
) -> None:
    out = tmp_path / "results" / "lm" / "cost.json"
    given = ["--out", str(out), "--methods", "learned", "--compile", "--seconds", "90", *SIZES]
    lm_cost.main(given)
    costs = json.loads(out.read_text())
    asked = [(r["contender"], r["tokens"], r["mode"]) for r in costs["turns"]]
    eager, fewer = (BASELINE, "nope", TISA, SHAW), (BASELINE, TISA, SHAW)
    assert asked == [
        *((name, 32, "eager") for name in eager),
        *((name, 64, "eager") for name in eager),
        *((f"{name}, graphed", 32, "graphed") for name in fewer),
        *((f"{name}, compiled", 32, "compiled") for name in fewer),
    ]
    steps = [compiled[: 2 + place].count("step") for place in (0, 5)]
    assert steps == [1, 5]  # each step of a graph is said to begin
    assert [mode for mode in compiled if mode != "step"] == ["reduce-overhead"] * 3 + [None] * 3
    skipped = {r["contender"]: r["skipped"] for r in costs["turns"] if "skipped" in r}
    assert skipped == {f"{SHAW}, graphed": "a graph cannot be recorded"}
    assert [(r["contender"], r["tokens"]) for r in costs["alone"]] == [
        (ARTICLE, 32),
        (BASELINE, 32),
        ("learned", 32),
    ]
    for record in (*costs["turns"], *costs["alone"]):
        if record["contender"] not in skipped:
            assert 0 < record["ms"]["q20"] <= record["ms"]["median"] <= record["ms"]["q80"]
            assert record.get("gpu_ms") is None  # there is none here
    _, base, learned = costs["alone"]
    assert learned["parameters"] - learned["positional"] == base["parameters"]
    limits = [(bar["what"], bar["tokens"], bar["limit"]) for bar in costs["bars"]]
    assert limits == [
        *(("nope", 32, None), (TISA, 32, 0.03), (SHAW, 32, 0.07)),
        *(("nope", 64, None), (TISA, 64, 0.03), (SHAW, 64, 0.07)),
        (f"{TISA}, graphed", 32, 0.03),
        *((f"{TISA}, compiled", 32, 0.03), (f"{SHAW}, compiled", 32, 0.07)),
        (ARTICLE, 32, None),
    ]
    stored = ResultsFolder(tmp_path)
    table = lm_bars(stored)
    assert f"| 16 | 32 | graphed | {SHAW} | a graph cannot be recorded |" in table
    assert f"| 16 | 32 | eager | {ARTICLE} |" in table
    assert table.count("at most 3%") == 4
    assert lm_alone(stored).count("| 16 |") == 3


@pytest.mark.slow
def test_nothing_eager_is_timed_once_the_process_has_profiled(
    tmp_path: Path, compiled: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    built: weakref.WeakSet[Any] = weakref.WeakSet()
    there: list[int] = []
    made, summed_up = lm_contender.Contender.__init__, lm_clock.summed_up

    def building(self: Any, *given: Any) -> None:
        made(self, *given)
        built.add(self)

    def timed(*given: Any) -> dict[str, Any]:
        events.append("timed")
        return summed_up(*given)

    def on_the_gpu(step: Any, device: str) -> dict[str, Any]:
        step()
        events.append("profiled")
        there.append(len(built))
        return {"gpu_ms": 2.0, "launches": 3}

    monkeypatch.setattr(lm_contender.Contender, "__init__", building)
    monkeypatch.setattr(lm_clock, "summed_up", timed)
    monkeypatch.setattr(lm_clock, "on_the_gpu", on_the_gpu)
    out = tmp_path / "cost.json"
    given = ["--out", str(out), "--methods", "learned", "--compile", "--seconds", "90", *SIZES]
    lm_cost.main(given)
    in_order = [(kind, len(list(same))) for kind, same in itertools.groupby(events)]
    eager = [("timed", 4 + 4 + 3), ("profiled", 4 + 4 + 1)]  # turns and alone; turns and article
    assert in_order == [*eager, *(("timed", 2), ("profiled", 2)), *(("timed", 3), ("profiled", 3))]
    assert there[:9] == [1] * 9  # one at a time
    costs = json.loads(out.read_text())
    timed_in_turns = [record for record in costs["turns"] if "skipped" not in record]
    assert {record["gpu_ms"] for record in timed_in_turns} == {2.0}
    assert [record.get("launches") for record in costs["alone"]] == [3, None, None]
    assert {bar["gpu_cost"] for bar in costs["bars"]} == {0.0}


@pytest.mark.slow
def test_what_there_was_no_time_for_is_said_but_the_article_is_measured(
    tmp_path: Path, compiled: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cost.json"
    given = ["--out", str(out), "--methods", "learned", "--compile", "--seconds", "0", *SIZES]
    lm_cost.main(given)
    costs = json.loads(out.read_text())
    assert compiled == []
    left = {r["contender"] for r in (*costs["turns"], *costs["alone"]) if "skipped" in r}
    later = {
        f"{name}, {mode}" for name in (BASELINE, TISA, SHAW) for mode in lm_contender.COMPILERS
    }
    assert left == later | {BASELINE, "learned"}
    said = capsys.readouterr().out
    assert f"n = 16, learned: {lm_cost.SPENT}" in said
    assert said.count(f"GPU: {lm_cost.SPENT}") == 9  # of eight in turns and of the article
    assert costs["alone"][0]["tokens_a_second"] > 0
    assert costs["alone"][0]["unprofiled"] == lm_cost.SPENT


def test_processes_that_warm_the_caches_share_all_contenders_and_write_nothing(
    tmp_path: Path, compiled: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cost.json"
    given = ["--out", str(out), "--methods", f"learned;{TISA}", "--compile", *SIZES]
    for place in range(2):
        lm_cost.main([*given, "--warm", f"{place}/2"])
    said = capsys.readouterr().out.splitlines()
    names = sorted(line.removeprefix("warm: n = 16, ").rpartition(": ")[0] for line in said)
    both = [f"{name}, {mode}" for name in (BASELINE, TISA, SHAW) for mode in lm_contender.COMPILERS]
    assert names == sorted([BASELINE, "nope", TISA, SHAW, "learned", *both])
    assert not out.exists()
    with pytest.raises(SystemExit, match="I/N with 0 <= I < N, got 2/2"):
        lm_cost.main([*given, "--warm", "2/2"])


def test_a_contender_that_fails_in_a_turn_leaves_the_others_their_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, steps = lm_contender.Contender.step, 0

    def failing(self: Any, ids: Any) -> None:
        nonlocal steps
        ours = self.model.config.position == TISA
        steps += ours
        if ours and steps > 6:
            raise RuntimeError("no more")
        step(self, ids)

    monkeypatch.setattr(lm_contender.Contender, "step", failing)
    records, ready = lm_clock.in_turns([BASELINE, TISA], SHAPE, 16, 32, "cpu", 0.0)
    assert records[0]["ms"]["turns"] == 3
    assert records[1]["skipped"] == "no more"
    assert list(ready) == [BASELINE]


def test_a_model_too_large_for_memory_is_measured_with_fewer_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = WhenceForCausalLM.forward

    def limited(self: Any, *, input_ids: Any, **more: Any) -> Any:
        if len(input_ids) > room:
            raise torch.OutOfMemoryError("no room")
        return forward(self, input_ids=input_ids, **more)

    monkeypatch.setattr(WhenceForCausalLM, "forward", limited)
    room = 2
    found = lm_clock.alone("nope", SHAPE, 16, 128, "cpu", 0.0, host=True)
    assert found["tokens"] == 32
    assert found["host_ms"] > 0
    room = 0
    found = lm_clock.alone("nope", SHAPE, 16, 128, "cpu", 0.0)
    assert found["skipped"] == "out of memory with one sequence of 16"


def record(name: str, speed: float, gpu_ms: float | None, **more: Any) -> dict[str, Any]:
    where = {"contender": name, "n": 512, "tokens": 1000} | more
    return {**where, "tokens_a_second": speed, "gpu_ms": gpu_ms}


def test_a_bar_is_held_up_to_its_share_of_the_baseline_of_its_tokens_and_mode() -> None:
    turns = [
        record(BASELINE, 100.0, 9.0),
        record(TISA, 97.5, 10.0),
        record(SHAW, 92.0, None),
        record(f"{BASELINE}, graphed", 200.0, 4.0),
        record(f"{TISA}, graphed", 190.0, 5.0),
        record(f"{TISA}, compiled", 190.0, 5.0),  # its baseline failed
        record(BASELINE, 300.0, 30.0, tokens=4000),
        record(SHAW, 288.0, 32.0, tokens=4000),
        {"contender": TISA, "n": 4096, "tokens": 1000, "skipped": "out of memory"},
    ]
    found = lm_cost.bars(turns, [record(ARTICLE, 25.0, 18.0, tokens=500)])
    shown = [(bar["what"], bar["tokens"], bar["mode"], bar["held"]) for bar in found]
    assert shown == [
        (TISA, 1000, "eager", True),
        (SHAW, 1000, "eager", False),
        (f"{TISA}, graphed", 1000, "graphed", False),
        (SHAW, 4000, "eager", True),
        (ARTICLE, 500, "eager", None),
    ]
    assert [bar["cost"] for bar in found] == pytest.approx([0.025, 0.08, 0.05, 0.04, 0.75])
    assert found[1]["gpu_cost"] is None
    shares = [found[place]["gpu_cost"] for place in (0, 2, 3, 4)]
    assert shares == pytest.approx([0.1, 0.2, 0.0625, 0.75])  # the article's of half the tokens


def test_the_bars_of_a_run_that_did_not_say_tokens_and_mode_are_still_shown(
    tmp_path: Path,
) -> None:
    def made(name: str) -> dict[str, Any]:
        ms = {"median": 2.0, "q20": 1.0, "q80": 3.0}
        return {"contender": name, "n": 512, "tokens": 64, "tokens_a_second": 5.0, "ms": ms}

    bar = {"what": TISA, "n": 512, "cost": 0.25, "limit": 0.03, "held": False}
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32}
    machine = {"cpu": "a CPU", "torch": "2", "commit": "abc"}
    costs = {"config": config | {"steps_a_turn": 4}, "machine": machine, "bars": [bar]}
    path = tmp_path / "results" / "lm" / "cost.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(costs | {"turns": [made(BASELINE), made(TISA)], "alone": []}))
    row = f"| 512 | 64 |  | {TISA} | 5 | 2.0 (1.0 to 3.0) |  | 25.0% |  | at most 3% | missed |"
    assert row in lm_bars(ResultsFolder(tmp_path)).splitlines()
