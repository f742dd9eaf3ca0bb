"""Derivatives beyond the gradient: `reference` has them all, the other backends refuse in words."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap

from whence import attend, build, explain
from whence.nn import positioned_attention

N, HEADS, D = 5, 2, 4
METHODS = {"lag": "tisa", "values": "shaw:clip=2", "dense": "fire", "turned": "rope+alibi"}

Attention = Callable[..., Tensor]

pytestmark = [  # both of torch's own
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


def heads(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, HEADS, N, D, dtype=dtype).unbind()
    return q, k, v


def attention(kind: str, backend: str, dtype: torch.dtype = torch.float64) -> Attention:
    if kind == "plain":
        return lambda q, k, v: attend(q, k, v, backend=backend, causal=True)
    method = build(METHODS[kind], n_heads=HEADS, d_head=D).to(dtype)
    return lambda q, k, v: positioned_attention(method, q, k, v, backend=backend, causal=True)


def forward_mode(f: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out = f(forward_ad.make_dual(q, k), k, v)
        tangent = forward_ad.unpack_dual(out).tangent
    assert tangent is not None
    return tangent


def second(f: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(q, k, v).square().sum(), q, create_graph=True)
    return torch.autograd.grad(first.square().sum(), q)[0]


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda f, q, k, v: vmap(f, in_dims=(0, None, None))(torch.stack([q, 2 * q]), k, v),
    "grad": lambda f, q, k, v: grad(lambda x: f(x, k, v).square().sum())(q),
    "jacrev": lambda f, q, k, v: jacrev(lambda x: f(x, k, v).sum((0, 1, 2)))(q),
    "jvp": lambda f, q, k, v: jvp(lambda x: f(x, k, v), (q,), (k,))[1],
}


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("kind", [*METHODS, "plain"])
def test_reference_has_them_all_and_auto_takes_it(kind: str, backend: str) -> None:
    f, (q, k, v) = attention(kind, backend), heads()
    several = vmap(f, in_dims=(0, None, None))(torch.stack([q, 2 * q]), k, v)
    torch.testing.assert_close(several, torch.stack([f(q, k, v), f(2 * q, k, v)]))
    at = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(f(at, k, v).square().sum(), at)
    torch.testing.assert_close(TRANSFORMS["grad"](f, q, k, v), wanted)
    step = 1e-6
    change = (f(q + step * k, k, v) - f(q - step * k, k, v)) / (2 * step)
    torch.testing.assert_close(TRANSFORMS["jvp"](f, q, k, v), change, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(forward_mode(f, q, k, v), change, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [*METHODS, "plain"])
def test_second_derivatives_of_reference_are_right(kind: str) -> None:
    f, (q, k, v) = attention(kind, "reference"), heads()
    assert torch.autograd.gradgradcheck(lambda x: f(x, k, v)[..., -1, :1], q.requires_grad_())


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_sdpa_refuses_what_it_has_no_rule_for(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=r"no rules for torch\.func .* Take backend='reference'"):
        TRANSFORMS[name](attention(kind, "sdpa"), *heads())


@pytest.mark.parametrize("kind", [*METHODS, "plain"])
def test_sdpa_refuses_forward_mode_but_not_what_stands_beside_it(kind: str) -> None:
    f, (q, k, v) = attention(kind, "sdpa"), heads()
    with pytest.raises(ValueError, match=r"no forward-mode derivatives\. Take backend='reference'"):
        forward_mode(f, q, k, v)
    wanted = f(k, k, v)
    with forward_ad.dual_level():
        forward_ad.make_dual(q, k)  # of which attention sees nothing
        torch.testing.assert_close(f(k, k, v), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["lag", "values", "turned"])
def test_sdpa_refuses_a_second_derivative_by_any_way_back(kind: str) -> None:
    f, (q, k, v) = attention(kind, "sdpa"), heads()
    refused = r"differentiated once, not twice\. Take backend='reference'"
    with pytest.raises(RuntimeError, match=refused):
        second(f, q, k, v)
    at = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(at, k, v).sum(), at, create_graph=True)
    (wanted,) = torch.autograd.grad(f(at, k, v).sum(), at)
    torch.testing.assert_close(first, wanted, rtol=0, atol=0)  # once is right all the same
    with pytest.raises(RuntimeError, match=refused):
        first.sum().backward()
    with pytest.raises(RuntimeError, match="takes no batch of gradients"):
        torch.autograd.functional.jacobian(lambda x: f(x, k, v), q, vectorize=True)


def test_in_half_precision_no_backend_is_left_and_the_error_says_so() -> None:
    f, (q, k, v) = attention("lag", "auto", torch.bfloat16), heads(torch.bfloat16)
    with pytest.raises(ValueError, match=r"no backend can run this call: sdpa has no rules for"):
        vmap(lambda x: f(x, k, v))(q[None])


def test_explain_says_it_too() -> None:
    said: list[Any] = []

    def asked(x: Tensor) -> Tensor:
        bias = build("alibi", n_heads=HEADS, d_head=D).score_term(x, *[torch.arange(N)] * 2)
        said.append(explain(x, x, x, bias=bias))
        return x

    vmap(asked)(heads(torch.float32)[0][None])
    assert said[0].chosen == "reference"
    assert "has no rules for torch.func" in str(said[0])


@pytest.mark.triton
class TestFused:
    @pytest.fixture(autouse=True)
    def _interpreter(self) -> None:
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("run with TRITON_INTERPRET=1, as `make test` does")
        pytest.importorskip("triton", reason="Triton is a Linux package")

    def test_it_refuses_what_it_has_no_rule_for(self) -> None:
        f, (q, k, v) = attention("lag", "fused", torch.float32), heads(torch.float32)
        for transform in TRANSFORMS.values():
            with pytest.raises(ValueError, match=r"no rules for torch\.func"):
                transform(f, q, k, v)
        with pytest.raises(ValueError, match="no forward-mode derivatives"):
            forward_mode(f, q, k, v)

    @pytest.mark.parametrize("kind", ["lag", "values"])
    def test_it_refuses_a_second_derivative(self, kind: str) -> None:
        f, (q, k, v) = attention(kind, "fused", torch.float32), heads(torch.float32)
        with pytest.raises(RuntimeError, match="differentiated once, not twice"):
            second(f, q, k, v)

    def test_it_refuses_bfloat16_in_the_interpreter_and_auto_goes_elsewhere(self) -> None:
        q, k, v = heads(torch.bfloat16)
        bias = build("alibi", n_heads=HEADS, d_head=D).score_term(q, *[torch.arange(N)] * 2)
        with pytest.raises(ValueError, match=r"wrong products of bfloat16 .* backend='sdpa'"):
            attend(q, k, v, bias=bias, backend="fused")
        assert explain(q, k, v, bias=bias).chosen == "sdpa"
        assert explain(*heads(torch.float16), bias=bias).chosen == "fused"
