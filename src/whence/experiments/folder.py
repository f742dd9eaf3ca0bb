"""The folder of an experiment: claimed once, and refused to every other experiment."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from whence.analysis.json_result import Result
from whence.checks import require
from whence.experiments.full_disk import full_disk_named
from whence.experiments.lock import only_one
from whence.experiments.processes import meet, processes

EXPERIMENT, JOBS, RESULT, CHECKPOINTS = "experiment.json", "jobs", "result.json", "checkpoints"

R = TypeVar("R", bound=Result)


@dataclass(frozen=True, eq=False)
class Experiment(Result):
    """What a folder is for: what all of its jobs have in common."""

    fixed: dict[str, Any]
    data_sha256: str


def check_claim(
    out: Path, ours: Experiment, *, command: str, allowed: Collection[str] = ()
) -> None:
    """Refuse a folder of another experiment, or of something else, before anything is written.

    `allowed` names files that may be there before the folder is claimed.
    """
    path = out / EXPERIMENT
    if not path.is_file():
        strange = [x.name for x in out.iterdir()] if out.is_dir() else []
        strange = [x for x in strange if not x.startswith(".") and x not in allowed]
        require(
            not strange or path.is_file(),  # another process may just have claimed it
            f"{out} holds {', '.join(sorted(strange)[:3])} and no {EXPERIMENT}, so it is not of "
            f"{command}. Give an empty folder as --out.",
        )
        return
    there = load_result(Experiment, path, way_out="Give another --out.")
    differ = [
        f"{key} is {there.fixed.get(key)} there and {value} here"
        for key, value in ours.fixed.items()
        if there.fixed.get(key) != value
    ]
    if there.data_sha256 != ours.data_sha256:
        shas = there.data_sha256[:12], ours.data_sha256[:12]
        differ.append("its data has SHA-256 {}, this data {}".format(*shas))
    require(
        not differ,
        f"{out} holds another experiment: {'; '.join(differ)}. Give another --out.",
    )


def claim(
    out: Path,
    ours: Experiment,
    *,
    command: str,
    allowed: Collection[str] = (),
    write: Callable[[], None] = lambda: None,
) -> None:
    """Say what the folder is for, before the first job; of several processes the first writes.

    `write` puts what else all jobs need into the folder. If it raises, the folder is not claimed.
    """
    check_claim(out, ours, command=command, allowed=allowed)
    with full_disk_named(out), only_one(out):
        if processes()[0] == 0:  # another experiment may have come in between
            check_claim(out, ours, command=command, allowed=allowed)
            write()
            if not (out / EXPERIMENT).is_file():
                ours.save(out / EXPERIMENT)
        meet()


def load_result(kind: type[R], path: Path, *, way_out: str) -> R:
    """A file of this folder; one that is damaged is named in the error, with the way out."""
    try:
        return kind.load(path)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}). {way_out}") from error


def where_run(
    here: dict[str, Any], path: Path, results: R, jobs: Callable[[R], Collection[Any]]
) -> dict[str, Any]:
    """The machine of results: this one, unless `path` has had all of their jobs, so none ran now.

    `jobs` names the jobs of results. A damaged file tells nothing: it is about to be written anew.
    """
    try:
        there: Any = load_result(type(results), path, way_out="")
    except (FileNotFoundError, ValueError):
        return here
    ran_now = set(jobs(results)) - set(jobs(there))
    return here if ran_now or not there.machine else dict(there.machine)


def as_file_name(text: str) -> str:
    """A text as a part of a file's name. A sign for a sign, so that x=-1 is not x=1."""
    return re.sub(r"[^A-Za-z0-9.]", "-", text)
