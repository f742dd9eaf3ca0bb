"""`whence lm --fsdp` in one of two gloo processes, killed and run again: by test_fsdp.py.

accelerate takes its FSDP path for GPUs alone. Here it is told that these processes have some, so
that everything but the device is what GPUs would run: sharding, gathering, checkpoints, resuming.
"""

import os
import signal
import sys
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

from whence.cli.root import app
from whence.experiments.lm import training
from whence.experiments.monitor import TrainingMonitor

begin, step_end, train_begin = (
    AcceleratorState.__init__,
    TrainingMonitor.on_step_end,
    TrainingMonitor.on_train_begin,
)
KILLED_AT = 6


def on_gpus(self: Any, *args: Any, **kwargs: Any) -> None:
    """As accelerate would find itself on GPUs."""
    if PartialState._shared_state and not AcceleratorState._shared_state:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    begin(self, *args, **kwargs)


def killed(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    """A step that is the last one of its process."""
    if state.global_step == KILLED_AT:
        os.kill(os.getpid(), signal.SIGKILL)
    step_end(self, args, state, control, **kwargs)


def begun(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    """Say from where, and whether the weights are cut up."""
    kind = "sharded" if isinstance(kwargs["model"], FSDPModule) else "whole"
    print(f"killed at step {KILLED_AT}, went on from {state.global_step}, {kind}", flush=True)
    train_begin(self, args, state, control, **kwargs)


def child(port: str) -> int:
    """A fork that runs the command; how it ended."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.environ["MASTER_PORT"] = port
    try:
        app(sys.argv[2:], prog_name="whence", standalone_mode=False)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    training.check_fsdp = lambda device: None
    AcceleratorState.__init__ = on_gpus
    TrainingMonitor.on_step_end = killed  # type: ignore[method-assign]
    first, second = sys.argv[1].split(",")
    assert child(first) != 0
    TrainingMonitor.on_step_end = step_end  # type: ignore[method-assign]
    TrainingMonitor.on_train_begin = begun  # type: ignore[method-assign]
    sys.exit(child(second))
