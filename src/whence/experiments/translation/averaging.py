"""The mean of the weights at the last few steps of training, which is what gets tested."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from whence.experiments.checkpoints import PREFIX

FILE = "average.safetensors"
COUNT = "_count"


class WeightAverage(TrainerCallback):  # type: ignore[misc]
    """Sums the parameters at the last step and at the `number - 1` steps `every` apart before it.

    The sum lives on the device and goes into every checkpoint, so that a run that goes on has the
    same mean as one that was never ended.
    """

    def __init__(self, *, number: int, every: int, steps: int) -> None:
        self.at = {steps - place * every for place in range(number)}
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on from the sum in the checkpoint that training goes on from."""
        if state.global_step:
            self.load(Path(args.output_dir) / f"{PREFIX}{state.global_step}", args.device)

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the weights, at the steps that count."""
        if state.global_step not in self.at:
            return
        found = {name: p.detach().float() for name, p in kwargs["model"].named_parameters()}
        if self.sums:
            sums = [self.sums[name] for name in found]  # those of a file come in another order
            torch._foreach_add_(sums, list(found.values()))
        else:
            self.sums = {name: value.clone() for name, value in found.items()}
        self.count += 1

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the sum into the checkpoint, before that is marked as whole."""
        if self.sums and state.is_world_process_zero:
            tensors = {name: value.contiguous() for name, value in self.sums.items()}
            tensors[COUNT] = torch.tensor(self.count)
            save_file(tensors, Path(args.output_dir) / f"{PREFIX}{state.global_step}" / FILE)

    def load(self, checkpoint: Path, device: torch.device) -> None:
        """Read the sum from a checkpoint, or nothing where it has none yet."""
        self.sums, self.count = {}, 0
        if (checkpoint / FILE).is_file():
            found = load_file(checkpoint / FILE, device=str(device))
            self.count = int(found.pop(COUNT))
            self.sums = found

    @torch.no_grad()
    def put_into(self, model: Any) -> None:
        """Give a model the mean in place of its weights."""
        assert self.count == len(self.at)
        for name, parameter in model.named_parameters():
            parameter.copy_(self.sums[name] / self.count)
