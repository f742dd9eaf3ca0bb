"""An image's patches as a sequence: row by row, after the tokens that stand for no patch."""

import math

from jaxtyping import Bool, Int
from torch import Tensor

from whence.checks import at_least, require


def grid_of(max_length: int, height: int | None, width: int | None, prefix: int) -> tuple[int, int]:
    """(height, width) as given; a missing one is the least with which the grid holds all patches.

    With neither, the width is the square root of the number of patches, rounded down.
    """
    at_least(0, prefix=prefix)
    for name, size in (("height", height), ("width", width)):
        if size is not None:
            at_least(1, **{name: size})
    patches = max_length - prefix
    if height is None or width is None:
        require(
            patches >= 1,
            f"max_length = {max_length} leaves no patch after prefix = {prefix} tokens. "
            "Give height and width, or a longer max_length.",
        )
    if width is None:
        width = math.isqrt(patches) if height is None else -(-patches // height)
    if height is None:
        height = -(-patches // width)
    return height, width


def patch_lags(
    q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"], width: int, prefix: int
) -> tuple[Int[Tensor, "q k"], Int[Tensor, "q k"]]:
    """(dy, dx), key - query, of each pair of patches; a prefix token counts as the first patch."""
    query, key = ((pos - prefix).clamp(min=0) for pos in (q_pos, k_pos))
    dy = (key // width)[None, :] - (query // width)[:, None]
    dx = (key % width)[None, :] - (query % width)[:, None]
    return dy, dx


def pairs_with_prefix(
    q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"], prefix: int
) -> tuple[Bool[Tensor, "q 1"], Bool[Tensor, "1 k"]]:
    """Which queries, and which keys, are prefix tokens."""
    return (q_pos < prefix)[:, None], (k_pos < prefix)[None, :]
