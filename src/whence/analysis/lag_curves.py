"""Lag curves: what a method, as initialised, adds to attention at each lag, for every head."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.checks import at_least
from whence.method import Content, PositionMethod
from whence.methods import build

QUANTITIES = {  # by site, in the order in which a method of several sites is read
    "replace": "the logit",
    "score": "the term added to the logit",
    "heads": "q·k / d_head where q = k = 1",
    "input": "p_i·p_j / d_model",
    "value": "nothing in the logit",
}


@dataclass(frozen=True, eq=False)
class LagCurves:
    """mean[h, lag] for a query in the middle; `spread` is its deviation over random content.

    A method that does not look at content has no spread, one that enters at the input has one curve
    for all heads, and one that is causal has NaN at the lags > 0 that it never sees.

        >>> curves = lag_curves("shaw:clip=2", n_heads=4, reach=3)
        >>> curves.site, curves.mean.shape, curves.spread is None
        ('score', torch.Size([4, 7]), False)
    """

    method: str
    site: str  # the one that was read; "" where position enters nowhere
    lag: Int[Tensor, " lag"]
    mean: Float[Tensor, "h lag"]
    spread: Float[Tensor, "h lag"] | None
    causal_only: bool

    @property
    def quantity(self) -> str:
        """What the numbers are."""
        return QUANTITIES.get(self.site, "no positional term")


def lag_curves(
    spec: str,
    *,
    n_heads: int = 4,
    d_head: int = 32,
    reach: int = 64,
    draws: int = 32,
    seed: int = 0,
) -> LagCurves:
    """The curves of a new method at the lags -reach..reach, over `draws` of normal content.

    The caller's random numbers stay as they were.

        >>> lag_curves("alibi", n_heads=8, reach=2).mean[0].tolist()
        [-1.0, -0.5, 0.0, -0.5, -1.0]
    """
    at_least(1, n_heads=n_heads, d_head=d_head, reach=reach, draws=draws)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        method = build(spec, n_heads=n_heads, d_head=d_head, max_length=2 * reach + 1)
        return _curves(method, spec, n_heads, d_head, reach, draws, causal=method.causal_only)


def curves_of(
    method: PositionMethod,
    *,
    name: str,
    n_heads: int,
    d_head: int,
    reach: int = 64,
    draws: int = 32,
    seed: int = 0,
    causal: bool = False,
) -> LagCurves:
    """The same of a method that exists, trained or not, on a CPU; `causal` has no lags > 0.

    A method of a stack needs its `begin(2 * reach + 1)` first.
    """
    at_least(1, n_heads=n_heads, d_head=d_head, reach=reach, draws=draws)
    causal = causal or method.causal_only
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        return _curves(method, name, n_heads, d_head, reach, draws, causal=causal)


def position_matrix(
    method: PositionMethod,
    *,
    n_heads: int,
    d_head: int,
    n: int,
    seed: int = 0,
    causal: bool = False,
) -> tuple[str, Float[Tensor, "h n n"]]:
    """What the curves are rows of: the site that was read, and its value for each query and key.

    Content, where a method looks at it, is one draw of normal content; `causal` has no lags > 0.

        >>> alibi = build("alibi", n_heads=8, d_head=4)
        >>> site, matrix = position_matrix(alibi, n_heads=8, d_head=4, n=3)
        >>> site, matrix[0, 0, 1:].tolist()
        ('score', [-0.5, -1.0])
    """
    at_least(1, n_heads=n_heads, d_head=d_head, n=n)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        site, values = _values(method, n_heads, d_head, n, 1, slice(0, n))
    matrix = values[0].float().expand(n_heads, -1, -1)
    if causal or method.causal_only:
        matrix = matrix.masked_fill(torch.ones(n, n).triu(1).bool(), float("nan"))
    return site, matrix


def _curves(
    method: PositionMethod,
    name: str,
    n_heads: int,
    d_head: int,
    reach: int,
    draws: int,
    *,
    causal: bool,
) -> LagCurves:
    middle = slice(reach, reach + 1)
    site, rows = _values(method, n_heads, d_head, 2 * reach + 1, draws, middle)
    lag = torch.arange(-reach, reach + 1)
    values = rows[:, :, 0].float()
    if causal:
        values = values.masked_fill(lag > 0, float("nan"))
    mean, spread = values.mean(dim=0), values.std(dim=0, correction=0)
    varies = bool((spread > 1e-5 * values.nan_to_num().abs().amax()).any())
    return LagCurves(name, site, lag, mean, spread if varies else None, method.causal_only)


def _values(
    method: PositionMethod, n_heads: int, d_head: int, n: int, draws: int, rows: slice
) -> tuple[str, Float[Tensor, "draws h q k"]]:
    """The site that is read, and its values at some queries for each draw."""
    pos, sites = torch.arange(n), method.sites()
    site = next((name for name in QUANTITIES if name in sites), "")
    if site in ("replace", "score"):
        q, k = torch.randn(2, draws, n_heads, n, d_head)
        x = torch.randn(draws, n, n_heads * d_head)
        hook = method.logits if site == "replace" else method.score_term
        # These queries alone: with all of them, methods that read content have n x n numbers.
        bias = hook(q[:, :, rows], pos[rows], pos, content=Content(x[:, rows], x, k))
        if bias is not None:
            return site, bias.to_dense(pos[rows], pos).expand(-1, n_heads, -1, -1)
        site = next((name for name in ("heads", "input", "value") if name in sites), "")
    if site == "heads":
        ones = torch.ones(1, n_heads, n, d_head)
        q, k = method.query_heads(ones, pos), method.key_heads(ones, pos)
        return site, torch.einsum("bhqd,bhkd->bhqk", q[:, :, rows], k) / d_head
    if site == "input":
        vectors = method.input_term(pos)
        assert vectors is not None
        return site, (vectors[rows] @ vectors.T / vectors.shape[-1])[None, None]
    return site, torch.zeros(1, 1, len(pos[rows]), n)
