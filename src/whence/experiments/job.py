"""One job of a sweep: run once, by one process at a time, and its result written whole."""

import shutil
from pathlib import Path
from typing import Any, TypeVar, cast

from whence.analysis.json_result import Result
from whence.checks import at_least, require
from whence.experiments.folder import CHECKPOINTS, RESULT, load_result
from whence.experiments.full_disk import full_disk_named
from whence.experiments.lock import only_one
from whence.experiments.processes import meet, processes
from whence.experiments.progress import Say, silent
from whence.experiments.sweep import J, R, Sweep

AnyResult = TypeVar("AnyResult", bound=Result)


def run_job(
    sweep: Sweep[J, R],
    job: J,
    *,
    say: Say = silent,
    deadline: float | None = None,
    side_by_side: int = 1,
) -> R:
    """The result of a job if it is there, else run for, from the last checkpoint on.

    Of several processes the first one writes; the others wait for its file. Another run of the same
    job is waited for.
    """
    at_least(1, side_by_side=side_by_side)
    folder = sweep.folder(job)
    path = folder / RESULT
    if not path.is_file():
        with full_disk_named(folder), only_one(folder, say=say, deadline=deadline):
            if not path.is_file():
                found = sweep.run(
                    job, folder, say=say, deadline=deadline, side_by_side=side_by_side
                )
                if processes()[0] == 0:
                    assert found is not None
                    found.save(path)
                meet()
    result = cast(R, finished(path, sweep.result, sweep.fingerprint, job))
    sweep.accept(job, result)
    if processes()[0] == 0 and not sweep.keeps_checkpoints(result):
        # here and not after the result is written, as a kill may have come in between
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return result


def finished(path: Path, kind: type[AnyResult], fingerprint: str, job: Any) -> AnyResult:
    """The result of a job that was run before, of the experiment with this fingerprint."""
    result = load_result(kind, path, way_out="Delete it to run the job again.")
    wanted = {"fingerprint": fingerprint, **job._asdict()}
    require(
        all(getattr(result, name) == value for name, value in wanted.items()),
        f"{path} is a result of another experiment. Give another --out, or delete it.",
    )
    return result
