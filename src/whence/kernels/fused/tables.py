"""Launches for the gradients of tables: of a value table, and of the factors of a product."""

from typing import Any

import torch

from whence.kernels.fused.backend import Numbers, Product, Wanted, by_token
from whence.kernels.fused.device import arguments as a
from whence.kernels.fused.device.d_product import (
    ProductKind,
    Seen,
    product_gradient_kernel,
    table_sum_kernel,
)
from whence.kernels.fused.device.tile import INTERPRETED
from whence.kernels.fused.tiles import ceil_div, narrowest, power_of_two

# Programs of the kernel for the gradients of a product, eight for each multiprocessor of an H200;
# rows in one of its steps; and the most lags, or columns of a head, in one of its tiles.
PRODUCT_PROGRAMS = 1056
PRODUCT_ROWS = 64
PRODUCT_SIDE = 64
# Columns of a table and partial sums that one program adds up at once.
SUM_COLUMNS = 8
SUM_PARTS = 1024


def product_gradients(
    plan: Any,
    product: Product,
    q: Any,
    d_q: Any,
    d_band: Any,
    wanted: Wanted,
    seen: Seen | None,
    *,
    chained: bool = False,
) -> tuple[Any, Any]:
    """The gradients of a product's factors. If the query is q, its gradient is added to d_q.

    `chained` as in Plan.launch.
    """
    query, table = product.query, product.factor
    if d_band is None:  # one lag: one number for all keys, which does not change a softmax
        d_query = None
        if query is not None:
            d_query = plan.zeros(query.shape, query.dtype, tokens=by_token(query))
        return d_query, plan.zeros(table.shape, torch.float32)
    source, d_query = q, d_q
    if query is not None:
        source = query
        d_query = plan.empty(query.shape, query.dtype, tokens=by_token(query))
    d_factor = _product_gradient(
        plan,
        *(d_band, seen),
        *(source, table, product.scale, d_query if wanted.query else None),
        added=query is None,
        table_too=wanted.factor,
        chained=chained,
    )
    return d_query if query is not None and wanted.query else None, d_factor


def seen_cells(sizes: a.Sizes, last: int) -> Seen:
    """The cells of a product's band that the query kernel may have written."""
    reach = sizes.reach
    first = 0 if sizes.before < 0 else max(0, reach - sizes.before)
    final = last if sizes.after < 0 else min(last, reach + sizes.after)
    right = -1 if last == reach else last
    return Seen(sizes.q_start - reach, sizes.n_k, first, final, right)


def table_gradient(
    plan: Any, mass: Any, d_out: Any, table: Any, parts: int = 2, *, chained: bool = False
) -> Any:
    """The gradient of a value table: the sum over rows of mass^T d_out, in the table's shape."""
    return _product_gradient(
        plan,
        mass,
        None,  # every cell was written
        d_out,  # in the place of a query
        table,
        1.0,
        None,  # no gradient of d_out
        added=False,
        table_too=True,
        parts=parts,
        chained=chained,
    )


def mass_parts(q: Any, k: Any, table: Any, numbers: Numbers) -> int:
    """How many numbers of q's dtype represent a mass in the product for a value table's gradient.

    Two have 16 bits in bfloat16, more than are exact in a mass that depends on q.k. Three hold the
    24 bits of float32, to which masses are exact without q.k, and where the lags that a row sees
    share one entry of the table, whose mass is then 1.
    """
    reach, farthest = table.shape[1] // 2, numbers.q_start + q.shape[2] - 1
    one_place = reach == 0 or k.shape[2] - 1 - numbers.q_start <= -reach or -farthest >= reach
    exact = numbers.scale == 0.0 or one_place
    return 3 if exact and q.dtype == torch.bfloat16 else 2


def _product_gradient(
    plan: Any,
    gradient: Any,
    seen: Seen | None,
    query: Any,
    table: Any,
    scale: float,
    d_query: Any,
    *,
    added: bool,
    table_too: bool,
    parts: int = 2,
    chained: bool = False,
) -> Any:
    """Writes or adds to d_query unless it is None; returns the table's gradient if it is wanted.

    Without `seen`, all cells of the band's gradient were written.
    """
    (b, h, n_q, d), width = query.shape, gradient.shape[-1]
    # The rows of all sequences are divided into runs, as many as keep the GPU busy: each leaves a
    # sum of its own.
    rows = min(PRODUCT_ROWS, max(16, power_of_two(n_q)))
    blocks = b * ceil_div(n_q, rows)
    least = ceil_div(blocks, max(1, PRODUCT_PROGRAMS // h))
    # No block is missing at the end if the steps can be chosen so.
    steps = next((n for n in range(least, 2 * least) if blocks % n == 0), least)
    runs = ceil_div(blocks, steps)
    lags = min(PRODUCT_SIDE, max(16, power_of_two(width)))
    piece = min(PRODUCT_SIDE, max(narrowest(), power_of_two(d)))
    sums = plan.empty((runs, h, width, d), torch.float32) if table_too else None
    if d_query is None and sums is None:
        return None
    plan.launch(
        product_gradient_kernel,
        (runs, h, (ceil_div(width, lags) if table_too else 1) * ceil_div(d, piece)),
        *(gradient, a.rows_of(query), a.table_of(table), a.rows_of(d_query), sums),
        *(n_q, *(seen or Seen(0, 0, 0, 0, 0)), blocks, steps, scale),
        warps=8 if query.dtype == torch.float32 else 4,  # without tensor cores: more registers
        chained=chained,
        KIND=ProductKind(
            LAST=width - 1,
            D=d,
            PIECE=piece,
            ROWS=rows,
            LAGS=lags,
            ADDED=added,
            PARTLY=seen is not None,
            EVEN=n_q % rows == 0 and blocks % steps == 0,
            PRECISION="ieee" if _misread(query) else a.precision_of(query),
            PARTS=parts,
            CHAINED=chained,
        ),
    )
    return None if sums is None else table_sum(plan, sums, table, chained=chained)


def _misread(x: Any) -> bool:
    """Whether Triton's interpreter runs, which multiplies bfloat16 wrongly."""
    return bool(x.dtype == torch.bfloat16 and INTERPRETED.value)


def table_sum(plan: Any, sums: Any, table: Any, *, chained: bool = False) -> Any:
    """The sum over runs of rows, and over heads that share the table."""
    (runs, h, width, d), heads = sums.shape, table.shape[0]
    d_table = plan.empty(table.shape, torch.float32)
    plan.launch(
        table_sum_kernel,
        (table.shape[1], ceil_div(d, SUM_COLUMNS), heads),
        *(sums, d_table, runs * h // heads, width - 1),
        warps=8,
        chained=chained,
        D=d,
        COLUMNS=SUM_COLUMNS,
        PARTS=SUM_PARTS,
        CHAINED=chained,
    )
    return d_table
