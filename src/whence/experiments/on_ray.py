"""The jobs of a sweep on a Ray cluster, as many at a time as it has room for."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from whence.experiments.config import LMConfig
from whence.experiments.results import Run, n_runs
from whence.experiments.training import device_of

LOCAL = "local"

Say = Callable[[str, float], None]


def run_on_ray(
    config: LMConfig,
    lists: Iterable[list[Run]],
    out: Path,
    *,
    address: str,
    say: Say,
    side_by_side: int,
) -> None:
    """All runs, one list after another, as the next list may depend on the results of the last.

    A job runs on one GPU, or on as many threads as this process. Each writes its own folder, which
    the cluster's machines must all see, and where results are read from, so that a sweep on Ray and
    a serial one give the same table, but for the speed: jobs that share a machine's cores have none
    of their own.
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
        folder = str(out.resolve())
        n_done, total = 0, n_runs(config)
        for runs in lists:
            at_once = max(side_by_side, min(len(runs), room))
            waiting = [
                remote.remote(config.to_json(), *run, folder, threads, at_once) for run in runs
            ]
            while waiting:
                (done,), waiting = ray.wait(waiting, num_returns=1)
                ray.get(done)  # an error of the job is raised here
                n_done += 1
                say(f"{n_done} of {total} jobs done", n_done / total)
    finally:
        if ours:
            ray.shutdown()


def _room(nodes: list[dict[str, Any]], share: int) -> int:
    """The most jobs that one machine of the cluster takes at a time."""
    cores = [node["Resources"].get("CPU", 0) for node in nodes if node["Alive"]]
    return max((int(n // share) for n in cores), default=1)


def _run(
    config: str, method: str, seed: int, rate: float, out: str, threads: int, at_once: int
) -> None:
    """Run a job in a worker, with the driver's threads: their number changes the order of sums."""
    import torch

    from whence.experiments.sweep import run_one

    torch.set_num_threads(threads)
    read = LMConfig.from_json(config)
    run_one(read, method, seed, Path(out), learning_rate=rate, side_by_side=at_once)
