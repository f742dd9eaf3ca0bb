"""The jobs of a sweep on a Ray cluster, as many at a time as it has room for."""

import socket
from pathlib import Path
from typing import Any

from whence.checks import require
from whence.experiments.progress import Say
from whence.experiments.sweep import J, R, Sweep

LOCAL, AUTO = "local", "auto"  # a cluster on this machine: a new one, or one that runs
SECONDS = 10.0  # that a cluster has to answer


def check_address(address: str) -> None:
    """Refuse a cluster that does not answer: Ray itself would wait for it for minutes."""
    if address in (LOCAL, AUTO):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    require(
        bool(host) and port.isdecimal() and int(port) < 2**16,
        f"--ray takes {LOCAL}, {AUTO} or an address such as 10.0.0.1:6379, got {address!r}.",
    )
    try:
        socket.create_connection((host, int(port)), timeout=SECONDS).close()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"no Ray cluster answers at {address}: {why}. --ray {LOCAL} starts one here."
        ) from None


def run_on_ray(sweep: Sweep[J, R], *, address: str, say: Say, side_by_side: int) -> None:
    """All jobs, one list after another, as the next list may depend on the results of the last.

    A job runs on one GPU, or on as many threads as this process. Each writes its own folder, which
    the cluster's machines must all see, and where results are read from, so that a sweep on Ray and
    a serial one give the same table, but for the speed: jobs that share a machine's cores have none
    of their own.
    """
    import ray  # an extra
    import torch

    gpu = sweep.device.type == "cuda"
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
        made_of = (type(sweep), sweep.config, str(sweep.out.resolve()))
        n_done, total = 0, sweep.n_jobs()
        for jobs in sweep.waves():
            at_once = max(side_by_side, min(len(jobs), room))
            waiting = [remote.remote(*made_of, job, threads, at_once) for job in jobs]
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
    kind: type[Sweep[J, R]], config: Any, out: str, job: J, threads: int, at_once: int
) -> None:
    """Run a job in a worker, with the driver's threads: their number changes the order of sums."""
    import torch

    from whence.experiments.job import run_job

    torch.set_num_threads(threads)
    run_job(kind(config, Path(out)), job, side_by_side=at_once)
