"""From a curve over lags to a tile of logits and back, by shifting rows instead of indexing.

A tile of B query rows and K keys holds T = B + K - 1 lags, and each of its diagonals is one lag.
With the rows in reverse order (last query first), tile[r, c] = curve[r, r + c] for every r. So the
tile is the curve with row r shifted by r places: a view where all rows share one curve, and one
padded copy where each row has its own. `unskew` is the adjoint of `skew` and `fold` that of
`spread`, so each is the other's gradient.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad


def skew(curve: Float[Tensor, "*lead r T"], n_keys: int) -> Float[Tensor, "*lead B K"]:
    """tile[r, c] = curve[r, r + c], rows in reverse order; a curve of one row serves all rows."""
    *lead, rows, length = curve.shape
    if rows == 1:
        return curve[..., 0, :].unfold(-1, n_keys, 1)
    flat = pad(curve.reshape(*lead, rows * length), (0, rows))
    return flat.view(*lead, rows, length + 1)[..., :n_keys]


def unskew(tile: Float[Tensor, "*lead B K"]) -> Float[Tensor, "*lead B T"]:
    """curve[r, r + c] = tile[r, c] and zero elsewhere; a sum over rows then sums diagonals."""
    *lead, rows, n_keys = tile.shape
    length = rows + n_keys - 1
    flat = pad(tile, (0, rows)).reshape(*lead, rows * (length + 1))
    return flat[..., : rows * length].view(*lead, rows, length)


def spread(
    table: Float[Tensor, "*lead L"], first_lag: int, n_lags: int
) -> Float[Tensor, "*lead T"]:
    """A table over lags -reach..reach at n_lags lags from first_lag on, clipped to its ends."""
    reach = table.shape[-1] // 2
    lag = torch.arange(first_lag, first_lag + n_lags, device=table.device)
    return table.index_select(-1, lag.clamp(-reach, reach) + reach)


def fold(curve: Float[Tensor, "*lead T"], first_lag: int, reach: int) -> Float[Tensor, "*lead L"]:
    """A curve over lags summed into -reach..reach; lags beyond are added to the end columns."""
    n_lags = curve.shape[-1]
    low = min(max(-reach - first_lag, 0), n_lags)  # the index of lag -reach, or the nearest
    high = min(max(reach + 1 - first_lag, 0), n_lags)
    out = curve.new_zeros(*curve.shape[:-1], 2 * reach + 1)
    if low < high:
        start = first_lag + low + reach
        out[..., start : start + high - low] = curve[..., low:high]
    if low:
        out[..., 0] += curve[..., :low].sum(-1)
    if high < n_lags:
        out[..., -1] += curve[..., high:].sum(-1)
    return out
