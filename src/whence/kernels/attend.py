"""The one function that executes attention, and the one that explains which backend would."""

from dataclasses import dataclass
from types import ModuleType

from jaxtyping import Float
from torch import Tensor

from whence.checks import require, unknown
from whence.kernels import flex, reference, sdpa
from whence.kernels.call import AttentionCall, as_call
from whence.kernels.fused import backend as fused
from whence.kernels.mask import Mask
from whence.lag import Bias, LagValues

BACKENDS: dict[str, ModuleType] = {  # in the order in which "auto" tries them
    "fused": fused,
    "sdpa": sdpa,
    "flex": flex,
    "reference": reference,
}


@dataclass(frozen=True)
class Explanation:
    """What each backend says of a call; printed, it is a table."""

    chosen: str | None
    rows: tuple[tuple[str, bool, str], ...]  # backend, runs?, reason or note
    dense: tuple[str, ...] = ()  # why a term of the call is inherently dense

    def __str__(self) -> str:
        lines = [
            f"{'->' if name == self.chosen else '  '} {name:<10}"
            f"{'runs' if runs else 'refuses':<9}{text}"
            for name, runs, text in self.rows
        ]
        lines += [f"   dense bias: {why}" for why in self.dense]
        return "\n".join(lines)

    __repr__ = __str__


def attend(
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b h_k k d"],
    v: Float[Tensor, "b h_v k d_v"],
    *,
    bias: Bias | None = None,
    values: LagValues | None = None,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    q_start: int | None = None,
    backend: str = "auto",
) -> Float[Tensor, "b h q d_v"]:
    """softmax(scale * q.k + bias) @ (v + values), in every variation a Transformer needs.

    lag = key - query. Query row i stands at key position q_start + i, by default n_k - n_q + i: the
    queries are the last rows of a cache. Fewer key and value heads than query heads are grouped.

    bias     a LagBias, LowRankBias, DenseBias or a sum of them, added after the scaling
    values   a LagValues table, weighted like v
    mask     boolean [b, k] (padding) or [b|1, h|1, q, k], True = may be looked at; or a Mask
    causal   only keys at lag <= 0
    window   only keys at -before <= lag <= after: one number for both, or (before, after)
    scale    1/sqrt(d) unless given; 0.0 drops the content product, the logits are the bias alone
    dropout  on the weights; that it is 0.0 outside of training is up to the caller
    backend  "auto" takes the first that can, PyTorch's own for plain attention; a name either runs
             or raises its reason

    A query that may look at no key gets zeros.
    """
    call = as_call(
        q,
        k,
        v,
        bias=bias,
        values=values,
        mask=mask,
        causal=causal,
        window=window,
        scale=scale,
        dropout=dropout,
        q_start=q_start,
    )
    return execute(call, backend=backend)


def execute(call: AttentionCall, *, backend: str = "auto") -> Float[Tensor, "b h q d_v"]:
    """What `attend` does once its arguments are a call."""
    if backend == "auto":
        module = BACKENDS[_first_that_runs(call)]
    elif backend in BACKENDS:
        module = BACKENDS[backend]
        reason = module.refuse(call)
        require(reason is None, lambda: f"backend {backend!r} cannot run this call: it {reason}")
    else:  # the message is costly, and cannot be traced by torch.compile
        raise ValueError(unknown("backend", backend, ["auto", *BACKENDS]))
    out: Tensor = module.run(call)
    return out


def explain(
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b h_k k d"],
    v: Float[Tensor, "b h_v k d_v"],
    *,
    bias: Bias | None = None,
    values: LagValues | None = None,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    q_start: int | None = None,
) -> Explanation:
    """Which backend `attend` would take for these arguments, and why not the others."""
    call = as_call(
        q,
        k,
        v,
        bias=bias,
        values=values,
        mask=mask,
        causal=causal,
        window=window,
        scale=scale,
        dropout=dropout,
        q_start=q_start,
    )
    rows = []
    for name, module in BACKENDS.items():
        reason = module.refuse(call)
        rows.append((name, reason is None, module.note(call) if reason is None else reason))
    chosen = next((name for name, runs, _ in rows if runs), None)
    chosen = "sdpa" if sdpa.is_plain(call) else chosen
    return Explanation(chosen, tuple(rows), tuple(term.why for term in call.dense))


def _first_that_runs(call: AttentionCall) -> str:
    if sdpa.is_plain(call):  # nothing of position in it: the vendor's kernels are the fastest
        return "sdpa"
    refusals = []
    for name, module in BACKENDS.items():
        reason = module.refuse(call)
        if reason is None:
            return name
        refusals.append(f"{name} {reason}")
    raise ValueError("no backend can run this call: " + "; ".join(refusals))
