"""How a call is cut into blocks of query rows, and the keys of a block into near and far."""

from dataclasses import dataclass, replace

from whence.kernels.call import Sight
from whence.kernels.mask import Mask

FEWEST_FAR_KEYS = 128  # with fewer, merging a flash call costs more than the call saves


@dataclass(frozen=True, eq=False)
class Plan:
    """The settings of a blocked attention.

    sight         which keys a query row may look at
    seed          of the dropout, which backward draws again
    rows          query rows in a block
    split         whether the far keys go to PyTorch's flash kernel
    keep_weights  whether the attention weights are saved for backward or computed again
    reach         the largest |lag| at which the bias or the value table is not yet its tail
    """

    sight: Sight
    scale: float
    dropout: float
    seed: int
    rows: int
    split: bool
    keep_weights: bool
    reach: int

    def with_mask(self, mask: Mask | None) -> "Plan":
        """The same plan with this mask in place of its own."""
        return replace(self, sight=replace(self.sight, mask=mask))

    def blocks(self) -> list[slice]:
        """The query rows of each block."""
        n = self.sight.n_q
        return [slice(i, min(i + self.rows, n)) for i in range(0, n, self.rows)]

    def ranges(self, rows: slice) -> tuple[slice, slice, slice]:
        """The near, far left and far right keys of a block; a far range may be empty."""
        keys = self.sight.key_range(rows)
        low, high = keys.start, keys.stop
        if self.split:
            first, last = self.sight.q_start + rows.start, self.sight.q_start + rows.stop - 1
            left, right = first - self.reach, last + self.reach + 1
            if left - keys.start >= FEWEST_FAR_KEYS:
                low = min(left, keys.stop)
            if keys.stop - right >= FEWEST_FAR_KEYS:
                high = max(right, keys.start)
        return slice(low, high), slice(keys.start, low), slice(high, keys.stop)
