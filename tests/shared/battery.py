"""What the shared tests know of a method: how to build it small and feed it at every site.

Nothing here names a method. One that is added to METHODS is picked up by every test that uses this.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shaking import shake
from whence.kernels.attend import execute
from whence.kernels.call import AttentionCall
from whence.lag import Bias, DenseBias, LagBias
from whence.method import Content, PositionMethod
from whence.methods import METHODS, build
from whence.nn.positioned import positioned_call

HEADS, D_HEAD, LENGTH = 3, 4, 24
SHAPES = [(1, 1), (2, 2), (7, 7), (1, 9), (5, 13), (19, 19)]  # queries, keys; odd, one, a cache


def small(name: str, dtype: torch.dtype = torch.float64) -> PositionMethod:
    """The method with random, not initial, parameters: many start at zero, which would hide bugs."""
    torch.manual_seed(1)
    causal = METHODS[name].causal_only
    method = build(name, n_heads=HEADS, d_head=D_HEAD, max_length=LENGTH, causal=causal)
    method = method.to(dtype)
    shake(method, 0.3)
    return method


class Layer(nn.Module):
    """One attention layer, input site included, as plain as can be: the projections are slices."""

    def __init__(self, method: PositionMethod, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.method, self.kv_heads = method, kv_heads
        self.causal = method.causal_only

    def forward(
        self,
        x: Tensor,
        n_q: int,
        *,
        start: int = 0,
        backend: str = "reference",
        mask: Tensor | None = None,
        window: int | None = None,
        causal: bool | None = None,
    ) -> Tensor:
        """Attention of the last n_q rows of x [b, n, 3 * d_model] to all of them."""
        call = self.call(x, n_q, start=start, mask=mask, window=window, causal=causal)
        return execute(call, backend=backend)

    def call(
        self,
        x: Tensor,
        n_q: int,
        *,
        start: int = 0,
        mask: Tensor | None = None,
        window: int | None = None,
        causal: bool | None = None,
    ) -> AttentionCall:
        """The attention that `forward` computes."""
        b, n, _ = x.shape
        pos = torch.arange(start, start + n)
        term = self.method.input_term(pos)
        if term is not None:
            x = x + torch.cat([term] * 3, dim=-1)
        q, k, v = (part.view(b, n, HEADS, D_HEAD).transpose(1, 2) for part in x.chunk(3, dim=-1))
        hidden = x.chunk(3, dim=-1)[0]
        return positioned_call(
            self.method,
            q[:, :, n - n_q :],
            k[:, : self.kv_heads],
            v[:, : self.kv_heads],
            x_q=hidden[:, n - n_q :],
            x_k=hidden,
            k_start=start,
            mask=mask,
            window=window,
            causal=self.causal if causal is None else causal,
        )


def inputs(n: int, *, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random hidden states for `Layer`."""
    torch.manual_seed(2)
    return torch.randn(batch, n, 3 * HEADS * D_HEAD, dtype=dtype)


def score(method: PositionMethod, n_q: int, n_k: int, *, start: int = 0) -> Bias | None:
    """The score or replacing term of the last n_q of n_k positions, on fixed random content."""
    torch.manual_seed(3)
    dtype = next((p.dtype for p in method.parameters()), torch.float64)
    q = torch.randn(2, HEADS, n_k, D_HEAD, dtype=dtype)[:, :, n_k - n_q :]
    k = torch.randn(2, HEADS, n_k, D_HEAD, dtype=dtype)
    x = torch.randn(2, n_k, HEADS * D_HEAD, dtype=dtype)
    pos = torch.arange(start, start + n_k)
    arguments = (q, pos[n_k - n_q :], pos)
    content = Content(x[:, n_k - n_q :], x, k)
    replaced = method.logits(*arguments, content=content)
    return method.score_term(*arguments, content=content) if replaced is None else replaced


def leaves(bias: Bias) -> Iterator[LagBias | DenseBias]:
    """The lag and dense parts of a bias."""
    terms = bias.terms()
    if terms.lag is not None:
        yield terms.lag
    yield from terms.dense
