"""The attention layers that are measured against each other: ours, and those there are besides."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from whence.bench.flex_peer import best_flex, default_flex
from whence.bench.point import Point
from whence.bench.problem import Attention, Problem
from whence.bench.shaw_article import article_attention, naive_attention
from whence.checks import require
from whence.kernels import BACKENDS
from whence.kernels.call import AttentionCall
from whence.methods.shaw import Shaw
from whence.nn import positioned_attention


@dataclass(frozen=True)
class Contender:
    """A way to compute attention.

    `attentions` gives the variants by name, of which the fastest counts; `needs` the bytes that a
    step takes beyond its inputs, to refuse in time what does not fit. `formula` marks plain
    PyTorch, which is checked in float64: its own dtype's error is what others are held against.
    """

    title: str
    attentions: Callable[[], dict[str, Attention]]
    positioned: bool = True  # with the method, or without any position: the limit
    formula: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    modes: tuple[str, ...] = ("forward", "both", "decode")
    needs: Callable[[Point], int] = field(default=lambda point: 0)


def ours(backend: str) -> Attention:
    """Attention as `whence.nn` runs it."""

    def run(problem: Problem) -> Tensor:
        return positioned_attention(
            problem.method,
            problem.q,
            problem.k,
            problem.v,
            x_q=problem.x_q,
            x_k=problem.x,
            causal=problem.causal,
            backend=backend,
        )

    return run


def dense_bias(call: AttentionCall) -> Tensor:
    """The n x n bias of a call, the hidden keys included, in the dtype of the queries.

    A shared band is looked up from its values at every lag: of four ways (indexing, index_select,
    gather, unfold and flip) index_select took the least time, forward and backward together.
    """
    sight, device = call.sight, call.q.device
    require(call.values is None, "a dense bias has no place for values by lag (Shaw's values).")
    q_pos = torch.arange(sight.n_q, device=device) + sight.q_start
    k_pos = torch.arange(sight.n_k, device=device)
    bias = torch.zeros(1, 1, 1, 1, device=device)
    if call.lag is not None and call.lag.band.shape[2] == 1:
        lowest = -(sight.q_start + sight.n_q - 1)
        curve = call.lag.at(torch.arange(lowest, sight.n_k - sight.q_start, device=device))[:, :, 0]
        row = k_pos - q_pos[:, None] - lowest
        bias = curve.index_select(-1, row.flatten()).view(*curve.shape[:2], *row.shape)
    elif call.lag is not None:
        bias = call.lag.to_dense(q_pos, k_pos)
    for term in call.dense:
        bias = bias + term.to_dense(term.q_pos, term.k_pos)
    return _hidden(bias.to(call.q.dtype), call)


def _hidden(bias: Tensor, call: AttentionCall) -> Tensor:
    """The bias with -inf at the keys that a query may not see."""
    sight = call.sight
    allowed = sight.allowed(slice(0, sight.n_q), slice(0, sight.n_k))
    return bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)


def eager(problem: Problem) -> Tensor:
    """The n x n way, as the formula reads; q is scaled, not the logits, to save a pass."""
    call = problem.call()
    logits = (call.q * call.scale) @ call.k.transpose(-1, -2) + dense_bias(call)
    return torch.softmax(logits, dim=-1) @ call.v


def eager_index(problem: Problem) -> Tensor:
    """The n x n way with the bias looked up by an n x n index of lags, as one writes it first.

    The gradient of such a look-up sorts the index and adds n numbers to each value.
    """
    call = problem.call()
    sight, device = call.sight, call.q.device
    require(
        call.lag is not None and call.lag.shape[2] == 1 and call.values is None and not call.dense,
        "eager-index is for a bias by lag that all queries share, and that alone.",
    )
    assert call.lag is not None
    lowest = -(sight.q_start + sight.n_q - 1)
    lags = torch.arange(lowest, sight.n_k - sight.q_start, device=device)
    curve = call.lag.at(lags)[0, :, 0].expand(call.q.shape[1], -1)
    q_pos = torch.arange(sight.n_q, device=device) + sight.q_start
    place = torch.arange(sight.n_k, device=device) - q_pos[:, None] - lowest
    bias = curve[:, place].to(call.q.dtype)
    logits = (call.q * call.scale) @ call.k.transpose(-1, -2) + _hidden(bias, call)
    return torch.softmax(logits, dim=-1) @ call.v


def sdpa_dense(problem: Problem) -> Tensor:
    """PyTorch's attention with the dense bias as its mask."""
    call = problem.call()
    b, h, n_q, _ = call.q.shape
    bias = dense_bias(call).expand(b, h, n_q, call.k.shape[2])
    return scaled_dot_product_attention(call.q, call.k, call.v, attn_mask=bias, scale=call.scale)


def plain(*backends: SDPBackend) -> Attention:
    """PyTorch's attention without any position, by one of its kernels or by the one it picks."""

    def run(problem: Problem) -> Tensor:
        q, k, v = problem.q, problem.k, problem.v
        causal = problem.causal and q.shape[2] > 1  # the last query sees every key anyway
        if not backends:
            return scaled_dot_product_attention(q, k, v, is_causal=causal)
        with sdpa_kernel(list(backends)):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def article(problem: Problem) -> Tensor:
    """Shaw's attention by the article's O(n^2 d) algorithm."""
    return _of_shaw(problem, article_attention)


def naive(problem: Problem) -> Tensor:
    """Shaw's attention as its equations read, O(b h n^2 d)."""
    return _of_shaw(problem, naive_attention)


def _of_shaw(problem: Problem, attention: Callable[..., Tensor]) -> Tensor:
    method = problem.method
    require(
        isinstance(method, Shaw) and not method.per_head,
        "the article's attention is for the method shaw, with tables that heads share.",
    )
    assert isinstance(method, Shaw)
    tables = (method.key_table, method.value_table)
    keys, values = (None if t is None else t[0].to(problem.q.dtype) for t in tables)
    return attention(
        problem.q,
        problem.k,
        problem.v,
        key_table=keys,
        value_table=values,
        left=method.left,
        right=method.right,
        causal=problem.causal,
    )


def square_bytes(point: Point) -> int:
    """Of the n x n ways: measured at n = 16,384, seven and a half matrices with their gradients."""
    return point.pairs * point.itemsize * (8 if point.mode == "both" else 4)


def article_bytes(point: Point) -> int:
    """The matrices, and two tensors [n, n, d] with their gradients."""
    vectors = point.n_q * point.n * point.d_head * point.itemsize
    return square_bytes(point) + vectors * (6 if point.mode == "both" else 3)


def naive_bytes(point: Point) -> int:
    """The matrices, and a key and a value for every pair with one of their gradients."""
    vectors = point.pairs * point.d_head * point.itemsize
    return square_bytes(point) + vectors * (4 if point.mode == "both" else 3)


def _only(attention: Attention) -> Callable[[], dict[str, Attention]]:
    return lambda: {"": attention}


PEERS = {
    "flash": Contender(
        "FlashAttention-2, no bias",
        _only(plain(SDPBackend.FLASH_ATTENTION)),
        positioned=False,
        devices=("cuda",),
    ),
    "cudnn": Contender(
        "cuDNN, no bias",
        _only(plain(SDPBackend.CUDNN_ATTENTION)),
        positioned=False,
        devices=("cuda",),
    ),
    "plain": Contender("SDPA, no bias", _only(plain()), positioned=False),
    "eager": Contender("eager, n x n", _only(eager), formula=True, needs=square_bytes),
    "eager-index": Contender(
        "eager, n x n, bias by index", _only(eager_index), formula=True, needs=square_bytes
    ),
    "sdpa-dense": Contender(
        "SDPA, dense bias", _only(sdpa_dense), formula=True, needs=square_bytes
    ),
    "article": Contender(
        "the article's algorithm", _only(article), formula=True, needs=article_bytes
    ),
    "naive": Contender("the equations as they read", _only(naive), formula=True, needs=naive_bytes),
    "flex": Contender(
        "FlexAttention, default tiles", default_flex, devices=("cuda",), modes=("forward", "both")
    ),
    "flex-best": Contender(
        "FlexAttention, best tiles", best_flex, devices=("cuda",), modes=("forward", "both")
    ),
}
OURS = {f"whence:{name}": Contender(f"whence, {name}", _only(ours(name))) for name in BACKENDS}
CONTENDERS = {"whence:auto": Contender("whence", _only(ours("auto")))} | OURS | PEERS
