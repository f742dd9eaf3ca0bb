"""Command lines that pages print: what they are, and why one would not work.

Commands that need no data and take no time are run; of others the options and methods are read.
"""

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from typer.main import get_command
from typer.testing import CliRunner

from whence import build
from whence.cli.root import app

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(whence|make|python|pip|torchrun) ")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
QUICK = ("methods", "explain", "params")  # run, not only read
OWN = "my_module"  # of the reader, and not to be had here
SIZES = {"n_heads": 4, "d_head": 16, "d_model": 64, "max_length": 64, "causal": True}


def printed(text: str) -> Iterator[str]:
    """Every command line of a page, in blocks that are not Python and in the middle of prose."""
    for language, block in FENCED.findall(text):
        if language != "python":
            lines = re.sub(
                r"\\\n\s*", "", block
            ).splitlines()  # a backslash goes on in the next line
            yield from (line for line in lines if PROGRAM.match(line))
    prose = FENCED.sub("", text)
    yield from (code for code in INLINE.findall(prose) if PROGRAM.match(code))


def complaint(line: str) -> str | None:
    """Why the command would not work as printed, as far as one can tell without running it."""
    found = PROGRAM.match(line)
    assert found is not None, line
    told = re.sub(r"(?<=\S) {3,}\S.*", "", line[found.end() :])  # what a page says behind a command
    arguments = [x for x in shlex.split(told, comments=True) if x != "..."]
    try:
        return CHECKS[found[1]](arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _whence(arguments: list[str]) -> str | None:
    name, *rest = arguments
    command = COMMANDS.get(name)
    if command is None:
        return f"there is no command {name}"
    if any(x.startswith("[") or x.isupper() for x in rest):
        return None  # a form to be filled in
    given = [*rest] or ["--help"]  # a copy: the parser empties it
    context = command.make_context(name, given, resilient_parsing=not rest)
    specs = str(context.params.get("methods") or context.params.get("to") or "")
    method = context.params.get("method")
    for spec in filter(None, [*re.split(r",(?=[a-z_0-9]+(?:[:+,]|$))", specs), method]):
        if OWN not in spec:
            with torch.device("meta"):
                build(spec, **SIZES)
    if name in QUICK and rest and OWN not in " ".join(rest):
        done = CliRunner().invoke(app, arguments)
        return None if done.exit_code == 0 else done.output
    return None


def _make(arguments: list[str]) -> str | None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {x for x in arguments if "=" not in x}
    missing = {x for x in targets if not re.search(rf"^{x}:", text, re.MULTILINE)}
    return f"no target {missing}" if missing else None


def _python(arguments: list[str]) -> str | None:
    if arguments[0] == "-m":
        return _whence(arguments[2:]) if arguments[1] == "whence" else None
    script = ROOT / arguments[0]
    if not script.is_file():
        return f"there is no {arguments[0]}"
    text = script.read_text(encoding="utf-8")
    missing = [x for x in arguments[1:] if x.startswith("--") and x.partition("=")[0] not in text]
    return f"{arguments[0]} knows no {missing}" if missing else None


def _pip(arguments: list[str]) -> str | None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for argument in arguments:
        wanted = re.fullmatch(r"(?:\.|whence)\[(.*)\]", argument)
        missing = (
            set(wanted[1].split(",")) - set(project["optional-dependencies"]) if wanted else ()
        )
        if missing:
            return f"there are no extras {missing}"
    return None


def _torchrun(arguments: list[str]) -> str | None:
    return _python(arguments[arguments.index("-m") :])


CHECKS: dict[str, Callable[[list[str]], str | None]] = {
    "whence": _whence,
    "make": _make,
    "python": _python,
    "pip": _pip,
    "torchrun": _torchrun,
}
