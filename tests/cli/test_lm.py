"""`whence lm` at the command line: what it prints, writes, refuses, and leaves as it was."""

import dataclasses
import errno
import io
import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from error_lines import LOG_LINE, fails_with
from lm_settings import OPTIONS, TINY, assert_same_numbers, flags, text_file, tiny
from undrawn import undrawn
from whence.analysis.lm_results import Language
from whence.cli import demo as demo_command
from whence.cli import progress
from whence.cli.root import app
from whence.experiments import LMConfig, run_lm
from whence.experiments.lm.config import VOCABULARY
from whence.experiments.lm.tokens import StoredTokenizer
from whence.experiments.progress import OutOfTimeError
from whence.models import WhenceForCausalLM


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a finished comparison, not to be changed."""
    folder = tmp_path_factory.mktemp("lm")
    config = tiny(text_file(folder), ("tisa", "learned"))
    with undrawn():
        assert run("lm", *flags(config), "--out", folder / "out").exit_code == 0
    return folder


def test_the_command_ranks_methods_and_writes_page_table_and_figures(finished: Path) -> None:
    out = finished / "out"
    config = tiny(finished / "text.txt", ("tisa", "learned"))
    result = run("lm", *flags(config), "--out", out)  # all jobs are done: nothing is trained
    assert result.exit_code == 0, result.output
    assert "learned knows 16 positions" in result.stdout
    assert result.stdout.splitlines()[-1] == f"wrote {out / 'page.html'}"
    for name in ("lm.json", "table.md", "table.tex", "figures/length.png", "tokenizer.json"):
        assert (out / name).stat().st_size > 0
    with undrawn():
        found = json.loads(run("lm", *flags(config), "--out", out, "--json").stdout)
        markdown = run("lm", *flags(config), "--out", out, "--format", "markdown").stdout
    assert found["lengths"] == [16, 32]
    assert {row["method"] for row in found["rows"]} == {"tisa", "learned"}
    assert markdown.startswith("| method | loss at 16 | loss at 32 |")
    assert (out / "table.md").read_text() in markdown
    results = Language.load(out / "lm.json")
    assert results.machine["torch"] == torch.__version__
    assert results.config["steps"] == TINY["steps"]
    job = results.jobs[1]
    assert job.method == "learned"
    assert [trace.step for trace in job.toeplitz] == [0, 2, 4, 6, 8, 10, 12]
    assert job.positional == 16 * 32
    assert job.tokens_a_second is not None
    assert job.tokens_a_second > 0
    assert job.peak_bytes is None or job.peak_bytes > 1e6


def logged(folder: Path) -> tuple[list[int], list[float]]:
    """Steps and losses, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload().Scalars("train/loss")
    return [event.step for event in events], [event.value for event in events]


def test_each_job_leaves_its_loss_curve_for_tensorboard(finished: Path) -> None:
    logs = finished / "out" / "tensorboard"
    jobs = Language.load(finished / "out" / "lm.json").jobs
    assert {path.name for path in logs.iterdir()} == {"tisa.seed-0", "learned.seed-0"}
    for job in jobs:
        steps, losses = logged(logs / f"{job.method}.seed-0")
        assert steps == job.steps.tolist()
        torch.testing.assert_close(losses, job.train_loss.tolist(), rtol=1e-6, atol=0)


def test_a_run_that_died_and_went_on_has_each_step_in_its_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(text_file(tmp_path))
    forward, calls = WhenceForCausalLM.forward, [0]

    def dies(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += self.training
        if calls[0] == 8:  # steps 2, 4 and 6 are logged, of 4 there is a checkpoint
            raise KeyboardInterrupt
        return forward(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(WhenceForCausalLM, "forward", dies)
        with pytest.raises(KeyboardInterrupt):
            run_lm(config, tmp_path / "out")
    job = run_lm(config, tmp_path / "out").jobs[0]
    steps, losses = logged(tmp_path / "out" / "tensorboard" / "tisa.seed-0")
    assert steps == job.steps.tolist() == [2, 4, 6, 8, 10, 12]
    torch.testing.assert_close(losses, job.train_loss.tolist(), rtol=1e-6, atol=0)


def test_report_draws_a_comparison_again(finished: Path) -> None:
    page = finished / "out" / "page.html"
    before = page.read_bytes()
    page.unlink()
    result = run("report", finished / "out")
    assert result.exit_code == 0, result.output
    assert page.read_bytes() == before


# In a log file


@pytest.mark.usefixtures("_undrawn")
def test_a_log_file_says_what_is_done_and_how_long_it_takes(tmp_path: Path) -> None:
    config = tiny(text_file(tmp_path))
    with pytest.raises(OutOfTimeError):
        run_lm(config, tmp_path / "out", deadline=time.monotonic())
    result = run("lm", *flags(config), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert all(LOG_LINE.fullmatch(line) for line in lines)
    assert [line.strip().partition(";")[0] for line in lines] == [
        "0% loading libraries",
        "0% making the data ready",
        "14% tisa: going on from step 2",
        "21% tisa: training",
        "85% tisa: testing at length 16",
        "92% tisa: testing at length 32",
        "100% drawing the page",
    ]


def test_a_line_comes_again_when_a_thing_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    with progress.progress_bar(left=True) as say:
        for second in range(100):
            now[0] = float(second)
            say(f"training (loss {second})", 0.5 + second / 200)
    assert shown.getvalue().splitlines() == [
        " 50% training (loss 0); 0:00 gone",
        " 66% training (loss 31); 0:31 gone, 1:09 left",
        " 81% training (loss 62); 1:02 gone, 0:38 left",
        " 97% training (loss 93); 1:33 gone, 0:07 left",
    ]
    assert progress.duration(9_661.0) == "2:41:01"


@pytest.mark.usefixtures("_undrawn")
def test_ctrl_c_is_one_line_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(text_file(tmp_path))
    command = ("lm", *flags(config), "--out", tmp_path / "out")

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WhenceForCausalLM, "forward", interrupted)
        fails_with(run(*command), 130, "interrupted; the same command goes on")
    assert run(*command).exit_code == 0


@pytest.mark.filterwarnings("default::whence.experiments.progress.DamagedCheckpointWarning")
@pytest.mark.usefixtures("_undrawn")
def test_a_damaged_checkpoint_is_one_line(tmp_path: Path) -> None:
    config = tiny(text_file(tmp_path))
    with pytest.raises(OutOfTimeError):
        run_lm(config, tmp_path / "out", deadline=time.monotonic())
    (state,) = tmp_path.glob("out/jobs/*/checkpoints/checkpoint-2/optimizer.pt")
    state.write_bytes(b"")
    result = run("lm", *flags(config), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    others = [line for line in result.stderr.splitlines() if not LOG_LINE.fullmatch(line)]
    assert others == [
        f"whence: {state.parent} is damaged: optimizer.pt is not what was written; "
        "training begins anew"
    ]


def test_the_help_shows_the_defaults_that_the_configuration_has() -> None:
    command = typer.main.get_command(app).commands["lm"]  # type: ignore[attr-defined]
    shown = {option.name: option.show_default for option in command.params}
    for field in dataclasses.fields(LMConfig):
        default = field.default
        name = (OPTIONS | {"compile": "compile_"}).get(field.name, field.name)
        if field.name in ("methods", "data", "valid", "task", "tokenizer", "eval_lengths"):
            continue
        if field.name == "vocab_size":
            default = VOCABULARY
        elif field.name == "learning_rates":
            (default,) = default  # type: ignore[misc]
        elif isinstance(default, bool):
            assert default is False
            assert shown[name] == f"no-{field.name.replace('_', '-')}", name
            continue
        assert shown[name] == str(default), name
    assert "[default: (200)]" in run("lm", "--help").stdout


# What goes wrong


def test_a_folder_of_another_experiment_is_refused_and_stays_as_it_is(finished: Path) -> None:
    out, before = finished / "out", contents(finished / "out")
    config = tiny(finished / "text.txt")
    fails_with(
        run("lm", *flags(replace(config, steps=16, batch=8)), "--out", out),
        2,
        "holds another experiment: steps is 12 there and 16 here; batch is 4 there and 8 here",
    )
    other = finished / "other.txt"
    other.write_text((finished / "text.txt").read_text() + "more", encoding="utf-8")
    fails_with(
        run("lm", *flags(replace(config, data=str(other))), "--out", out),
        2,
        "holds another experiment: its data has SHA-256",
    )
    task = tiny(None, task="copy")
    fails_with(run("lm", *flags(task), "--out", out), 2, "task is text there and copy here")
    fails_with(
        run("lm", *flags(config), "--out", finished), 2, "no experiment.json", "an empty folder"
    )
    assert contents(out) == before


def test_a_result_of_another_experiment_is_not_taken_for_ours(
    finished: Path, tmp_path: Path
) -> None:
    config = tiny(finished / "text.txt", steps=14)
    place = tmp_path / "out" / "jobs" / "tisa.seed-0" / "result.json"
    place.parent.mkdir(parents=True)
    with pytest.raises(ValueError, match="it is not of whence lm"):
        run_lm(config, tmp_path / "out")
    (tmp_path / "out" / "jobs").rename(tmp_path / "jobs")
    run_lm(config, tmp_path / "out")
    place.write_bytes((finished / "out" / "jobs" / "tisa.seed-0" / "result.json").read_bytes())
    with pytest.raises(ValueError, match="a result of another experiment"):
        run_lm(config, tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "more", "phrases"),
    [
        ("", {}, ("the data file", "text.txt is empty")),
        (" \n\n", {}, ("is empty",)),
        ("a", {}, ("is too short", "no text for validation")),
        ("ab", {}, ("is too short", "no text for validation")),
        ("a few words", {}, ("shorter than a block", "a block has 16")),
        ("word and word " * 30, {}, ("shorter than a block", "needs 33", "--valid")),
        (None, {}, ("there is no text file",)),
        (b"\xff\xfe\xfa", {}, ("is not a text in UTF-8",)),
        ("x" * 5000, {"vocab_size": 20}, ("vocab_size must be at least 258, got 20",)),
    ],
)
def test_data_that_cannot_be_used_is_one_line_and_leaves_no_folder(
    text: Any, more: dict[str, Any], phrases: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    config = tiny(path, **more)
    fails_with(run("lm", *flags(config), "--out", tmp_path / "out"), 2, *phrases)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_for_other_data_is_refused(finished: Path, tmp_path: Path) -> None:
    theirs = finished / "out" / "tokenizer.json"
    config = replace(tiny(text_file(tmp_path, 9000)), tokenizer=str(theirs))
    command = ("lm", *flags(config), "--out", tmp_path / "out")
    fails_with(run(*command), 2, "was trained on other data", "Leave --tokenizer out")
    same_text = replace(tiny(finished / "text.txt", vocab_size=301), tokenizer=str(theirs))
    command = ("lm", *flags(same_text), "--out", tmp_path / "out")
    fails_with(run(*command), 2, "was trained for 300 tokens, not for 301")
    missing = replace(tiny(finished / "text.txt"), tokenizer="none.json")
    fails_with(run("lm", *flags(missing), "--out", tmp_path / "out"), 2, "there is no tokenizer")
    stored = StoredTokenizer.load(theirs)
    spaced = json.dumps(json.loads(stored.tokenizer), indent=3)  # as another version might train it
    replace(stored, tokenizer=spaced).save(tmp_path / "spaced.json")
    again = replace(tiny(finished / "text.txt"), tokenizer=str(tmp_path / "spaced.json"))
    command = ("lm", *flags(again), "--out", finished / "out")
    fails_with(run(*command), 2, "is another tokenizer than", "jobs there may have used it")
    swapped = tmp_path / "swapped"
    swapped.mkdir()
    (swapped / "tokenizer.json").write_bytes(theirs.read_bytes())
    config = tiny(text_file(tmp_path, 9000))
    fails_with(run("lm", *flags(config), "--out", swapped), 2, "was trained on other data")


def test_wrong_use_is_one_line(tmp_path: Path) -> None:
    data = text_file(tmp_path)
    out = ("--out", tmp_path / "out")
    fails_with(run("lm", "--data", data, *out), 2, "name the methods to compare")
    fails_with(run("lm", "--methods", "tsia", "--data", data, *out), 2, "Did you mean 'tisa'")
    fails_with(
        run("lm", "--methods", "tisa", *out), 2, "there is no text to train on: give data (--data)"
    )
    fails_with(
        run("lm", "--methods", "tisa", "--data", data, "--eval-lengths", "128,x", *out),
        2,
        "--eval-lengths takes whole numbers",
    )
    fails_with(
        run("lm", "--methods", "tisa", "--data", data, "--format", "word", *out), 2, "format 'word'"
    )
    fails_with(
        run("lm", "--methods", "tisa", "--data", data, "--seconds", "0", *out), 2, "--seconds"
    )
    if not torch.cuda.is_available():
        fails_with(
            run("lm", "--methods", "tisa", "--data", data, "--device", "cuda", *out), 2, "no NVIDIA"
        )
    fails_with(run("lm", "--config", tmp_path / "no.toml", *out), 2, "cannot read", "No such file")
    fails_with(run("lm", "--config", tmp_path, *out), 2, "cannot read", "Is a directory")
    (tmp_path / "file").write_text("")
    config = tiny(data)
    fails_with(run("lm", *flags(config), "--out", tmp_path / "file" / "x"), 1, "Not a directory")
    assert not (tmp_path / "out").exists()


def test_a_method_that_the_objective_cannot_have_is_refused_before_it_trains(
    tmp_path: Path,
) -> None:
    config = tiny(text_file(tmp_path), ("cope",), objective="masked")
    result = run("lm", *flags(config), "--out", tmp_path / "out")
    fails_with(result, 2, "for causal attention alone")


def test_the_time_given_ends_a_run_in_order(tmp_path: Path) -> None:
    config = tiny(text_file(tmp_path))
    command = ("lm", *flags(config), "--out", tmp_path / "out")
    result = run(*command, "--seconds", "0.000001")
    assert result.exit_code == 3
    assert "0 of 1 jobs are done; the same command goes on" in result.stderr
    assert Language.load(tmp_path / "out" / "lm.json").jobs == ()
    fails_with(run("report", tmp_path / "out"), 2, "has no finished job yet")
    assert run(*command).exit_code == 0


def test_models_that_were_not_kept_cannot_be_asked_for_later(finished: Path) -> None:
    config = tiny(finished / "text.txt", ("tisa",), keep_models=True)
    result = run("lm", *flags(config), "--out", finished / "out")
    fails_with(result, 2, "a finished job whose model was not kept", "Leave --keep-models out")


def test_the_last_step_is_looked_at_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps need not be a multiple of those between two logs."""
    config = tiny(text_file(tmp_path), steps=13)
    job = run_lm(config, tmp_path / "whole").jobs[0]
    assert job.steps.tolist() == [2, 4, 6, 8, 10, 12, 13]
    calls, forward = [0], WhenceForCausalLM.forward

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = forward(self, *args, **kwargs)
        calls[0] += self.training
        if calls[0] == 13:
            found.loss = found.loss * float("nan")
        return found

    monkeypatch.setattr(WhenceForCausalLM, "forward", broken)
    job = run_lm(config, tmp_path / "out").jobs[0]
    assert job.stopped == "loss is nan by step 13; checkpoint-12 is kept"
    calls[0] = 11  # NaN by the first log, when the time is spent too: training again would not help
    job = run_lm(config, tmp_path / "late", deadline=time.monotonic()).jobs[0]
    assert job.stopped == "loss is nan by step 2; no checkpoint was saved before"


@pytest.mark.parametrize("where", ["loss", pytest.param("gradient", marks=pytest.mark.slow)])
def test_nan_ends_a_run_and_keeps_the_last_good_checkpoint(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forward = [0], WhenceForCausalLM.forward

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = forward(self, *args, **kwargs)
        calls[0] += self.training
        if self.training and calls[0] > (6 if where == "loss" else 7):
            if where == "loss":
                found.loss = found.loss * float("nan")
            else:
                found.loss.register_hook(lambda grad: grad * float("nan"))
        return found

    monkeypatch.setattr(WhenceForCausalLM, "forward", broken)
    config = tiny(text_file(tmp_path), ("tisa", "rope"))
    result = run("lm", *flags(config), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f"tisa: seed 0: {where} is nan by step 8; checkpoint-4 is kept" in result.stdout
    first, second = Language.load(tmp_path / "out" / "lm.json").jobs
    assert first.losses == ()
    assert "no checkpoint was saved before" in second.stopped  # NaN from its first step on
    kept = tmp_path / "out" / "jobs" / "tisa.seed-0" / "checkpoints" / "checkpoint-4"
    model = WhenceForCausalLM.from_pretrained(kept)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert [path.name for path in kept.parent.iterdir()] == ["checkpoint-4"]


@pytest.mark.slow
def test_a_write_that_fails_is_one_line_and_a_later_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = text_file(tmp_path)
    whole = run_lm(tiny(data, ("tisa", "rope")), tmp_path / "whole")
    command = ("lm", *flags(tiny(data, ("tisa", "rope"))), "--out", tmp_path / "out")
    assert run("lm", *flags(tiny(data)), "--out", tmp_path / "out").exit_code == 0
    before = contents(tmp_path / "out" / "jobs" / "tisa.seed-0")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        fails_with(run(*command), 1, "cannot write", "rope.seed-0", "No space left on device")
    assert contents(tmp_path / "out" / "jobs" / "tisa.seed-0") == before
    assert run(*command).exit_code == 0
    for ours, theirs in zip(
        Language.load(tmp_path / "out" / "lm.json").jobs, whole.jobs, strict=True
    ):
        assert_same_numbers(ours, theirs)


def test_a_full_disk_is_one_line_and_earlier_results_stay(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        data, out = text_file(tmp_path), disk / "out"
        assert run("lm", *flags(tiny(data)), "--out", out).exit_code == 0
        before = contents(out)
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "filler").write_bytes(bytes(free - 300_000))
        command = ("lm", *flags(tiny(data, ("tisa", "rope"))), "--out", out)
        fails_with(run(*command), 1, "cannot write", "No space left on device")
        assert {name: contents(out)[name] for name in before} == before
        (disk / "filler").unlink()
        assert run(*command).exit_code == 0
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_the_demo_trains_and_ends_with_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_command, "METHODS", ("tisa",))
    monkeypatch.setattr(demo_command, "model_folder", lambda: None)
    monkeypatch.setattr(demo_command, "SETTING", {**TINY, "steps": 2, "save_every": 2})
    monkeypatch.setattr(demo_command, "TRAINED", "alibi,learned")
    result = run("demo", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"wrote {tmp_path / 'lm' / 'page.html'}"
    assert "alibi" in result.stdout
