"""What is finished of a plan, as one small file that goes from one machine to the next."""

import io
import math
import tarfile
from pathlib import Path

from lm_plan import Plan
from whence.analysis.lm_results import Job
from whence.experiments import LMConfig
from whence.experiments.folder import EXPERIMENT, RESULT
from whence.experiments.job_queue import FAILURE
from whence.experiments.lm.data import TOKENIZER
from whence.experiments.lm.results import RESULTS
from whence.files import replace_file

KEPT = (EXPERIMENT, TOKENIZER, RESULTS, f"jobs/*/{RESULT}", f"jobs/*/{FAILURE}")


def unpack(path: Path, out: Path) -> None:
    """Take over the finished jobs of an earlier machine; what is here already stays."""
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            if not (out / member.name).exists():
                archive.extract(member, out, filter="data")


def pack(plan: Plan, out: Path, path: Path) -> None:
    """Write all finished jobs into one file, without checkpoints, which are too large to travel.

    So are the pictures of all jobs: they are kept of seed 0 at the learning rate that is the
    method's best so far, and the numbers of every job.
    """
    with replace_file(path) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for found in sorted(out.glob("logs/*.txt")):
            archive.add(found, str(found.relative_to(out)))
        for name, config in plan.experiments.items():
            for found, content in _files(config, out / name):
                entry = tarfile.TarInfo(str(found.relative_to(out)))
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    print(f"packed {path.name}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


def _files(config: LMConfig, folder: Path) -> list[tuple[Path, bytes]]:
    paths = [path for pattern in KEPT for path in sorted(folder.glob(pattern))]
    jobs = {path: Job.load(path) for path in paths if path.name == RESULT}
    shown = {_best(jobs, method) for method in config.methods}
    return [
        (path, path.read_bytes())
        if path not in jobs or path in shown
        else (path, jobs[path].lighter().to_json().encode())
        for path in paths
    ]


def _best(jobs: dict[Path, Job], method: str) -> Path | None:
    """The job of seed 0 with the smallest tuning loss; with one learning rate the only one."""
    tried = [(path, job) for path, job in jobs.items() if (job.method, job.seed) == (method, 0)]
    whole = [
        (math.inf if job.tuning_loss is None else job.tuning_loss, path)
        for path, job in tried
        if not job.stopped
    ]
    return min(whole)[1] if whole else None
