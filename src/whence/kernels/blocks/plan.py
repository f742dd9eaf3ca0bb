"""How a call is cut into blocks of query rows, and the keys of a block into near and far."""

from dataclasses import dataclass, replace

from torch import Tensor

from whence.kernels.call import Sight
from whence.kernels.mask import Mask

MOST_ROWS = 256  # query rows in a block
MOST_LOGITS = 1 << 20  # logits of a block on a CPU, over all heads: its caches hold so many
MOST_LOGITS_ON_GPU = 1 << 26  # a GPU would spend a smaller block's time on launching kernels
MOST_KEPT_WEIGHTS = 1 << 22  # a call with no more weights than this keeps them for backward
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


def is_small(q: Tensor, sight: Sight) -> bool:
    """Whether saving the weights costs less than computing them again."""
    b, h, n_q, _ = q.shape
    return b * h * n_q * sight.n_k <= MOST_KEPT_WEIGHTS


def may_split(q: Tensor, sight: Sight, *, flat: bool, dropout: float) -> bool:
    """Whether PyTorch's flash kernel for the CPU, which gives a log-sum-exp, can take far keys.

    `flat` says that the tails of the bias do not slope. A call that `is_small` does without it.
    """
    return (
        flat
        and q.device.type == "cpu"
        and not dropout
        and sight.mask is None
        and sight.window == (None, None)
    )


def rows_in_a_block(q: Tensor, sight: Sight, reach: int) -> int:
    """As many query rows as keep the logits of a block within the caches."""
    b, h, n_q, _ = q.shape
    width = min(2 * reach + MOST_ROWS, sight.n_k)
    if is_small(q, sight):
        return max(1, min(MOST_ROWS // 2, n_q))
    most = MOST_LOGITS if q.device.type == "cpu" else MOST_LOGITS_ON_GPU
    return max(16, min(MOST_ROWS, n_q, most // max(1, b * h * width)))


def plan_of(
    q: Tensor,
    sight: Sight,
    *,
    reach: int,
    flat: bool,
    scale: float,
    dropout: float,
    seed: int,
    keep_weights: bool,
) -> Plan:
    """The plan of a call; `keep_weights` allows to keep them where they are few."""
    small = is_small(q, sight)
    split = not small and may_split(q, sight, flat=flat, dropout=dropout)
    return Plan(
        sight,
        scale,
        dropout,
        seed,
        rows=rows_in_a_block(q, sight, reach if split else sight.n_k),
        split=split,
        keep_weights=keep_weights and small,
        reach=reach,
    )
