"""A table of the two-dimensional lag (Swin, Liu et al., 2021): a learned number a head and lag."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, one_of, require
from whence.lag import DenseBias
from whence.method import Content, PositionMethod
from whence.methods.fixed_length import within
from whence.methods.grid import grid_of, pairs_with_prefix, patch_lags
from whence.methods.starts import falling
from whence.methods.t5 import STARTS
from whence.units import GAIN, Scaled, in_float32, unset_numbers


class Table2d(PositionMethod):
    """b_h(dy, dx) = table[(dy + H - 1) (2W - 1) + dx + W - 1, h], lags key - query, grid H x W.

    Position p is the patch (p // W, p % W), after `prefix` tokens. Without `height` and `width`
    the grid is the least that holds max_length, W its square root rounded down; `max_length` is
    then what the grid holds. Swin indexes its table by query - key: `from_swin` converts. With a
    prefix the table has BEiT's three rows more: prefix to patch, patch to prefix, prefix to
    prefix.

    `table` is read and assigned; what is trained is table / GAIN (whence.units). The starts are
    those of `t5`, with the distance of two patches in place of the lag; "normal" is Swin's.

        >>> method = Table2d(2, 6, height=2, width=3)
        >>> method.matrix(torch.arange(6), torch.arange(6)).shape, method.n_parameters()
        (torch.Size([1, 2, 6, 6]), 30)
    """

    paper = "Liu et al. 2021, arXiv:2103.14030; prefix: Bao et al. 2022, arXiv:2106.08254"
    formula = "((2 * height - 1) * (2 * width - 1) + (3 if prefix else 0)) * n_heads"
    image_sizes = ("height", "width")
    logit_sized = True
    anchored = True
    former_names = {"table": "raw_table"}  # noqa: RUF012

    table = Scaled()

    def __init__(
        self,
        n_heads: int,
        max_length: int,
        *,
        height: int | None = None,
        width: int | None = None,
        prefix: int = 0,
        start: Literal["local", "normal", "zero"] = "local",
    ) -> None:
        super().__init__()
        at_least(1, n_heads=n_heads, max_length=max_length)
        one_of("start", start, STARTS)
        self.height, self.width = grid_of(max_length, height, width, prefix)
        self.n_heads, self.prefix, self.start = n_heads, prefix, start
        self.max_length, self.fixed_length = prefix + self.height * self.width, True
        lags = (2 * self.height - 1) * (2 * self.width - 1)
        self.raw_table = unset_numbers(lags + (3 if prefix else 0), n_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `start` says; pairs with the prefix begin without a preference."""
        table = torch.zeros(self.raw_table.shape)
        if self.start == "normal":
            nn.init.trunc_normal_(table, std=0.02)
        elif self.start == "local":
            dy, dx = torch.meshgrid(
                torch.arange(1.0 - self.height, self.height),
                torch.arange(1.0 - self.width, self.width),
                indexing="ij",
            )
            near = falling(torch.hypot(dy, dx).flatten(), self.n_heads)
            table[: len(near)] = near
        self.table = table

    @classmethod
    def from_swin(
        cls, table: Float[Tensor, "lags h"], *, height: int, width: int, prefix: int = 0
    ) -> "Table2d":
        """A layer with the `relative_position_bias_table` of Swin (or of BEiT, with prefix=1)."""
        method = cls(
            table.shape[1], prefix + height * width, height=height, width=width, prefix=prefix
        )
        require(
            table.shape == method.raw_table.shape,
            f"a table for height {height}, width {width} and prefix {prefix} has "
            f"{method.raw_table.shape[0]} rows, got {table.shape[0]}.",
        )
        lags = (2 * height - 1) * (2 * width - 1)
        # Both lags change sign, which turns the list of all lags around.
        method.table = torch.cat([table[:lags].flip(0), table[lags:]])
        return method

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> DenseBias:
        """The table looked up for each pair."""
        within(self.max_length, f"table2d of {self.height} x {self.width} patches", q_pos, k_pos)
        return DenseBias(self.matrix, q_pos, k_pos, "a lag on a grid has two dimensions")

    def matrix(
        self, q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"]
    ) -> Float[Tensor, "1 h q k"]:
        """The bias of these queries and keys."""
        dy, dx = patch_lags(q_pos, k_pos, self.width, self.prefix)
        row = (dy + self.height - 1) * (2 * self.width - 1) + dx + self.width - 1
        if self.prefix:
            from_prefix, to_prefix = pairs_with_prefix(q_pos, k_pos, self.prefix)
            rows = self.raw_table.shape[0]
            row = row.masked_fill(from_prefix, rows - 3).masked_fill(to_prefix, rows - 2)
            row = row.masked_fill(from_prefix & to_prefix, rows - 1)
        return (GAIN * in_float32(self.raw_table)[row]).permute(2, 0, 1)[None]
