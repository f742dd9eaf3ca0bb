"""The jobs of a sweep on a Ray cluster, as many at a time as it has room for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from whence.analysis.language import Job
from whence.experiments.config import LMConfig
from whence.experiments.training import device_of

LOCAL = "local"

Say = Callable[[str, float], None]


def run_on_ray(
    config: LMConfig,
    jobs: list[tuple[str, int]],
    out: Path,
    *,
    address: str,
    say: Say,
    side_by_side: int,
) -> list[Job]:
    """All jobs, in the order given. A job runs on one GPU, or on as many threads as this process.

    Each writes its own folder, which the cluster's machines must all see; the results are read from
    there, so that a sweep on Ray and a serial one give the same table, but for the speed: jobs
    that share a machine's cores have none of their own.
    """
    import ray  # an extra
    import torch

    gpu = device_of(config).type == "cuda"
    threads = torch.get_num_threads()
    ours = not ray.is_initialized()
    if ours:
        ray.init(
            address=None if address == LOCAL else address,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
    try:
        share = min(threads, int(ray.cluster_resources().get("CPU", 1)))
        remote: Any = ray.remote(num_cpus=share, num_gpus=1 if gpu else 0, max_retries=2)(_run)
        room = 1 if gpu else _room(ray.nodes(), share)
        beside = max(side_by_side, min(len(jobs), room))
        folder = str(out.resolve())
        waiting = {
            remote.remote(config.to_json(), method, seed, folder, threads, beside): place
            for place, (method, seed) in enumerate(jobs)
        }
        found: dict[int, Job] = {}
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1)
            place = waiting.pop(done[0])
            found[place] = Job.load(Path(ray.get(done[0])))
            say(f"{len(found)} of {len(jobs)} jobs done", len(found) / len(jobs))
    finally:
        if ours:
            ray.shutdown()
    return [found[place] for place in range(len(jobs))]


def _room(nodes: list[dict[str, Any]], share: int) -> int:
    """The most jobs that one machine of the cluster takes at a time."""
    cores = [node["Resources"].get("CPU", 0) for node in nodes if node["Alive"]]
    return max((int(n // share) for n in cores), default=1)


def _run(config: str, method: str, seed: int, out: str, threads: int, beside: int) -> str:
    """One job in a worker, with as many threads as elsewhere: their number changes sums' order."""
    import torch

    from whence.experiments.folder import job_folder
    from whence.experiments.job import RESULT
    from whence.experiments.sweep import run_one

    torch.set_num_threads(threads)
    run_one(LMConfig.from_json(config), method, seed, Path(out), side_by_side=beside)
    return str(job_folder(Path(out), method, seed) / RESULT)
