"""A launch plan written once and run with other tensors, in Triton's interpreter."""

from typing import Any, NamedTuple

import pytest
import torch
from torch.testing import assert_close

pytestmark = pytest.mark.triton

triton = pytest.importorskip("triton", reason="plans launch Triton kernels")
tl = pytest.importorskip("triton.language", reason="plans launch Triton kernels")


class Vector(NamedTuple):
    ptr: Any
    stride: Any


class Pair(NamedTuple):
    x: Vector
    y: Vector


@triton.jit
def add_kernel(pair, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    there = i < n
    x = tl.load(pair.x.ptr + i * pair.x.stride, mask=there, other=0.0)
    if pair.y.ptr is not None:
        x += tl.load(pair.y.ptr + i * pair.y.stride, mask=there, other=0.0)
    tl.store(out_ptr + i, x, mask=there)


def planned(x: torch.Tensor, y: torch.Tensor | None) -> Any:
    from whence.kernels.fused.plan import Plan, slots_of

    slots = slots_of([x, y])
    plan = Plan(x.device, 2)
    vectors = [Vector(s, 0 if s is None else s.stride(0)) for s in slots]
    first = plan.empty(x.shape, x.dtype)
    plan.launch(add_kernel, (1,), Pair(*vectors), first, x.shape[0], BLOCK=16)
    second = plan.zeros((4, x.shape[0]), x.dtype)
    plan.launch(
        add_kernel, (1,), Pair(Vector(first, 1), Vector(first, 1)), second, x.shape[0], BLOCK=16
    )
    total = plan.summed(second, (1, x.shape[0]))
    plan.returns(first, None, total, slots[0])
    return plan


def test_a_plan_gives_what_its_kernels_compute_with_the_tensors_of_each_run():
    plan = planned(torch.randn(5), torch.randn(10)[::2])
    for _ in range(3):
        x, y = torch.randn(5), torch.randn(10)[::2]
        first, nothing, total, given = plan.run([x, y])
        assert_close(first, x + y)
        assert_close(total, 2 * (x + y)[None])
        assert nothing is None
        assert given is x


def test_a_missing_tensor_is_none_to_the_kernel():
    x = torch.randn(7)
    assert_close(planned(x, None).run([x, None])[0], x)


def test_a_plan_says_what_it_launches():
    launches = planned(torch.randn(5), None).launches
    assert [(each.kernel, each.grid, each.constants) for each in launches] == [
        ("add_kernel", (1,), {"BLOCK": 16})
    ] * 2


def test_plans_are_made_once_for_a_signature_and_the_oldest_goes_first():
    from whence.kernels.fused.plan import Plans

    plans, made = Plans(most=2), []

    def find(signature: int) -> Any:
        def make() -> Any:
            made.append(signature)
            return object()

        return plans.find(signature, make)

    one = find(1)
    assert find(1) is one
    find(2), find(3)
    assert len(plans) == 2
    find(2), find(1)
    assert made == [1, 2, 3, 1]
    plans.forget()
    assert len(plans) == 0


def test_a_plan_that_cannot_be_made_is_made_at_the_next_call():
    from whence.kernels.fused.plan import Plans

    plans, wanted = Plans(), object()

    def fails() -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        plans.find(1, fails)
    assert len(plans) == 0
    assert plans.find(1, lambda: wanted) is wanted


def test_tensors_of_a_plan_are_on_one_device():
    from whence.kernels.fused.plan import layout_of, slots_of

    here, elsewhere = torch.empty(3), torch.empty(3, device="meta")
    assert layout_of(here) != layout_of(elsewhere)
    with pytest.raises(ValueError, match="on one device, got cpu and meta"):
        slots_of([here, None, elsewhere])


def test_memory_with_tokens_lies_with_the_heads_of_a_token_together():
    from whence.kernels.fused.plan import Plan

    plan = Plan(torch.device("cpu"), 0)
    plan.returns(plan.empty((2, 3, 5, 4), torch.float32, tokens=True))
    (out,) = plan.run([])
    assert out.transpose(1, 2).is_contiguous()


def test_what_one_plan_puts_together_another_finds_apart():
    from whence.kernels.fused.plan import Plan, Room, parts_of, size_of, slots_of

    x = torch.randn(5)
    rooms = [Room((5,), torch.float32), None, Room((1, 2, 5, 2), torch.float16, tokens=True)]
    (slot,), plan = slots_of([x]), Plan(x.device, 1)
    made = [plan.empty(r.shape, r.dtype, tokens=r.tokens) if r else None for r in rooms]
    for target in (made[0], made[2]):
        pair = Pair(Vector(slot, 1), Vector(None, 0))
        plan.launch(add_kernel, (1,), pair, target, 5, BLOCK=16)
    plan.returns(plan.together(made))
    (state,) = plan.run([x])
    assert state.shape == (size_of(rooms),) == (1024,)

    first, nothing, second = parts_of(state, rooms)
    assert nothing is None
    assert_close(first, x)
    assert second.transpose(1, 2).is_contiguous()
    assert_close(second.transpose(1, 2).flatten()[:5], x.half())

    (whole,), plan = slots_of([state]), Plan(x.device, 1)
    first, nothing, second = plan.apart(whole, rooms)
    assert nothing is None
    out = plan.empty((5,), torch.float32)
    plan.launch(add_kernel, (1,), Pair(Vector(first, 1), Vector(second, 1)), out, 5, BLOCK=16)
    plan.returns(out)
    assert_close(plan.run([state])[0], x + x.half())
    empty = Plan(x.device, 0)
    assert empty.together([None]) is None
    assert empty.apart(None, [None]) == [None]


def test_a_signature_tells_apart_what_a_kernel_would_be_compiled_for():
    from whence.kernels.fused.plan import layout_of

    x = torch.randn(4, 6)
    assert layout_of(x) == layout_of(x.clone())
    others = [x.T, x[:3], x.double(), torch.randn(25)[1:].view(4, 6), None]
    assert len({layout_of(x), *map(layout_of, others)}) == 6
