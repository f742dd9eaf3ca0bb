"""Gradients whose last digits show: those that are 0, and sums of float32 in bfloat16's products.

Triton's interpreter rounds less often than a GPU, or wrongly. Here it rounds as a GPU does: a
product and a sum or difference that follows it once (a fused multiply-add), a sum of products in
the same order in every cell of a matrix, and bfloat16 to the nearest number.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from whence import LagBias, LagValues, Line, LowRankBias, Mask, attend
from whence.kernels.call import as_call
from whence.kernels.reference import attend_rows
from whence.lag import BUCKETS, GAUSSIANS, LINE, CurveBias
from whence.units import GAIN

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("_interpreter")]


@pytest.fixture(autouse=True, params=["short", "tiled"])
def _kernels(
    request: pytest.FixtureRequest, _interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels for short sequences, and those of long ones, which cut a head into tiles."""
    from whence.kernels.fused import short

    brief = request.param == "short"
    monkeypatch.setattr(short, "is_faster", lambda q, k, v, call: brief)


@pytest.fixture
def _fused(_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product and the sum or difference that it goes into are rounded once."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    apart = InterpreterBuilder.binary_op

    def exact(x: Any) -> Any:
        factors = [y.data.astype(np.float64) for y in getattr(x, "factors", (x,))]
        return np.prod(factors, axis=0) if len(factors) > 1 else factors[0]

    def fused(builder: Any, x: Any, y: Any, operation: Any) -> Any:
        found = apart(builder, x, y, operation)
        if found.data.dtype != np.float32:
            return found
        if operation is np.multiply:
            found.factors = (x, y)
        elif operation in (np.add, np.subtract) and (
            hasattr(x, "factors") or hasattr(y, "factors")
        ):
            if hasattr(x, "factors"):  # of two products, one is rounded before
                y = TensorHandle(y.data, y.dtype)
            return TensorHandle(operation(exact(x), exact(y)).astype(np.float32), found.dtype)
        return found

    monkeypatch.setattr(InterpreterBuilder, "binary_op", fused)


@pytest.fixture
def _in_order(_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells of a matrix product add their products up in one order, as in a tensor core.

    The interpreter calls NumPy, whose library adds in an order that depends on where a cell lies.
    The query kernel has dP of a row and a key at (r, c) and balances delta so that it cancels. The
    key kernel has dP at (c, r), and on a GPU it comes from the same instructions.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def products(builder: Any, x: Any, y: Any, total: Any, *options: Any) -> Any:
        found = total.data
        left, right = (z.data.astype(found.dtype) for z in (x, y))
        for i in range(left.shape[-1]):
            found = found + left[..., i, None] * right[..., None, i, :]
        return TensorHandle(found, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", products)


@pytest.fixture
def _bfloat16(_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 as on a GPU: the interpreter cuts digits off, and multiplies the bits as integers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from whence.kernels.fused import backend, tables

    convert, cast, dot = (
        interpreter._convert_float,
        InterpreterBuilder.cast_impl,
        InterpreterBuilder.create_dot,
    )

    def nearest(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return torch.from_numpy(x.copy()).bfloat16().view(torch.uint16).numpy()
        return convert(x, source, target, mode)

    def through_float32(builder: Any, x: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and not x.dtype.scalar.is_floating():
            x = cast(builder, x, tl.float32)
        return cast(builder, x, target)

    def products(builder: Any, x: Any, y: Any, total: Any, *options: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return dot(builder, x, y, total, *options)
        x, y = ((z.data.astype(np.uint32) << 16).view(np.float32) for z in (x, y))
        return TensorHandle(np.matmul(x, y) + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter, "_convert_float", nearest)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", through_float32)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", products)
    monkeypatch.setattr(backend, "refuse", lambda call: None)
    monkeypatch.setattr(tables, "_misread", lambda x: False)


def heads(dtype: torch.dtype, *, d_v: int = 64, n_k: int = 40) -> list[Tensor]:
    """q, k and v of 40 queries."""
    shapes = ((1, 2, 40, 16), (1, 2, n_k, 16), (1, 2, n_k, d_v))
    return [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]


def curve() -> list[Tensor]:
    return [torch.randn(2, 3).requires_grad_() for _ in range(3)]


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    d_out = torch.randn(out.shape).bfloat16().to(out.dtype)  # the same numbers in every dtype
    return torch.autograd.grad(out, leaves, d_out)


@pytest.mark.usefixtures("_fused", "_in_order")
@pytest.mark.parametrize("curved", [True, False])
@pytest.mark.parametrize("n_k", [40, 1])
def test_dropout_of_a_row_s_only_key_gives_the_logits_no_gradient(n_k: int, curved: bool) -> None:
    """The output is rounded, and so is what dropout makes of dP; dS is 0 all the same."""
    q, k, v = heads(torch.float16, n_k=n_k)
    leaves = curve() if curved else []
    bias = CurveBias(GAUSSIANS, 3, *leaves) if curved else None
    window = 0 if n_k > 1 else None
    out = attend(q, k, v, bias=bias, window=window, q_start=0, dropout=0.2, backend="fused")
    assert out.any()
    assert not out.all()
    for found in gradients(out, [q, k, *leaves]):
        assert not found.any()


@pytest.mark.usefixtures("_fused", "_in_order")
@pytest.mark.parametrize("reach", [0, 2])
def test_a_value_table_gives_the_logits_of_a_row_s_only_key_no_gradient(reach: int) -> None:
    """The output is v and a vector of the table, and rounded."""
    q, k, v = heads(torch.float16)
    leaves, table = curve(), torch.randn(1, 2 * reach + 1, 64)
    sides = [torch.randn(1, 2, x.shape[2], 3).requires_grad_() for x in (q, k)]
    bias = CurveBias(GAUSSIANS, 3, *leaves) + LowRankBias(*sides)
    out = attend(q, k, v, bias=bias, values=LagValues(table), window=0, backend="fused")
    for found in gradients(out, [q, k, *sides, *leaves]):
        assert not found.any()


@pytest.mark.usefixtures("_bfloat16")
@pytest.mark.parametrize(
    ("reach", "options"),
    [
        pytest.param(1, {"scale": 0.0, "causal": True}, id="no products, causal"),
        pytest.param(1, {"scale": 0.0}, id="no products"),
        pytest.param(0, {"causal": True}, id="one lag, causal"),
        pytest.param(0, {}, id="one lag"),
        pytest.param(3, {"q_start": 42}, id="all keys far to the left"),
        pytest.param(3, {"q_start": -42}, id="all keys far to the right"),
    ],
)
def test_a_value_table_s_gradient_in_bfloat16_has_the_digits_of_float32(
    reach: int, options: dict[str, Any]
) -> None:
    """Without q.k the masses have them, and where a row has a single mass, 1, so has its sum.

    Two parts in bfloat16 would hold 16 of the 24.
    """
    q, k, v = heads(torch.bfloat16, d_v=16)
    table = torch.randn(1, 2 * reach + 1, 16).requires_grad_()

    def found(*qkv: Tensor, backend: str) -> Tensor:
        values = LagValues(table.to(torch.promote_types(qkv[0].dtype, torch.float32)))
        out = attend(*qkv, values=values, **options, backend=backend)
        return gradients(out, [table])[0]

    wanted = found(q.double(), k.double(), v.double(), backend="reference")
    torch.testing.assert_close(found(q, k, v, backend="fused"), wanted, rtol=0, atol=2e-6)


def test_a_curve_s_gradient_has_the_digits_of_a_value_table() -> None:
    """Rounded to half precision, the table would have the same error in all rows."""
    q, k, v = heads(torch.float16, d_v=16)
    slope, table = torch.rand(2).requires_grad_(), torch.randn(1, 5, 16)

    def found(*qkv: Tensor, backend: str) -> Tensor:
        dtype = torch.promote_types(qkv[0].dtype, torch.float32)
        bias, values = CurveBias(LINE, 0, slope.to(dtype)), LagValues(table.to(dtype))
        out = attend(*qkv, bias=bias, values=values, scale=0.0, backend=backend)
        return gradients(out, [slope])[0]

    v = torch.zeros_like(v)  # dS comes from the table alone
    wanted = found(q.double(), k.double(), v.double(), backend="reference")
    torch.testing.assert_close(found(q, k, v, backend="fused"), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [3, 40])
def test_a_curve_s_gradient_beside_a_value_table_is_as_balanced_as_without_one(n: int) -> None:
    """What the output's rounding leaves of a row's dS is taken off at the table's ends, too."""
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(2, 4, n, 16).half() for _ in range(4))
    leaves = [x.requires_grad_() for x in (torch.randn(4, 5), torch.randn(4, 5), torch.randn(4, 5))]

    def found(backend: str, values: LagValues | None, kind: torch.dtype) -> tuple[Tensor, ...]:
        parameters = [x.to(torch.promote_types(kind, torch.float32)) / GAIN for x in leaves]
        bias = CurveBias(GAUSSIANS, n - 1, *parameters)
        table = None if values is None else LagValues(values.table.to(parameters[0].dtype))
        heads = [x.to(kind) for x in (q, k, v)]
        out = attend(*heads, bias=bias, values=table, scale=0.0, backend=backend)
        return torch.autograd.grad(out, leaves, d_out.to(kind))

    def error(values: LagValues | None) -> float:
        pairs = zip(
            found("fused", values, torch.float16),
            found("reference", values, torch.float64),
            strict=True,
        )
        return max((a.double() - b).abs().max().item() / b.abs().max().item() for a, b in pairs)

    assert error(LagValues(torch.randn(1, 3, 16))) < 4 * max(error(None), 1e-6)


@pytest.mark.parametrize("seen", ["documents", "padding", "all keys"])
def test_a_wide_curve_s_gradient_is_as_exact_as_pytorch_s_where_rows_see_few_keys(
    seen: str,
) -> None:
    """Over a few keys the curve is nearly constant, and what should cancel in a row must do so."""
    n, place = 72, torch.arange(72)
    document = (place // 6)[None]
    keys = (place < 6)[None]
    masks = {"documents": Mask(segments=(document, document)), "padding": Mask(keys=keys)}
    mask = masks.get(seen)

    def found(dtype: torch.dtype, *, fused: bool) -> list[Tensor]:
        kind = torch.promote_types(dtype, torch.float32)
        leaves = [x.to(kind).requires_grad_() for x in shape]
        curve = CurveBias(GAUSSIANS, n - 1, *(x / GAIN for x in leaves))
        qkv = [x.to(dtype) for x in heads]
        if fused:
            out = attend(*qkv, bias=curve, mask=mask, backend="fused")
        else:
            options = dict.fromkeys(("values", "window", "scale", "q_start"))
            call = as_call(*qkv, bias=curve, mask=mask, causal=False, dropout=0.0, **options)
            out = attend_rows(call, slice(0, n))
        return list(torch.autograd.grad(out, leaves, d_out.to(dtype)))

    errors = torch.zeros(2, 3, dtype=torch.float64)  # squares, of three parameters
    for draw in range(4):
        torch.manual_seed(draw)
        *heads, d_out = (torch.randn(1, 4, n, 16).half() for _ in range(4))
        shape = [torch.randn(4, 1), 5 + torch.rand(4, 1), 30 * torch.randn(4, 1)]
        truth = found(torch.float64, fused=False)
        for row, fused in zip(errors, (True, False), strict=True):
            pairs = zip(found(torch.float16, fused=fused), truth, strict=True)
            row += torch.stack([(x - t).square().mean() for x, t in pairs])
    ours, same = errors.sqrt()
    assert (ours <= 2 * same).all(), ours / same


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of cells out of sight
@pytest.mark.parametrize("_kernels", ["tiled"], indirect=True)
@pytest.mark.parametrize("contracted", [False, True])
def test_in_float32_weights_are_as_exact_as_pytorch_s_where_slopes_make_logits_large(
    contracted: bool, request: pytest.FixtureRequest
) -> None:
    if contracted:
        request.getfixturevalue("_fused")

    def found(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, band)]
        left, level, right, other_level = (x.to(dtype) for x in lines)
        bias = LagBias(leaves[3], Line(level, left), Line(other_level, right))
        out = attend(*leaves[:3], bias=bias, backend=backend)
        return [out.detach(), *gradients(out, leaves)]

    errors = torch.zeros(2, 5, dtype=torch.float64)  # squares of five tensors
    for draw in range(6):  # PyTorch's error in one draw depends on the CPU, by a factor of two
        torch.manual_seed(draw)
        q, k, v = (torch.randn(1, 4, n, 16) for n in (20, 150, 150))
        band, *lines = (torch.randn(1, 4, 1, 7), *torch.randn(4, 1, 4, 1))
        truth = found(torch.float64, "reference")
        for row, backend in zip(errors, ("fused", "reference"), strict=True):
            pairs = zip(found(torch.float32, backend), truth, strict=True)
            row += torch.stack([(x - t).square().mean() for x, t in pairs])
    ours, same = errors.sqrt()
    assert (ours < 1.5 * same).all(), ours / same


def test_one_bucket_for_all_lags_gets_no_gradient() -> None:
    """The same number for all keys does not change a softmax."""
    q, k, v = heads(torch.float16)
    table, bucket = torch.randn(4, 2).requires_grad_(), torch.tensor([1])
    out = attend(q, k, v, bias=CurveBias(BUCKETS, 0, table, bucket), causal=True, backend="fused")
    assert not gradients(out, [table])[0].any()


@pytest.mark.parametrize(
    ("n_q", "n_k"), [(1, 300), (40, 40)]
)  # many keys of few queries are shared out
def test_in_float32_no_weight_depends_on_a_logarithm(
    n_q: int, n_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rounding, here a coarse one, would be the same in all rows with as many equal keys."""
    import numpy as np

    exact = np.log2
    monkeypatch.setattr(np, "log2", lambda x: exact(x) + np.float32(1e-2))
    torch.manual_seed(0)
    given = [torch.randn(2, 2, n, 16) for n in (n_q, n_k, n_k, n_q)]
    table, shape = torch.randn(1, 5, 16), torch.randn(3, 2, 3) / GAIN

    def gradients(backend: str) -> tuple[Tensor, ...]:
        q, k, v, d_out = given
        learned = [x.clone().requires_grad_() for x in (v, table, *shape)]
        bias, values = CurveBias(GAUSSIANS, n_k - 1, *learned[2:]), LagValues(learned[1])
        out = attend(q, k, learned[0], bias=bias, values=values, scale=0.0, backend=backend)
        return out, *torch.autograd.grad(out, learned, d_out)

    torch.testing.assert_close(gradients("fused"), gradients("reference"), rtol=1e-4, atol=1e-5)


def test_in_float32_no_curve_depends_on_the_gpu_s_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounding, here a coarse one, would be the same in all rows."""
    import numpy as np

    torch.manual_seed(0)
    q, k, v = heads(torch.float32, d_v=16)
    learned = [(x.detach() / GAIN).requires_grad_() for x in curve()]
    d_out = torch.randn_like(v)

    def found(backend: str) -> tuple[Tensor, ...]:
        out = attend(q, k, v, bias=CurveBias(GAUSSIANS, 39, *learned), backend=backend)
        return out, *torch.autograd.grad(out, learned, d_out)

    wanted, exact = found("reference"), np.exp
    monkeypatch.setattr(np, "exp", lambda x: exact(x) * np.float32(1.01))
    torch.testing.assert_close(found("fused"), wanted, rtol=1e-4, atol=1e-5)
