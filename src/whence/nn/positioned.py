"""One attention with one positional method: every site that attention has, in the right order."""

import torch
from jaxtyping import Float
from torch import Tensor

from whence.kernels import Mask, attend
from whence.method import Content, PositionMethod


def positioned_attention(
    position: PositionMethod,
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b h_kv k d"],
    v: Float[Tensor, "b h_kv k d_v"],
    *,
    x_q: Float[Tensor, "b q d_model"] | None = None,
    x_k: Float[Tensor, "b k d_model"] | None = None,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    k_start: int = 0,
    q_start: int | None = None,
    backend: str = "auto",
) -> Float[Tensor, "b h q d_v"]:
    """`attend` with the heads, score, value and replace sites of a method filled in.

    The first key stands at position k_start and query row i at k_start + q_start + i; q_start is
    n_k - n_q unless given. x_q and x_k, the layer's inputs, are for methods that look at content.
    The input site is not here: what a method adds to the embedding was added before q, k and v.
    """
    n_q, n_k = q.shape[2], k.shape[2]
    q_start = n_k - n_q if q_start is None else q_start
    k_pos = torch.arange(k_start, k_start + n_k, device=q.device)
    q_pos = torch.arange(k_start + q_start, k_start + q_start + n_q, device=q.device)
    content = Content(x_q, x_k, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias = position.logits(q, q_pos, k_pos, content=content)
    if bias is None:
        bias = position.score_term(q, q_pos, k_pos, content=content)
    else:
        scale = 0.0
    return attend(
        position.query_heads(q, q_pos),
        position.key_heads(k, k_pos),
        position.value_heads(v, k_pos),
        bias=bias,
        values=position.value_term(q_pos, k_pos),
        mask=mask,
        causal=causal,
        window=window,
        scale=scale,
        dropout=dropout,
        q_start=q_start,
        backend=backend,
    )
