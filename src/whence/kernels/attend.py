"""`attend`, the function that computes attention, and `explain`, which says how it would."""

from dataclasses import dataclass
from types import ModuleType

from jaxtyping import Float
from torch import Tensor

from whence.checks import require, unknown
from whence.kernels import reference
from whence.kernels.blocks import sdpa
from whence.kernels.call import AttentionCall, as_call
from whence.kernels.fused import backend as fused
from whence.kernels.mask import Mask
from whence.lag import Bias, LagValues

# In the order in which "auto" tries them. A backend is a module of three functions of a call:
# refuse (why it cannot run it, or None), note (how it would, for `explain`) and run. Two are asked
# more: sdpa and fused for calls without position, and fused whether it remembers a call.
BACKENDS: dict[str, ModuleType] = {"fused": fused, "sdpa": sdpa, "reference": reference}


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`: what "auto" takes, and how each backend runs, or why it cannot.

    Printed, it is a table.

    >>> import torch
    >>> found = explain(*torch.randn(3, 1, 2, 8, 16), causal=True)
    >>> found.chosen, [name for name, runs, why in found.rows if not runs]
    ('sdpa', ['fused'])
    """

    chosen: str
    rows: tuple[tuple[str, bool, str], ...]  # backend, whether it runs the call, how or why not
    dense: tuple[str, ...] = ()  # for each dense term of the bias, why it is no lag bias

    def __str__(self) -> str:
        lines = [
            f"{'->' if name == self.chosen else '  '} {name:<10}"
            f"{'runs' if runs else 'refuses':<9}{text}".replace("\n", "\n" + " " * 22)
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
    q_start: int | Tensor | None = None,
    backend: str = "auto",
) -> Float[Tensor, "b h q d_v"]:
    """softmax(scale * q.k + bias) @ (v + values), in every variation a Transformer needs.

    lag = key position - query position. Query row i stands at key position q_start + i; by default
    q_start is n_k - n_q, so that the queries are the last rows of a cache. A tensor of one number
    is for a compiled step of decoding over a cache of fixed length: the graph then serves every
    step, and holds the logits of all keys. There may be fewer key and value heads than query heads
    (grouped heads).

    bias     a LagBias, LowRankBias, DenseBias or a sum of them; it is added after the scaling
    values   a LagValues table: a vector for each lag, weighted like v
    mask     boolean [b, k] (padding) or [b|1, h|1, q, k], True = may be looked at; or a Mask
    causal   only keys at lag <= 0 are looked at
    window   only keys at -before <= lag <= after are looked at: one number, or (before, after)
    scale    1/sqrt(d) by default; 0.0 drops q.k, so that the logits are the bias alone
    dropout  probability on the weights; the caller sets it to 0.0 outside of training
    backend  "auto" takes the first of `whence.kernels.BACKENDS` that can run the call, and
             PyTorch's own kernels for a call without position, unless it is short; a backend's
             name takes that one, or raises an error that says why it cannot run the call

    A query that may look at no key gets zeros.

        >>> import torch
        >>> from whence import LagBias, attend
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16)  # each [batch, heads, tokens, d_head]
        >>> nearer_is_better = LagBias.line(torch.tensor([-1.0, -0.5, -0.25, -0.125]))
        >>> out = attend(q, k, v, bias=nearer_is_better, causal=True)
        >>> out.shape
        torch.Size([2, 4, 10, 16])
        >>> last = attend(q[:, :, -1:], k, v, bias=nearer_is_better, causal=True)  # with a cache
        >>> torch.testing.assert_close(last, out[:, :, -1:])
    """
    signed = None
    if mask is None and dropout == 0.0:
        signed = fused.signed_call(q, k, v, bias, values, causal, window, scale, q_start, backend)
        found = None if signed is None else fused.run_remembered(signed)
        if found is not None:
            return found
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
    return execute(call, backend=backend, signed=signed)


def execute(
    call: AttentionCall, *, backend: str = "auto", signed: fused.SignedCall | None = None
) -> Float[Tensor, "b h q d_v"]:
    """The second half of `attend`: run a checked call on a backend."""
    if backend == "auto":
        module = BACKENDS[_first_that_runs(call)]
    elif backend in BACKENDS:
        module = BACKENDS[backend]
        reason = module.refuse(call)
        require(reason is None, lambda: f"backend {backend!r} cannot run this call: it {reason}")
    else:  # the message is costly, and cannot be traced by torch.compile
        raise ValueError(unknown("backend", backend, ["auto", *BACKENDS]))
    if module is fused and signed is not None:
        return fused.run_and_remember(call, signed)
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
    q_start: int | Tensor | None = None,
) -> Explanation:
    """Which backend `attend` would take for these arguments, and what each one says of them.

    >>> import torch
    >>> from whence import LagBias, explain
    >>> q = k = v = torch.randn(1, 2, 10, 16)
    >>> found = explain(q, k, v, bias=LagBias.line(torch.tensor([-1.0, -0.5])), dropout=0.1)
    >>> print(found)
       fused     refuses  runs on an NVIDIA GPU, got cpu. Take backend='sdpa'.
    -> sdpa      runs     blocks of queries: linear memory
       reference runs     holds the n x n logits: quadratic memory
    >>> found.chosen
    'sdpa'
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
    rows = []
    for name, module in BACKENDS.items():
        reason = module.refuse(call)
        rows.append((name, reason is None, module.note(call) if reason is None else reason))
    dense = tuple(term.why for term in call.dense)
    return Explanation(_first_that_runs(call), tuple(rows), dense)


def _first_that_runs(call: AttentionCall) -> str:
    """The backend that "auto" takes; ValueError for some transformed calls in half precision."""
    if sdpa.is_plain(call) and sdpa.refuse(call) is None and not fused.beats_plain(call):
        return "sdpa"  # without position, PyTorch's own kernels are the fastest for long sequences
    for name, module in BACKENDS.items():
        if module.refuse(call) is None:
            return name
    raise ValueError(f"no backend can run this call: sdpa {sdpa.refuse(call)}")
