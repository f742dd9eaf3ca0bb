"""The second fused strategy: a plain kernel for the far keys, ours for those near the diagonal.

For a bias that is constant beyond a finite reach, far attention is plain attention: keys at
lag <= -start are causal attention of q[start:] on k[:-start], and those at lag >= start the same of
everything in reverse. Our forward kernel starts its softmax from their results. In backward the
plain kernel is given the output and log-sum-exp of the whole row, and ours adds its gradients.
The two sides run beside each other.

A constant tail c only shifts a far part's log-sum-exp. With a value table, whose end row A holds
for all far keys of a side, the plain backward gets out - A in place of out.
"""

from torch import Tensor

from whence.kernels.beside import Beside
from whence.kernels.plain import Plain, fastest
from whence.kernels.triton_inputs import Far, FarGradients, Inputs, Numbers
from whence.kernels.triton_rows import copied

LN2 = 0.6931471805599453


def near_numbers(numbers: Numbers) -> Numbers:
    """The numbers of the near part: the same call in a window."""
    limit = numbers.far - 1
    return numbers._replace(before=limit, after=0 if numbers.after == 0 else limit)


def far_attention(q: Tensor, k: Tensor, v: Tensor, numbers: Numbers) -> Far:
    """Output and log-sum-exp of the keys at |lag| >= numbers.far."""
    plain, start = _plain(q, v), numbers.far
    m = q.shape[2] - start
    right, right_lse = None, None
    with Beside(q.device) as beside:
        if numbers.after != 0:
            right, right_lse = plain.forward(*_turned(q, k, v, start), numbers.scale)
            right, right_lse = right.contiguous(), _flat(right_lse)
    left, left_lse = plain.forward(q[:, :, start:], k[:, :, :m], v[:, :, :m], numbers.scale)
    left, left_lse = left.contiguous(), _flat(left_lse)
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
    """What the far keys give to the gradients of q, k and v."""
    plain, start = _plain(q, v), numbers.far
    m = q.shape[2] - start
    whole = lse * LN2
    left_lse, right_lse = whole, whole
    first, last = None, None
    if inputs.tails is not None:
        left_lse, right_lse = whole - inputs.tails[0], whole - inputs.tails[2]
    if inputs.table is not None:
        first, last = inputs.table[:, 0].contiguous(), inputs.table[:, -1].contiguous()
    right = None
    with Beside(q.device) as beside:
        if numbers.after != 0:
            right = plain.backward(
                copied(d_out, 0, m, reverse=True),
                *_turned(q, k, v, start),
                copied(out, 0, m, reverse=True, minus=last),
                right_lse[:, :, :m].flip(2),
                numbers.scale,
            )
            right = _packed(right)
    left = plain.backward(
        d_out[:, :, start:],
        q[:, :, start:],
        k[:, :, :m],
        v[:, :, :m],
        out[:, :, start:] if first is None else copied(out, start, m, minus=first),
        left_lse[:, :, start:].contiguous(),
        numbers.scale,
    )
    beside.join(*(right or ()))
    return FarGradients(_packed(left), right)


def _plain(q: Tensor, v: Tensor) -> Plain:
    plain = fastest(q, v)
    assert plain is not None  # or the split would not have been chosen
    return plain


def _turned(q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    m = q.shape[2] - start
    keys, values = (copied(x, start, m, reverse=True) for x in (k, v))
    return copied(q, 0, m, reverse=True), keys, values


def _flat(lse: Tensor) -> Tensor:
    return lse.reshape(lse.shape[:3]).contiguous()


def _packed(parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.contiguous() for x in parts)
    return q, k, v
