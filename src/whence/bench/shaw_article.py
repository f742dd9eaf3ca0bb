"""Shaw's attention as its article computes it, and as its equations read: peers for `shaw`.

Shaw et al. (2018) look a vector up for every pair of positions, which gives a tensor [n, n, d] that
batch and heads share, and multiply it with one matrix product a query position:
(n, b * h, d) @ (n, d, n) for the keys, (n, b * h, n) @ (n, n, d) for the values. That avoids the
[b, h, n, n, d] of the equations, and still needs O(n^2 d) memory and as much time as the attention
itself. `whence` needs q @ A_K.T alone, (n, 2 k + 1); this is what it is measured against.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding


def lookup(
    n_q: int, n_k: int, left: int, right: int, *, device: torch.device | None = None
) -> Int[Tensor, "q k"]:
    """The table row of every pair: clip(key - query, -left, right) + left.

    The queries are the last n_q of the n_k positions. For n = 10 and a clip of 3 the first row is
    3 4 5 6 6 6 6 6 6 6.
    """
    place = torch.arange(n_k, device=device)
    lag = place - place[n_k - n_q :, None]
    return lag.clamp(-left, right) + left


def by_position(
    x: Float[Tensor, "b h q m"], pairs: Float[Tensor, "q m p"]
) -> Float[Tensor, "b h q p"]:
    """out[b, h, i] = x[b, h, i] @ pairs[i], batch and heads folded into one axis."""
    b, h, n, m = x.shape
    folded = x.permute(2, 0, 1, 3).reshape(n, b * h, m)
    return (folded @ pairs).view(n, b, h, -1).permute(1, 2, 0, 3)


def article_attention(
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b h k d"],
    v: Float[Tensor, "b h k d"],
    *,
    key_table: Float[Tensor, "lags d"] | None = None,
    value_table: Float[Tensor, "lags d"] | None = None,
    left: int,
    right: int,
    causal: bool = False,
    dropout: float = 0.0,
) -> Float[Tensor, "b h q d"]:
    """Attention with both terms of the article, its tables shared by the heads.

    e_ij = q_i . (k_j + A_K[j - i]) / sqrt(d);  z_i = sum_j alpha_ij (v_j + A_V[j - i]), with lags
    clipped to [-left, right]. Dropout falls on alpha, before both terms of the values.
    """
    row = lookup(q.shape[2], k.shape[2], left, right, device=q.device)
    # F.embedding and not table[row]: the backward of an index adds n^2 vectors one after another.
    logits = q @ k.transpose(-1, -2)
    if key_table is not None:
        logits = logits + by_position(q, embedding(row, key_table).transpose(-1, -2))
    weights = _weights(logits, q.shape[-1], causal)
    weights = torch.dropout(weights, dropout, train=dropout > 0)
    out = weights @ v
    if value_table is not None:
        out = out + by_position(weights, embedding(row, value_table))
    return out


def naive_attention(
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b h k d"],
    v: Float[Tensor, "b h k d"],
    *,
    key_table: Float[Tensor, "lags d"] | None = None,
    value_table: Float[Tensor, "lags d"] | None = None,
    left: int,
    right: int,
    causal: bool = False,
) -> Float[Tensor, "b h q d"]:
    """The same as the two equations read: a key and a value of its own for every pair.

    k_j + A_K[j - i] and v_j + A_V[j - i] are tensors [b, h, q, k, d].
    """
    row = lookup(q.shape[2], k.shape[2], left, right, device=q.device)
    keys, values = (
        x[:, :, None] if table is None else x[:, :, None] + embedding(row, table)
        for x, table in ((k, key_table), (v, value_table))
    )
    logits = (q[:, :, :, None] @ keys.transpose(-1, -2))[..., 0, :]
    weights = _weights(logits, q.shape[-1], causal)
    return (weights[:, :, :, None] @ values)[..., 0, :]


def _weights(logits: Float[Tensor, "b h q k"], d: int, causal: bool) -> Float[Tensor, "b h q k"]:
    logits = logits * d**-0.5
    if causal:
        n_q, n_k = logits.shape[-2:]
        later = torch.ones(n_q, n_k, dtype=torch.bool, device=logits.device).triu(n_k - n_q + 1)
        logits = logits.masked_fill(later, -torch.inf)
    return torch.softmax(logits, dim=-1)
