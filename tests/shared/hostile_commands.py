"""Hostile command lines, drawn from a seed, and what each must keep to.

Commands and options are read off the command line itself, so a new one is tried without a change
here. `python tests/shared/hostile_commands.py 10000` tries as many by hand and prints those that
fail, each with the seed that draws it again.
"""

import inspect
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin

from typer.models import ArgumentInfo
from typer.testing import CliRunner

from whence.cli.root import app
from whence.methods import METHODS
from whence.methods.spec import options_of

MEMORY = 3 << 30  # bytes that a command may ask for besides what the process has
SECONDS = 100
DEEP = "[" * 100_000
PROGRESS = re.compile(r" *\d+% ")  # what a long command says without a terminal

WHOLE = ["0", "-1", "1", "2", "3", "8", "-0", "2147483648", str(2**63 - 1), str(2**63), "9" * 20]
REAL = ["0", "-1", "0.5", "nan", "inf", "-inf", "1e308", "1e-320", "1e39", "-1e39"]
NUMBERS = [
    *WHOLE,
    "9" * 5000,
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "1e-320",
    "1e39",
    "",
    "x",
    "0x10",
    "²",
]
WORDS = ["", " ", "\n", "$x_{$", "$", "\\frac{", "[red]", "[/]", ":wave:", "%s", "{0}", "<script>"]
WORDS += [
    "💥",
    "é" * 300,
    "x" * 5000,
    "-",
    "--",
    "..",
    "none",
    "all",
    "auto",
    "=",
    ",",
    ",,",
    "+",
    ":",
]
SPECS = [
    "",
    "+",
    ":",
    "=",
    ",",
    "tisa+",
    ":::",
    "tisa:",
    "tisa::",
    "tisa:=3",
    "tisa:kernels",
    "TISA",
]
SPECS += ["tisa,tisa", "tisa:kernels=5,,", "os:system", "no_such_module:Wave", "sys:path", "a.b:c"]
SPECS += [
    "tisa:kernels=5+" * 50 + "nope",
    "nope,tisa+nope",
    "Transformer-XL",
    "tisa:kernels=5,nope",
]

# What keeps a command cheap where its other arguments happen to be right: before them, so that
# they win, or behind.
BEFORE = {
    "bench": ["--quick", "--lengths", "8", "--tokens", "8"],
    "criteria": ["--methods", "nope"],
    "lm": ["--methods", "nope", "--data", "two_bytes.txt", "--steps", "1", "--device", "cpu"],
}
BEHIND = {
    "bench": ["--seconds", "0.1", "--no-figures"],
    "demo": ["--no-train", "--out", "file.txt/out"],
    "explore": ["--port", "65536"],  # else it would serve for ever
}


class TooLongError(Exception):
    """Not TimeoutError, which a command would take for an error of the system."""


def write_world(folder: Path) -> None:
    """Files and folders, sound and broken, for commands that run in `folder`."""
    files: dict[str, str | bytes] = {
        "file.txt": "some text\n" * 40,
        "two_bytes.txt": "ab",
        "empty": "",
        "binary.safetensors": bytes(range(256)) * 8,
        "deep.json": DEEP,
        "scores.csv": "model,score\na,1\nb,nan\n",
        "config.toml": 'methods = ["nope"]\nsteps = 99999999999999999999\n',
        "odd.toml": "methods = 5\n",
        "model/config.json": json.dumps({"model_type": "bert"}),
        "deep/config.json": DEEP,
        "m$_{/config.json": "[]",
        "own/config.json": json.dumps({"model_type": "bert", "whence": {"position": 5}}),
        "own/model.safetensors": b"\x00" * 64,
        "results/lm.json": DEEP,
        "results2/a.json": json.dumps({"kind": "Inspection"}),
        "results3/criteria.json": json.dumps({"kind": "CriteriaReport", "rows": 5}),
        "results3/$x.json": "[1, 2",
        "STS-B/dev.tsv": "a\tb\n",
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def command_line(seed: int) -> list[str]:
    """The command line of a seed."""
    draw = random.Random(seed)
    command: Any = draw.choice(app.registered_commands).callback
    name = command.__name__.replace("_", "-")
    arguments, options, often = [], [], draw.choice([0.05, 0.1, 0.25])
    for parameter in inspect.signature(command).parameters.values():
        hint, info = get_args(parameter.annotation)
        required = parameter.default is parameter.empty
        if isinstance(info, ArgumentInfo):
            many = draw.choice([1, 1, 2, 3]) if get_origin(hint) is list else 1
            if required or draw.random() < 0.5:
                arguments += [_value(draw, parameter.name, hint, info) for _ in range(many)]
        elif draw.random() < (0.95 if required else often):
            # Within Annotated, typer keeps the first name of an option where a default would be.
            names = [text for text in (info.default, *info.param_decls) if isinstance(text, str)]
            names = (
                "/".join(names).split("/") if names else [f"--{parameter.name.replace('_', '-')}"]
            )
            options.append(draw.choice(names))
            if bool not in (hint, *get_args(hint)):
                options.append(_value(draw, parameter.name, hint, info))
    if draw.random() < 0.03:
        options.append(draw.choice(["--no-such-option", "-x", "--out"]))
    options = [*BEFORE.get(name, []), *options, *BEHIND.get(name, [])]
    return [name, *options, *(["--"] if arguments else []), *arguments]


def _value(draw: random.Random, name: str, hint: Any, info: Any) -> str:
    if name in ("method", "methods", "to", "name"):
        return _spec(draw)
    if name == "out":  # results go nowhere else
        return draw.choice(["out", "new/$x", "file.txt", "file.txt/x", "/dev/null/x", "x" * 300])
    kinds = {hint, *get_args(hint)}
    if {int, float} & kinds:  # most are right for the command line, so that the command sees them
        return draw.choice(draw.choice([WHOLE if int in kinds else REAL] * 9 + [NUMBERS]))
    if name in ("lengths", "eval_lengths", "head_sizes", "learning_rate"):
        return ",".join(draw.choices(NUMBERS, k=draw.choice([1, 1, 2])))
    choices = (info.metavar or "").split("|")
    paths = [str(path) for path in sorted(Path().rglob("*"))]
    return draw.choice([draw.choice(WORDS), draw.choice(paths), draw.choice(choices), "missing/x"])


def _spec(draw: random.Random) -> str:
    if draw.random() < 0.3:
        return draw.choice([*SPECS, *WORDS])
    parts = []
    for _ in range(draw.choice([1, 1, 1, 2])):
        name = draw.choice(list(METHODS))
        wanted = [*options_of(METHODS[name]), "no_such"]
        chosen = draw.sample(wanted, min(len(wanted), draw.choice([0, 1, 1, 2])))
        values = [draw.choice([*NUMBERS, *WORDS[:6], "true", "none"]) for _ in chosen]
        options = ",".join(f"{key}={value}" for key, value in zip(chosen, values, strict=True))
        parts.append(f"{name}:{options}" if options else name)
    return draw.choice(["+", ","]).join(parts)


def fault(arguments: list[str]) -> str | None:
    """What is wrong with how a command took it, in the current folder; None if nothing is.

    It ends in order, or with one line on stderr, nothing on stdout and nothing left behind.
    """
    before = _listed()
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "".join(traceback.format_exception(result.exception))
    if result.exit_code == 0:
        _remove(_listed() - before)
        return None
    if result.exit_code not in (1, 2):
        return f"exit code {result.exit_code}: {result.output}"
    left = _listed() - before
    if left:
        _remove(left)
        return f"left behind: {sorted(map(str, left))} after {result.stderr}"
    if result.stderr.startswith(
        ("Usage:", "Error:")
    ):  # an option that is not there, or without value
        return None
    lines = [line for line in result.stderr.splitlines() if not PROGRESS.match(line)]
    if result.stdout or len(lines) != 1 or not lines[0].startswith("whence: "):
        return f"not one line: {result.stdout!r} and {result.stderr!r}"
    return None


def _listed() -> set[Path]:
    return set(Path().rglob("*"))


def _remove(paths: set[Path]) -> None:
    for path in sorted(paths, reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@contextmanager
def limits() -> Iterator[None]:
    """Little memory, and an alarm for a command that does not end."""
    sizes = Path("/proc/self/statm")
    used = int(sizes.read_text().split()[0]) * os.sysconf("SC_PAGESIZE") if sizes.exists() else 0
    before = resource.getrlimit(resource.RLIMIT_AS)
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> int:
    """Try so many seeds from a first one on."""
    n, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    n_faults = 0

    def too_long(*_: object) -> None:
        raise TooLongError(f"it runs longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, too_long)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_world(Path())
        with limits():
            for seed in range(first, first + n):
                arguments = command_line(seed)
                signal.alarm(SECONDS)
                found = fault(arguments)
                signal.alarm(0)
                if found is not None:
                    n_faults += 1
                    print(
                        f"seed {seed}: {[x[:60] for x in arguments]}\n{found[-3000:]}", flush=True
                    )
                if (seed - first + 1) % 250 == 0:
                    print(f"{seed - first + 1} tried, {n_faults} faults", flush=True)
        os.chdir("/")
    print(f"{n} hostile command lines, {n_faults} faults")
    return int(n_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
