"""A lag bias that is made only where somebody looks at it."""

from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from whence.lag.bias import LagBias
from whence.lag.line import Line


class LazyBias(LagBias):
    """What a kernel can make of `tensors()` itself; others find it made, as in any LagBias.

    Until then it is those very tensors: what is written into them changes the bias. It has constant
    tails.
    """

    def __init__(self) -> None:
        # By whether gradients were recorded: what was made without them has none to give later.
        self._made: dict[bool, LagBias] = {}

    @abstractmethod
    def make(self) -> LagBias:
        """The same bias with its band."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the band."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the band."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What it is made of."""

    def made(self) -> LagBias:
        """The same bias with its band, made once."""
        recorded = torch.is_grad_enabled()
        if recorded not in self._made:
            self._made[recorded] = self.make()
        return self._made[recorded]

    @property
    def band(self) -> Float[Tensor, "b h q lag"]:
        """Of the bias as made."""
        return self.made().band

    @property
    def left(self) -> Line | None:
        """Of the bias as made."""
        return self.made().left

    @property
    def right(self) -> Line | None:
        """Of the bias as made."""
        return self.made().right

    @property
    def endless(self) -> bool:
        """It has tails."""
        return True

    @property
    def sloped(self) -> bool:
        """They are constant."""
        return False
