"""Lag values: a vector for each lag, weighted like the values (Shaw et al.'s second table)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from whence.checks import require


@dataclass(frozen=True, eq=False)
class LagValues:
    """out_i += sum_j weight_ij * table[clip(lag, -reach, reach) + reach], lag = key - query.

    Axes [h|1, 2 * reach + 1, d_v]; beyond the reach the end rows go on for ever.

        >>> import torch
        >>> from whence import LagValues, attend
        >>> q, k, v = torch.randn(3, 1, 2, 10, 4)
        >>> values = LagValues(torch.randn(2, 7, 4))
        >>> values.reach
        3
        >>> attend(q, k, v, values=values).shape
        torch.Size([1, 2, 10, 4])
    """

    table: Float[Tensor, "h lag d"]

    def __post_init__(self) -> None:
        shape = tuple(self.table.shape)
        require(
            len(shape) == 3 and shape[1] % 2 == 1,
            lambda: (
                f"LagValues.table needs shape [h|1, lag, d_v] with an odd lag axis, got {shape}."
            ),
        )

    @property
    def reach(self) -> int:
        """The largest |lag| with a row of its own."""
        return self.table.shape[1] // 2

    def widen(self, reach: int) -> "LagValues":
        """The same function with a longer table."""
        require(
            reach >= self.reach,
            f"cannot widen LagValues of reach {self.reach} to {reach}: it is wider.",
        )
        lag = torch.arange(-reach, reach + 1, device=self.table.device)
        return LagValues(self.table[:, lag.clamp(-self.reach, self.reach) + self.reach])

    def __add__(self, other: "LagValues") -> "LagValues":
        reach = max(self.reach, other.reach)
        return LagValues(self.widen(reach).table + other.widen(reach).table)
