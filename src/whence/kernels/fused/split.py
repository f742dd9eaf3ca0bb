"""The split: a vendor's plain kernel takes the far keys, and our kernels take the near ones.

For a bias that is constant beyond a finite reach, far attention is plain attention: keys at
lag <= -start are causal attention of q[start:] on k[:-start], and those at lag >= start the same of
everything in reverse. Our forward kernel starts its softmax from their results. In backward the
plain kernel is given the output and log-sum-exp of the whole row, and our kernels add its gradients
to theirs. The two sides run beside each other on two streams.

A constant tail c only shifts a far part's log-sum-exp. With a value table, whose end row A holds
for all far keys of a side, the plain backward gets out - A in place of out.
"""

from types import TracebackType

import torch
import triton
from torch import Tensor

from whence.kernels.fused.backend import Far, FarGradients, Inputs, Numbers, by_token, packed
from whence.kernels.fused.device.rows import rows_kernel
from whence.kernels.fused.plain import Plain, fastest
from whence.kernels.fused.plan import second_stream


class Beside:
    """A context whose launches run on a second stream; `join` makes the current stream wait for it.

    On a CPU, where Triton's interpreter runs, it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = second_stream(device) if device.type == "cuda" else None

    def __enter__(self) -> "Beside":
        if self._side is not None:
            self._main = torch.cuda.current_stream(self._side.device)
            self._side.wait_stream(self._main)
            self._within = torch.cuda.stream(self._side)
            self._within.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._side is not None:
            self._within.__exit__(kind, error, trace)

    def join(self, *made: Tensor | None) -> None:
        """Wait for the second stream, so that the current one may use the tensors made on it."""
        if self._side is None:
            return
        self._main.wait_stream(self._side)
        for x in made:
            if x is not None:
                x.record_stream(self._main)  # no reuse of its memory before the main stream is done


LN2 = 0.6931471805599453


def near_numbers(numbers: Numbers) -> Numbers:
    """The numbers of the near part: the same call with a window of |lag| < far."""
    limit = numbers.far - 1
    return numbers._replace(before=limit, after=0 if numbers.causal else limit)


def far_attention(q: Tensor, k: Tensor, v: Tensor, numbers: Numbers) -> Far:
    """Output and log-sum-exp of the keys at |lag| >= numbers.far."""
    plain, start = _plain(q, v), numbers.far
    m = q.shape[2] - start
    right, right_lse = None, None
    tokens = by_token(q)
    with Beside(q.device) as beside:
        if not numbers.causal:
            right, right_lse = plain.forward(*_reversed(q, k, v, start), numbers.scale)
            right, right_lse = packed(right, tokens), _flat(right_lse)
    left, left_lse = plain.forward(q[:, :, start:], k[:, :, :m], v[:, :, :m], numbers.scale)
    left, left_lse = packed(left, tokens), _flat(left_lse)
    beside.join(right, right_lse)
    return Far(start, left, left_lse, right, right_lse)


def far_gradients(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    inputs: Inputs,
    numbers: Numbers,
) -> FarGradients:
    """The far keys' contributions to the gradients of q, k and v."""
    plain, start, tokens = _plain(q, v), numbers.far, by_token(q)
    m = q.shape[2] - start
    first, last = None, None
    if inputs.table is not None:
        first, last = inputs.table[:, 0].contiguous(), inputs.table[:, -1].contiguous()
    right = None
    with Beside(q.device) as beside:
        if not numbers.causal:
            d_room, room = (empty_rows(out[:, :, :m].shape, out, tokens) for _ in range(2))
            found = plain.backward(
                copied(d_out, 0, d_room, reverse=True),
                *_reversed(q, k, v, start),
                copied(out, 0, room, reverse=True, minus=last),
                _far_lse(lse, inputs.tails, 2, slice(m)).flip(2),
                numbers.scale,
            )
            right = _all_packed(found, tokens)
    d_left_out, left_out = d_out[:, :, start:], out[:, :, start:]
    # It lies within a whole output, so that it has the strides that d_left_out usually has: cuDNN
    # would copy a tensor with others.
    if first is not None:
        left_out = copied(out, start, torch.empty_like(out)[:, :, start:], minus=first)
    left = plain.backward(
        d_left_out,
        q[:, :, start:],
        k[:, :, :m],
        v[:, :, :m],
        left_out,
        _far_lse(lse, inputs.tails, 0, slice(start, None)),
        numbers.scale,
    )
    beside.join(*(right or ()))
    return FarGradients(_all_packed(left, tokens), right)


def _plain(q: Tensor, v: Tensor) -> Plain:
    plain = fastest(q, v)
    assert plain is not None  # or the split would not have been chosen
    return plain


def _reversed(q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that the right side attends with, in reverse order: q[:-start], k and v[start:]."""
    m, tokens = q.shape[2] - start, by_token(q)
    q_room, k_room, v_room = (empty_rows(x[:, :, :m].shape, x, tokens) for x in (q, k, v))
    keys, values = copied(k, start, k_room, reverse=True), copied(v, start, v_room, reverse=True)
    return copied(q, 0, q_room, reverse=True), keys, values


def _far_lse(lse: Tensor, tails: Tensor | None, side: int, rows: slice) -> Tensor:
    """The log-sum-exp of whole rows in base e, minus the constant of the tail.

    A plain kernel, which knows no tail, subtracts it from its logits.
    """
    whole = lse[:, :, rows] * LN2
    if tails is not None:
        tail = tails[side]
        whole -= tail if tail.shape[-1] == 1 else tail[:, :, rows]
    return whole


def _flat(lse: Tensor) -> Tensor:
    return lse.reshape(lse.shape[:3]).contiguous()


def _all_packed(
    parts: tuple[Tensor, Tensor, Tensor], tokens: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (packed(x, tokens) for x in parts)
    return q, k, v


def empty_rows(shape: tuple[int, ...], like: Tensor, tokens: bool) -> Tensor:
    """An empty tensor [b, h, n, d], with `tokens` in the memory order [b, n, h, d]."""
    b, h, n, d = shape
    return like.new_empty(b, n, h, d).transpose(1, 2) if tokens else like.new_empty(b, h, n, d)


def copied(
    x: Tensor, start: int, out: Tensor, *, reverse: bool = False, minus: Tensor | None = None
) -> Tensor:
    """Fills `out` [b, h, length, d] with rows start..start + length of x, minus a vector [h|1, d].

    With `reverse` the rows are in reverse order.
    """
    b, h, length, d = out.shape
    rows_kernel[triton.cdiv(length, 64), b * h](
        x,
        minus,
        out,
        *x.stride()[:3],
        0 if minus is None or minus.shape[0] == 1 else minus.stride(0),
        *out.stride()[:3],
        h,
        start,
        length,
        D=d,
        BLOCK_D=triton.next_power_of_2(d),
        BLOCK=64,
        REVERSE=reverse,
        MINUS=minus is not None,
    )
    return out
