"""The groups of arguments of a launch, from the tensors of a call, and the numbers behind them.

Nothing here touches data: of tensors and slots only shape, strides and dtype are read. A group of
which a call has nothing is None, since Triton reads each argument at every launch.
"""

from typing import Any

import torch

from whence.kernels.fused.backend import Inputs, Numbers, Product
from whence.kernels.fused.device import arguments as a


def rows_of(x: Any) -> a.Rows:
    """Rows [b, h, n, d], or no rows."""
    return a.Rows(None, 0, 0, 0) if x is None else a.Rows(x, *x.stride()[:3])


def table_of(x: Any) -> a.Table | None:
    """A table [h|1, lag, d]."""
    return None if x is None else a.Table(x, *strides_of(x, 0))


def visible_of(inputs: Inputs) -> a.Visible | None:
    """The padding mask and the segments."""
    given = (inputs.keys, inputs.q_segment, inputs.k_segment)
    if all(x is None for x in given):
        return None
    return a.Visible(*given, *[stride for x in given for stride in strides_of(x, 0)])


def product_of(q: Any, product: Product | None) -> a.Product | None:
    """The factors of a band that is a product."""
    if product is None:
        return None
    query = q if product.query is None else product.query
    table = a.Table(product.table, *strides_of(product.table, 0))
    return a.Product(rows_of(query), table, product.scale)


def strides_of(x: Any, *axes: int) -> tuple[int, ...]:
    """The strides of these axes; 0 for an axis of size 1, which broadcasts, or without a tensor."""
    if x is None:
        return (0,) * len(axes)
    return tuple([0 if x.shape[axis] == 1 else x.stride(axis) for axis in axes])


def ceil_div(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(-n // size)  # triton.cdiv costs ten times as much


def power_of_two(n: int) -> int:
    """The least one that is not smaller."""
    return 1 << (n - 1).bit_length()


def last_place(reach: int, numbers: Numbers) -> int:
    """The last place of a row of lags from -reach on: that of lag 0 in a causal call."""
    return reach if numbers.after == 0 else 2 * reach


def precision_of(q: Any) -> str:
    """float32 is multiplied in full precision: TF32 on tensor cores would lose three digits."""
    return "ieee" if q.dtype == torch.float32 else "tf32"
