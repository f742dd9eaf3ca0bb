"""Synthesizer (Tay et al., 2020): logits learned, or made from the query's token, without q.k."""

import math
from typing import Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, one_of, require
from whence.lag import Bias, DenseBias, LowRankBias
from whence.method import Content, PositionMethod, need
from whence.methods.fixed_length import within


class Synthesizer(PositionMethod):
    """logits_ij = S(i, j), or a mixture of several S and of q_i . k_j / sqrt(d). N = max_length.

    kind               S of one head
    random             R_ij, an N x N matrix; `fixed` is the same, not trained
    factorized_random  (R1 R2^T)_ij, of rank `rank`
    dense              (W2 relu(W1 x_i + b1) + b2)_j: attention to a learned key table
    factorized_dense   A_i[j mod a] B_i[j div a], a b = N; A_i and B_i linear in relu(W1 x_i + b1)

    x_i is the layer's input, and `hidden` (d_head unless given) the size of W1 x_i. a is the
    largest divisor of N up to sqrt(N). Both vectors are tiled over the N keys, A_i as a whole and
    B_i element by element, so that no two keys get the same pair of elements: with both as a whole,
    logits would repeat unless a and b are coprime.

    mixture "none" is one kind instead of q.k. "softmax" is a sum, with learned weights softmax(w),
    of the kinds listed (several are written kind="random-dense") and of q.k, unless dot=false.
    "plus_alpha" is (1 - sigmoid(alpha)) q.k + sigmoid(alpha) S. Weights start equal. Without q.k
    the site is replace. Positions from N on are an error.

        >>> method = Synthesizer(2, 4, 8, 16)
        >>> method.n_parameters(), method.sites()  # 2 heads of 16 x 16 numbers
        (512, ('heads', 'score', 'replace'))
    """

    paper = "Tay et al. 2020, arXiv:2005.00743"
    formula = (
        "n_heads * (('random' in kinds) * max_length ** 2"
        " + ('factorized_random' in kinds) * 2 * rank * max_length"
        " + ('dense' in kinds) * (hidden * (d_model + 1) + (hidden + 1) * max_length)"
        " + ('factorized_dense' in kinds) * (hidden * (d_model + 1) + (hidden + 1) * (a + b)))"
        " + n_mixed"
    )
    anchored = True

    def __init__(
        self,
        n_heads: int,
        d_head: int,
        d_model: int,
        max_length: int,
        *,
        kind: str = "random",
        mixture: Literal["none", "softmax", "plus_alpha"] = "none",
        dot: bool = True,
        rank: int = 8,
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        hidden = d_head if hidden is None else hidden
        at_least(1, n_heads=n_heads, d_head=d_head, d_model=d_model, max_length=max_length)
        at_least(1, rank=rank, hidden=hidden)
        one_of("mixture of synthesizer", mixture, ("none", "softmax", "plus_alpha"))
        kinds = tuple(kind.split("-"))
        for name in kinds:
            one_of("kind of synthesizer", name, KINDS)
        require(len(set(kinds)) == len(kinds), f"kind lists a part twice: {kind!r}.")
        require(
            len(kinds) == 1 or mixture == "softmax",
            f"mixture={mixture!r} takes one kind, got {kind!r}. For several take 'softmax'.",
        )
        require(
            dot or mixture == "softmax",
            f"dot=false is for mixture='softmax', got mixture={mixture!r}: 'none' never has q.k in "
            "it, and 'plus_alpha' always has.",
        )
        self.n_heads, self.d_head, self.d_model = n_heads, d_head, d_model
        self.max_length, self.fixed_length = max_length, True
        self.kinds, self.mixture, self.dot = kinds, mixture, dot
        self.rank, self.hidden = rank, hidden
        self.a = max(a for a in range(1, math.isqrt(max_length) + 1) if max_length % a == 0)
        self.b = max_length // self.a
        self.parts = nn.ModuleList(KINDS[name](self) for name in kinds)
        self.n_mixed = {"none": 0, "softmax": len(kinds) + dot, "plus_alpha": 1}[mixture]
        self.mix = nn.Parameter(torch.zeros(self.n_mixed)) if self.n_mixed else None

    def weights(self) -> Float[Tensor, " part"] | None:
        """The weight of each kind as listed, then that of q.k; None without a mixture."""
        if self.mix is None:
            return None
        if self.mixture == "plus_alpha":
            return torch.cat([self.mix.sigmoid(), (-self.mix).sigmoid()])
        return self.mix.softmax(dim=0)

    def query_heads(self, q: Tensor, q_pos: Int[Tensor, "*b q"]) -> Tensor:
        """q times the weight of the dot product; as it is where there is no dot product."""
        weights = self.weights()
        return q if weights is None or not self.dot else q * weights[-1].to(q.dtype)

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> Bias | None:
        """What a mixture adds to q.k, or None if there is no q.k."""
        if self.mix is None or not self.dot:
            return None
        return self._synthesized(q_pos, k_pos, content)

    def logits(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> Bias | None:
        """What stands in place of q.k, or None if q.k is in the mixture."""
        if self.mix is not None and self.dot:
            return None
        return self._synthesized(q_pos, k_pos, content)

    def _synthesized(self, q_pos: Tensor, k_pos: Tensor, content: Content | None) -> Bias:
        within(self.max_length, "synthesizer", q_pos, k_pos)
        weights = self.weights()
        terms: list[Bias] = []
        for index, module in enumerate(self.parts):
            part = cast(_Part, module)
            x = need(content, "x_q", self) if part.looks_at_content else None
            terms.append(part.term(q_pos, k_pos, x, None if weights is None else weights[index]))
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total


class _Part(nn.Module):
    """One kind: its parameters and the term they make, times its weight in the mixture."""

    looks_at_content = False

    def term(self, q_pos: Tensor, k_pos: Tensor, x: Tensor | None, weight: Tensor | None) -> Bias:
        raise NotImplementedError


class _Random(_Part):
    trained = True
    matrix: Tensor

    def __init__(self, of: Synthesizer) -> None:
        super().__init__()
        matrix = torch.randn(of.n_heads, of.max_length, of.max_length)
        if self.trained:
            self.matrix = nn.Parameter(matrix)
        else:
            self.register_buffer("matrix", matrix)  # saved: another draw would be another model

    def term(
        self, q_pos: Tensor, k_pos: Tensor, x: Tensor | None, weight: Tensor | None
    ) -> DenseBias:
        def function(q_pos: Tensor, k_pos: Tensor) -> Tensor:
            return _times(self.matrix[:, q_pos[:, None], k_pos][None], weight)

        return DenseBias(function, q_pos, k_pos, "a number for each pair of positions")


class _Fixed(_Random):
    trained = False


class _FactorizedRandom(_Part):
    def __init__(self, of: Synthesizer) -> None:
        super().__init__()
        # Entries of the product have variance 1, as those of the full random matrix.
        shape, std = (of.n_heads, of.max_length, of.rank), of.rank**-0.25
        self.query = nn.Parameter(torch.randn(shape) * std)
        self.key = nn.Parameter(torch.randn(shape) * std)

    def term(
        self, q_pos: Tensor, k_pos: Tensor, x: Tensor | None, weight: Tensor | None
    ) -> LowRankBias:
        return LowRankBias(_times(self.query[None, :, q_pos], weight), self.key[None, :, k_pos])


class _Dense(_Part):
    looks_at_content = True

    def __init__(self, of: Synthesizer) -> None:
        super().__init__()
        self.inner = _HeadLinear(of.n_heads, of.d_model, of.hidden)
        self.outer = _HeadLinear(of.n_heads, of.hidden, of.max_length)

    def term(
        self, q_pos: Tensor, k_pos: Tensor, x: Tensor | None, weight: Tensor | None
    ) -> LowRankBias:
        assert x is not None
        query = self.inner(x[:, None]).relu()
        one = torch.ones_like(query[..., :1])  # meets the bias of each key
        key = torch.cat([self.outer.weight, self.outer.bias[..., None]], dim=-1)[None, :, k_pos]
        query = _times(torch.cat([query, one], dim=-1), weight)
        return LowRankBias(query, key.to(query.dtype))


class _FactorizedDense(_Part):
    looks_at_content = True

    def __init__(self, of: Synthesizer) -> None:
        super().__init__()
        self.a = of.a
        self.inner = _HeadLinear(of.n_heads, of.d_model, of.hidden)
        self.whole = _HeadLinear(of.n_heads, of.hidden, of.a)
        self.each = _HeadLinear(of.n_heads, of.hidden, of.b)

    def term(
        self, q_pos: Tensor, k_pos: Tensor, x: Tensor | None, weight: Tensor | None
    ) -> DenseBias:
        assert x is not None
        inner = self.inner(x[:, None]).relu()

        def function(q_pos: Tensor, k_pos: Tensor, whole: Tensor, each: Tensor) -> Tensor:
            return whole[..., k_pos % self.a] * each[..., k_pos // self.a]

        factors = (_times(self.whole(inner), weight), self.each(inner))
        return DenseBias(function, q_pos, k_pos, "a product of two tiled vectors a query", factors)


class _HeadLinear(nn.Module):
    """W_h x + b_h, with W and b for each head."""

    def __init__(self, n_heads: int, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_heads, d_out, d_in) * d_in**-0.5)
        self.bias = nn.Parameter(torch.zeros(n_heads, d_out))

    def forward(self, x: Float[Tensor, "b h q d_in"]) -> Float[Tensor, "b heads q d_out"]:
        product = x @ self.weight.transpose(-1, -2).to(x.dtype)
        return product + self.bias[:, None].to(x.dtype)


def _times(term: Tensor, weight: Tensor | None) -> Tensor:
    return term if weight is None else term * weight.to(term.dtype)


KINDS: dict[str, type[_Random | _FactorizedRandom | _Dense | _FactorizedDense]] = {
    "random": _Random,
    "fixed": _Fixed,
    "factorized_random": _FactorizedRandom,
    "dense": _Dense,
    "factorized_dense": _FactorizedDense,
}
