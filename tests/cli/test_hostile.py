"""Hostile command lines: each ends in order or with one line, and leaves nothing behind."""

import io
import sys
from pathlib import Path

import pytest

import hostile_commands
from whence.cli import main
from whence.cli.errors import last_resort, one_line_errors

SEEDS = range(100)


@pytest.mark.parametrize(
    "seeds",
    [SEEDS[::3], *(pytest.param(SEEDS[i::3], marks=pytest.mark.slow) for i in (1, 2))],
    ids=("a third", "another", "the last"),
)
def test_a_hundred_hostile_command_lines(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile_commands.write_world(Path())
    with hostile_commands.limits():
        found = {
            seed: hostile_commands.fault(hostile_commands.command_line(seed)) for seed in seeds
        }
    faults = {seed: text for seed, text in found.items() if text is not None}
    assert not faults


def test_the_hundred_try_every_command_and_more_try_every_kind_of_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile_commands.write_world(Path())
    lines = [hostile_commands.command_line(seed) for seed in SEEDS]
    assert {line[0] for line in lines} == {
        command.callback.__name__.replace("_", "-")
        for command in hostile_commands.app.registered_commands
    }
    more = [hostile_commands.command_line(seed) for seed in range(1000)]
    words = " ".join(word for line in more for word in line)
    for word in ("nan", "inf", "9" * 20, str(2**63), "missing/x", "file.txt/x", "deep.json", "$"):
        assert word in words


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["params", "--length", "9" * 20], "at most 2147483647"),
        (["methods", "--length", "9" * 20], "at most 2147483647"),
        (["explain", "nope", "--length", "9" * 20], "at most 2147483647"),
        (["explain", "alibi", "--heads", "9" * 12], "n_heads must be at most 65536"),
        (["explain", "rope", "--d-head", "0"], "d_head must be at least 1"),
        (["explore", "--host", "192.0.2.1"], "cannot serve on 192.0.2.1: "),
        (["explore", "--host", "::1"], "cannot serve on ::1: "),
        (["inspect", "~nobody-of-this-name/x"], "~nobody-of-this-name/x"),
        (["params", "--heads", "0"], "must be at least 1, got 0"),
        (["explain", "tisa", "--batch", "9" * 18], "not enough memory"),
        (["criteria", "--methods", "learned:max_length=2000000000"], "GB are needed"),
        (["explain", "sinusoidal:amplitude=inf"], "amplitude must be a finite number, got 'inf'"),
        (["explain", "sinusoidal:amplitude=nan"], "amplitude must be a finite number, got 'nan'"),
        (["explain", "sinusoidal:amplitude=1e39"], "amplitude must be a finite number of at most"),
        (["lm", "--config", "nofile.toml"], "nofile.toml: No such file"),
        (["report", "results"], "whence:"),
    ],
    ids=lambda part: " ".join(part)[:40] if isinstance(part, list) else "",
)
def test_what_was_once_a_traceback_is_one_line(
    arguments: list[str], phrase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile_commands.write_world(Path())
    with hostile_commands.limits():
        result = hostile_commands.CliRunner().invoke(hostile_commands.app, arguments)
    assert result.exit_code == 2, result.exception
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert phrase in result.stderr


def test_what_nobody_foresaw_is_one_line_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped, last_resort(), one_line_errors():
        raise TypeError("not\nforeseen")
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("whence: this is a mistake in whence ")
    assert "TypeError (test_hostile.py, line" in said
    assert said.count("\n") == 1


def test_other_errors_of_torch_are_not_taken_for_missing_memory() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"), one_line_errors():
        raise RuntimeError("size mismatch for weight")


def test_a_terminal_that_cannot_show_a_letter_gets_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setattr(sys, "argv", ["whence", "explain", "tisa+é\udcff"])
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = (stream.detach().getvalue().decode() for stream in streams)
    assert (stopped.value.code, out) == (2, "")
    assert err.startswith(r"whence: Unknown method '\xe9\udcff'.")
