"""The operator whence::lag_attention and its gradient keep PyTorch's rules for operators."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from whence import LagBias, LagValues, Line, Mask, build
from whence.kernels.call import as_call
from whence.kernels.fused.backend import given_and_call
from whence.lag import QueryBias

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1"),
    # A cell out of sight may have any logit; whatever its exponential is, its weight is made 0.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]
B, H, N, D = 1, 2, 12, 16
CASES = {  # a method or a kind of bias, the number of queries, and further options of `attend`
    "tisa": ("tisa", N, {}),
    "t5": ("t5:buckets=4,max_distance=8", N, {"causal": True}),
    "alibi": ("alibi", N, {"causal": True}),
    "shaw": ("shaw:clip=2", N, {}),
    "few queries of a band in half precision": ("band", 2, {"causal": True}),  # saves a residual
    "one lag of another query": ("one lag", N, {}),
    "kerple": ("kerple", N, {}),
    "a band": ("band", N, {"window": 5}),
    "a band with tails, values and a mask": (
        "all",
        N,
        {"mask": Mask(keys=torch.arange(N)[None] < 9)},
    ),
    "packed": (
        "band",
        N,
        {"mask": Mask(segments=(torch.arange(N)[None] // 5, torch.arange(N)[None] // 5))},
    ),
    "no bias": ("none", N, {}),
    "few queries of tisa": ("tisa", 1, {"causal": True}),
    "few queries of t5": ("t5:buckets=4,max_distance=8", 2, {"causal": True}),
}
BY_TOKEN = {
    "tisa",
    "shaw",
    "few queries of a band in half precision",
    "one lag of another query",
}  # q, k and v as projections leave them
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def arguments(case: str) -> tuple[Any, ...]:
    """What the operator of a call gets for a case."""
    spec, n_q, options = CASES[case]
    n_k = N if n_q == N else 40
    if case in BY_TOKEN:
        q, k, v = (torch.randn(B, n, H, D).transpose(1, 2) for n in (n_q, n_k, n_k))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    else:
        q, k, v = (leaf(B, H, n, D) for n in (n_q, n_k, n_k))
    if "half" in case:
        q, k, v = (x.detach().half().requires_grad_() for x in (q, k, v))
    bias: Any = None
    values = None
    if spec == "band":
        bias = LagBias(leaf(1, H, 1, 7), Line(), Line())
    elif spec == "all":
        bias = LagBias(leaf(1, H, 1, 7), Line(leaf(1, H, 1), leaf(1, H, 1)), Line(leaf(1, H, 1)))
        values = LagValues(leaf(1, 5, D))
    elif spec == "one lag":
        query = torch.randn(B, N, H, D).transpose(1, 2).requires_grad_()
        bias = QueryBias(query, leaf(H, 1, D))
    elif spec != "none":
        method = build(spec, n_heads=H, d_head=D)
        k_pos = torch.arange(n_k)
        bias = method.score_term(q, k_pos[-n_q:], k_pos)
        values = method.value_term(k_pos[-n_q:], k_pos)
    defaults = {"mask": None, "causal": False, "window": None, "q_start": None, "scale": None}
    made = as_call(q, k, v, bias=bias, values=values, dropout=0.0, **{**defaults, **options})
    given, call = given_and_call(made)
    # An operator's arguments are leaves here, so that the checks may ask for their gradients.
    leaves = [
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in given
    ]
    from whence.kernels.fused.function import SOURCES

    return *leaves, SOURCES, *call.flat()


@pytest.fixture(autouse=True)
def _short_caches_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is a Linux package")
    from whence.kernels.fused import backend

    monkeypatch.setattr(backend, "MANY_KEYS", 32)


@pytest.fixture
def zeros_in_empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes or reads the slopes of a product's tails, and the checks compare all numbers."""
    make = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **options: make(*a, **options).zero_())


def named(given: tuple[Any, ...]) -> tuple[list[Tensor], str, str, tuple[Any, ...]]:
    """The tensors that are there, their names, the names of the learned ones, and the rest."""
    from whence.kernels.fused.function import N_GIVEN, _learned, _named

    tensors, names = _named(given[:N_GIVEN])
    return tensors, names, _learned(tensors, names), given[N_GIVEN:]


@pytest.mark.parametrize(
    "case", [x if x == "tisa" else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_the_operator_of_a_call_passes_pytorchs_checks(case: str) -> None:
    from whence.kernels.fused.function import lag_attention_op

    opcheck(lag_attention_op, arguments(case), test_utils=CHECKS)


@pytest.mark.usefixtures("zeros_in_empty_memory")
@pytest.mark.parametrize("case", CASES)
def test_the_operators_of_output_and_gradients_pass_pytorchs_checks(case: str) -> None:
    from whence.kernels.fused.function import lag_attention_backward_op, lag_attention_forward_op

    tensors, names, learned, rest = named(arguments(case))
    plain = [x.detach() for x in tensors]
    opcheck(lag_attention_forward_op, (plain, names, True, *rest), test_utils=CHECKS)
    results = lag_attention_forward_op(plain, names, True, *rest)
    opcheck(
        lag_attention_backward_op,
        (torch.randn_like(results[0]), [*plain, *results], names, learned, *rest),
        test_utils=CHECKS,
    )


def test_the_operator_gives_what_the_call_gives() -> None:
    from whence.kernels.fused.backend import Call, Given
    from whence.kernels.fused.function import N_GIVEN, lag_attention, lag_attention_op

    for case in CASES:
        given = arguments(case)
        called = lag_attention(Given(*given[:N_GIVEN]), Call.from_flat(given[N_GIVEN + 1 :]))
        found = lag_attention_op(*given)
        torch.testing.assert_close(found, called, rtol=0, atol=0)
        leaves = [x for x in given[:N_GIVEN] if isinstance(x, Tensor) and x.requires_grad]
        slope = torch.randn_like(called)
        for a, b in zip(
            torch.autograd.grad(found, leaves, slope),
            torch.autograd.grad(called, leaves, slope),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=0, check_stride=True)
        if case == "tisa":
            with torch.inference_mode():  # which does not pass through autograd
                torch.testing.assert_close(lag_attention_op(*given), called, rtol=0, atol=0)


def test_an_operator_says_of_which_sources_it_is(tmp_path: Path) -> None:
    # PyTorch's caches of compiled graphs would else give a graph that another version wrote.
    from whence.kernels.fused import function

    assert function.hash_of(Path(function.__file__).parent) == function.SOURCES
    assert "str sources" in str(function.lag_attention_op._schema)
    (tmp_path / "device").mkdir()
    source = tmp_path / "device" / "tile.py"
    source.write_text("MARGIN = 272\n")
    before = function.hash_of(tmp_path)
    source.write_text("MARGIN = 400\n")
    assert function.hash_of(tmp_path) != before
