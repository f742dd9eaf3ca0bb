"""Jobs that end in every way, for processes that are to start fast: nothing here needs torch."""

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from whence.experiments.job_queue import AT, DONE, FAILED, LATE


def work(pipe: Connection, place: int, given: str) -> None:
    """Their names say how they end; `given` is a file that lists those begun."""
    while (job := pipe.recv()) is not None:
        name, seed = job[:2]
        with Path(given).open("a") as log:
            log.write(f"{name}.{seed}\n")
        if name == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "fails":
            pipe.send((FAILED, "ValueError: no"))
            return
        if name == "hangs":
            time.sleep(60)
        pipe.send((AT, "50%"))
        pipe.send((LATE if name == "late" else DONE, "as it should"))
