"""One attention with one positional method: every site that attention has, in the right order."""

import functools
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.checks import larger, not_nested, surely_equal, whole
from whence.kernels import Mask
from whence.kernels.attend import attend
from whence.kernels.call import PACK, AttentionCall, as_call, check_start
from whence.kernels.reference import attend_with_weights
from whence.kernels.rotary import turned
from whence.lag import Bias, LagValues
from whence.method import Content, PositionMethod


def positioned_attention(
    position: PositionMethod,
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b h_kv k d"],
    v: Float[Tensor, "b h_kv k d_v"],
    *,
    x_q: Float[Tensor, "b q d_model"] | None = None,
    x_k: Float[Tensor, "b k d_model"] | None = None,
    bias: Bias | None = None,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    k_start: int = 0,
    q_start: int | Tensor | None = None,
    backend: str = "auto",
) -> Float[Tensor, "b h q d_v"]:
    """`attend` with the heads, score, value and replace sites of a method filled in.

    The first key stands at position k_start and query row i at k_start + q_start + i; q_start is
    n_k - n_q unless given, and may be a tensor as in `attend`. x_q and x_k, the layer's inputs, are
    for methods that look at content; a `bias` that is no part of the method is added as well.
    The input site is not here: what a method adds to the embedding was added before q, k and v.

        >>> from whence import build
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> positioned_attention(build("rope", n_heads=2, d_head=8), q, k, v, causal=True).shape
        torch.Size([1, 2, 5, 8])
    """
    not_nested(PACK, q=q, k=k, v=v)
    q_start = k.shape[2] - q.shape[2] if q_start is None else q_start
    sites = _sites(position, q, k, v, x_q, x_k, bias, scale, k_start, q_start)
    return attend(
        sites.q,
        sites.k,
        sites.v,
        bias=sites.bias,
        values=sites.values,
        mask=mask,
        causal=causal,
        window=window,
        scale=sites.scale,
        dropout=dropout,
        q_start=q_start,
        backend=backend,
    )


def positioned_attention_with_weights(
    position: PositionMethod,
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b h_kv k d"],
    v: Float[Tensor, "b h_kv k d_v"],
    *,
    x_q: Float[Tensor, "b q d_model"] | None = None,
    x_k: Float[Tensor, "b k d_model"] | None = None,
    bias: Bias | None = None,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    k_start: int = 0,
    q_start: int | Tensor | None = None,
) -> tuple[Float[Tensor, "b h q d_v"], Float[Tensor, "b h q k"]]:
    """`positioned_attention` and its weights before dropout: n x n numbers for every head.

    The output is computed from the weights that are returned, by the definition of attention, so
    a gradient of the output reaches them (`weights.retain_grad()`).

        >>> from whence import build
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> tisa = build("tisa", n_heads=2, d_head=8)
        >>> out, weights = positioned_attention_with_weights(tisa, q, k, v, causal=True)
        >>> torch.allclose(weights @ v, out, atol=1e-6), weights.shape
        (True, torch.Size([1, 2, 5, 5]))
    """
    call = positioned_call(
        position,
        q,
        k,
        v,
        x_q=x_q,
        x_k=x_k,
        bias=bias,
        mask=mask,
        causal=causal,
        window=window,
        scale=scale,
        dropout=dropout,
        k_start=k_start,
        q_start=q_start,
    )
    return attend_with_weights(call)


def positioned_call(
    position: PositionMethod,
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b h_kv k d"],
    v: Float[Tensor, "b h_kv k d_v"],
    *,
    x_q: Float[Tensor, "b q d_model"] | None = None,
    x_k: Float[Tensor, "b k d_model"] | None = None,
    bias: Bias | None = None,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    k_start: int = 0,
    q_start: int | Tensor | None = None,
) -> AttentionCall:
    """The call that `positioned_attention` executes: all of the method's sites, no attention."""
    not_nested(PACK, q=q, k=k, v=v)
    q_start = k.shape[2] - q.shape[2] if q_start is None else q_start
    sites = _sites(position, q, k, v, x_q, x_k, bias, scale, k_start, q_start)
    return as_call(
        sites.q,
        sites.k,
        sites.v,
        bias=sites.bias,
        values=sites.values,
        mask=mask,
        causal=causal,
        window=window,
        scale=sites.scale,
        dropout=dropout,
        q_start=q_start,
    )


class _Sites(NamedTuple):
    """What the sites of a method make of q, k and v."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias | None
    values: LagValues | None
    scale: float


def _sites(
    position: PositionMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x_q: Tensor | None,
    x_k: Tensor | None,
    bias: Bias | None,
    scale: float | None,
    k_start: int,
    q_start: int | Tensor,
) -> _Sites:
    whole(k_start=k_start)
    check_start(q_start)
    q_pos, k_pos = _positions(q, k, k_start, q_start, position.lengths_only)
    counted = None
    if not position.lengths_only and (not q.is_cpu or torch.compiler.is_compiling()):
        counted = _positions(q, k, k_start, q_start, lengths_only=True)  # for the parts of a sum
    content = Content(x_q, x_k, k, counted)
    term, scale = _logit_term(position, q, q_pos, k_pos, content, bias, scale)
    heads_q, heads_k = _heads(position, q, k, q_pos, k_pos, k_start, q_start)
    values = position.value_term(q_pos, k_pos)
    return _Sites(heads_q, heads_k, position.value_heads(v, k_pos), term, values, scale)


def _positions(
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b h_kv k d"],
    k_start: int,
    q_start: int | Tensor,
    lengths_only: bool,
) -> tuple[Int[Tensor, " q"], Int[Tensor, " k"]]:
    """The positions of queries and keys.

    A method that asks for their number alone bounds lags by it (longest_lag). Where queries may
    stand outside of the keys, it gets more positions of keys, as many as make the bound hold.
    """
    first, n_q, n_k = k_start + q_start, q.shape[2], k.shape[2]
    if isinstance(first, Tensor):
        k_pos = torch.arange(k_start, k_start + n_k, device=q.device)
        return first + torch.arange(n_q, device=q.device), k_pos
    assert not isinstance(q_start, Tensor)
    compiling = torch.compiler.is_compiling()
    if lengths_only and (q.is_cuda or compiling) and not surely_equal(q_start + n_q, n_k):
        n_k = larger(larger(n_k, q_start + n_q), n_k - q_start)
    if lengths_only and q.is_cuda and not compiling:
        return _without_numbers(n_q), _without_numbers(n_k)
    k_pos = torch.arange(k_start, k_start + n_k, device=q.device)
    if surely_equal(q_start, 0) and surely_equal(n_q, n_k):  # one launch less for every layer
        return k_pos, k_pos
    return torch.arange(first, first + n_q, device=q.device), k_pos


@functools.lru_cache(maxsize=64)
def _without_numbers(n: int) -> Int[Tensor, " n"]:
    """n positions of which only the number is read."""
    return torch.empty(n, dtype=torch.long, device="meta")


def _heads(
    position: PositionMethod,
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b h_kv k d"],
    q_pos: Int[Tensor, " q"],
    k_pos: Int[Tensor, " k"],
    k_start: int,
    q_start: int | Tensor,
) -> tuple[Tensor, Tensor]:
    """The queries and the keys as the dot product sees them."""
    rotation = position.rotation()
    if rotation is None:
        return position.query_heads(q, q_pos), position.key_heads(k, k_pos)
    if isinstance(q_start, Tensor):
        return turned(q, q_pos, k, k_pos, rotation)
    return turned(q, k_start + q_start, k, k_start, rotation)


def _logit_term(
    position: PositionMethod,
    q: Float[Tensor, "b h q d"],
    q_pos: Int[Tensor, " q"],
    k_pos: Int[Tensor, " k"],
    content: Content,
    extra: Bias | None,
    scale: float | None,
) -> tuple[Bias | None, float]:
    """What is added to scale * q.k, and the scale: 0 where a method replaces q.k."""
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    term = position.logits(q, q_pos, k_pos, content=content)
    if term is None:
        term = position.score_term(q, q_pos, k_pos, content=content)
    else:
        scale = 0.0
    if term is None or extra is None:
        return extra if term is None else term, scale
    return term + extra, scale
