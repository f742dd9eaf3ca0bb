"""The simulated GPU: instructions give what they give on a GPU, and what is wrong there is an error."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ptx import Kernel, UnknownError
from ptx_machine import GlobalMemory, GpuError, Machine

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry made(.param .u64 .ptr .global .align 1 made_param_0, .param .u32 made_param_1)
{
    .reg .pred %p<4>;
    .reg .b16 %rs<4>;
    .reg .b32 %r<20>;
    .reg .b64 %rd<8>;
    ld.param.b64 %rd1, [made_param_0];
    ld.param.b32 %r9, [made_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    shl.b32 %r2, %r1, 2;            // this thread's word of shared memory
    xor.b32 %r3, %r2, 252;          // and that of the thread across
"""


def run(
    body: str, x: Tensor, number: Any = 0, grid: int = 1, shared: int = 256, threads: int = 64
) -> Tensor:
    """Run threads on a tensor; their word is at [%rd3]."""
    memory = GlobalMemory([x])
    kernel = Kernel(HEAD + body + "\nret;\n}")
    sizes = {"shared": shared, "threads": threads, "grid": (grid, 1, 1)}
    Machine(kernel, memory, params=[memory.address(x), number], **sizes).run()
    memory.give_back()
    return x


def stored(body: str, number: Any = 0, threads: int = 64, **options: Any) -> np.ndarray[Any, Any]:
    """What the threads have in %r10."""
    body += "\nst.global.b32 [%rd3], %r10;"
    x = torch.zeros(threads, dtype=torch.int32)
    return run(body, x, number, threads=threads, **options).numpy()


def words(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).view(torch.int32)


TURNED = "st.shared.b32 [%r2], %r1; {barrier} ld.shared.b32 %r10, [%r3];"


def test_a_barrier_orders_two_warps() -> None:
    assert (stored(TURNED.format(barrier="bar.sync 0;")) == 63 - np.arange(64)).all()


@pytest.mark.parametrize("barrier", ["", "bar.warp.sync 0xffffffff;"])
def test_two_warps_without_a_barrier_are_a_race(barrier: str) -> None:
    with pytest.raises(GpuError, match="read that another warp writes"):
        stored(TURNED.format(barrier=barrier))


def test_what_is_read_is_not_overwritten_before_a_barrier() -> None:
    body = TURNED.format(barrier="bar.sync 0;") + "{again} st.shared.b32 [%r2], %r10;"
    stored(body.format(again="bar.sync 0;"))
    with pytest.raises(GpuError, match="written that another warp reads"):
        stored(body.format(again=""))


@pytest.mark.parametrize("writer", [0, 1])
def test_what_several_warps_or_programs_read_at_once_none_of_them_may_write(writer: int) -> None:
    warps = f"""
    mov.b32 %r11, 0;
    st.shared.b32 [%r11], 7;
    bar.sync 0;
    ld.shared.b32 %r10, [%r11];
    shr.u32 %r12, %r1, 5;
    setp.eq.u32 %p1, %r12, {writer};
    @%p1 st.shared.b32 [%r11], 9;
    """
    programs = f"""
    ld.global.b32 %r10, [%rd1];
    mov.u32 %r11, %ctaid.x;
    setp.eq.u32 %p1, %r11, {writer};
    setp.eq.and.u32 %p1, %r1, 32, %p1;
    @%p1 st.global.b32 [%rd1], 9;
    """
    for body, grid in ((warps, 1), (programs, 2)):
        with pytest.raises(GpuError, match="written that another warp reads"):
            run(body, torch.zeros(64, dtype=torch.int32), grid=grid)


def test_threads_of_a_warp_need_no_barrier() -> None:
    near = "xor.b32 %r3, %r2, 124; st.shared.b32 [%r2], %r1; ld.shared.b32 %r10, [%r3];"
    assert (stored(near) == np.arange(64) ^ 31).all()


def test_two_warps_or_programs_that_write_different_numbers_are_a_race() -> None:
    one = "st.global.b32 [%rd1], {x};"
    x = torch.zeros(64, dtype=torch.int32)
    assert run(one.format(x="%r9"), x, 7, grid=3)[0] == 7  # the same number
    with pytest.raises(GpuError, match="write different numbers"):
        run(one.format(x="%r1"), x)
    with pytest.raises(GpuError, match="write different numbers"):
        run("mov.u32 %r10, %ctaid.x; " + one.format(x="%r10"), x, grid=2)


def test_an_address_outside_of_all_tensors_or_not_aligned_is_an_error() -> None:
    x = torch.zeros(64, dtype=torch.int32)
    run("st.global.b32 [%rd3], %r1;", x)
    for body, what in {
        "st.global.b32 [%rd3+4], %r1;": "a store outside of all tensors",
        "ld.global.b32 %r10, [%rd3+-4];": "a load outside of all tensors",
        "ld.global.b64 %rd4, [%rd3];": "no multiple",
        "ld.shared.b32 %r10, [%r2+4];": "beyond 256 bytes of shared memory",
    }.items():
        with pytest.raises(GpuError, match=what):
            run(body, x)


def test_a_store_of_four_numbers_is_outside_where_one_of_them_is() -> None:
    x = torch.zeros(64, 3, dtype=torch.int32)[:, 0]  # the first and the last belong to it
    body = "setp.eq.u32 %p1, %r1, 0; @%p1 st.global.v4.b32 [%rd1], {%r1, %r1, %r1, %r1};"
    with pytest.raises(GpuError, match="a store outside of all tensors"):
        run(body, x)


def test_what_lies_between_the_elements_of_a_view_is_outside_of_it() -> None:
    x = torch.zeros(64, 2, dtype=torch.int32)[:, 0]
    body = "add.s64 %rd2, %rd2, %rd2; add.s64 %rd3, %rd1, %rd2; st.global.b32 [%rd3{}], %r1;"
    assert run(body.format(""), x).tolist() == list(range(64))
    with pytest.raises(GpuError, match="a store outside of all tensors"):
        run(body.format("+4"), x)


def test_masked_threads_touch_nothing() -> None:
    body = "setp.lt.u32 %p1, %r1, 60; @%p1 st.global.b32 [%rd3+16], %r1;"
    assert run(body, torch.zeros(64, dtype=torch.int32))[4:].tolist() == list(range(60))


def test_shared_memory_that_nobody_wrote_is_not_read() -> None:
    with pytest.raises(GpuError, match="nobody wrote"):
        stored("ld.shared.b32 %r10, [%r2];")


START = """
    shl.b32 %r2, %r1, 4;
    mul.wide.u32 %rd4, %r1, 16;
    add.s64 %rd4, %rd1, %rd4;
    cp.async.cg.shared.global [%r2], [%rd4], 0x10;
    cp.async.commit_group;
"""
WAIT = "cp.async.wait_group {};"
LOAD = "ld.shared.b32 %r10, [%r2+4]; bar.sync 0; st.global.b32 [%rd3], %r10;"


def test_a_copy_is_there_once_it_was_waited_for() -> None:
    x = torch.arange(256, dtype=torch.int32)
    late = run(START + WAIT.format(0) + LOAD, x.clone(), shared=1024)
    assert late[:64].tolist() == x[1::4].tolist()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (WAIT.format(1) + LOAD, "read that was not waited for"),
        ("st.shared.b32 [%r2], 5;" + WAIT.format(0), "a copy or a product in flight uses"),
        ("", "ends with a copy or a product in flight"),
    ],
)
def test_a_copy_in_flight_is_left_alone(body: str, message: str) -> None:
    with pytest.raises(GpuError, match=message):
        run(START + body, torch.arange(256, dtype=torch.int32), shared=1024)


# A matrix [64, 16] of ones times one of [16, 8], in bfloat16: an operand's blocks of 8 x 8 are 128
# bytes each, the next in depth 1,024 bytes on in the first, 128 in the second.
ONES = 0x3F803F80  # two of them
FILL = f"""
    mov.b64 %rd5, {64 << 16 | 8 << 32};
    mov.b64 %rd6, {128 | 8 << 16 | 8 << 32};
    mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0;
    st.shared.b32 [%r2], {ONES}; st.shared.b32 [%r2+512], {ONES}; st.shared.b32 [%r2+1024], {ONES};
    st.shared.b32 [%r2+1536], {ONES}; st.shared.b32 [%r2+2048], {ONES};
"""
FENCE = "fence.proxy.async.shared::cta;"
MULTIPLY = """
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
        {%r10, %r11, %r12, %r13}, %rd5, %rd6, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
"""
DONE = "wgmma.wait_group.sync.aligned {};"


def multiplied(body: str) -> np.ndarray[Any, Any]:
    return stored(FILL + body, threads=128, shared=2560).view(np.float32)


def test_four_warps_multiply_two_matrices_in_shared_memory() -> None:
    assert (multiplied(FENCE + "bar.sync 0;" + MULTIPLY + DONE.format(0)) == 16).all()
    assert (multiplied("bar.sync 0;" + FENCE + MULTIPLY + DONE.format(0)) == 16).all()


FIRST = "setp.lt.u32 %p1, %r1, 32;"  # the first warp
ZERO = f"{FIRST} @%p1 st.shared.b32 [%r2], 0;"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bar.sync 0;" + MULTIPLY + DONE.format(0), "without a fence"),
        (FENCE + MULTIPLY + DONE.format(0), "without a barrier between"),
        (f"bar.sync 0; {ZERO} {FENCE} {MULTIPLY}" + DONE.format(0), "without a barrier between"),
        (f"bar.sync 0; {FENCE} {MULTIPLY} bar.sync 0; {ZERO}" + DONE.format(0), "in flight uses"),
        (f"bar.sync 0; {FENCE} {MULTIPLY}" + DONE.format(1), "ends with a copy or a product"),
        (f"{FIRST} @%p1 {FENCE} bar.sync 0; {MULTIPLY}" + DONE.format(0), "without a fence"),
    ],
    ids=["no fence", "no barrier", "an own word", "an early write", "no wait", "one warp's fence"],
)
def test_operands_of_a_product_are_shown_and_left_alone(body: str, message: str) -> None:
    with pytest.raises(GpuError, match=message):
        multiplied(body)


def test_memory_that_a_kernel_writes_is_not_constant() -> None:
    body = "{} bar.sync 0; ld.global.nc.b32 %r10, [%rd3]; bar.sync 0;"
    stored(body.format(""))
    with pytest.raises(GpuError, match="read as constant"):
        stored(body.format("st.global.b32 [%rd3], %r1;"))
    second = "and.b32 %r11, %r1, 1; setp.eq.u32 %p1, %r11, 1; @%p1 st.global.b32 [%rd3], 5;"
    pair = f"{second} bar.sync 0; @!%p1 ld.global.nc.v2.b32 {{%r12, %r10}}, [%rd3]; bar.sync 0;"
    with pytest.raises(GpuError, match="read as constant"):
        stored(pair)


def test_a_chained_kernel_waits_for_the_one_before() -> None:
    wait, load = "griddepcontrol.wait;", "ld.global.b32 %r10, [%rd3];"
    stored(wait + load)
    with pytest.raises(GpuError, match="before the wait for the kernel before"):
        stored(load + wait)
    with pytest.raises(GpuError, match="a copy before the wait for the kernel before"):
        run(START + wait, torch.arange(256, dtype=torch.int32), shared=1024)


def test_warps_that_branch_differently_meet_again() -> None:
    body = """
    mov.b32 %r10, 0;
    and.b32 %r11, %r1, 3;
$again:
    setp.eq.s32 %p1, %r11, 0;
    @%p1 bra $done;
    add.s32 %r10, %r10, %r1;
    add.s32 %r11, %r11, -1;
    bra.uni $again;
$done:
    shfl.sync.idx.b32 %r10, %r10, 3, 31, -1;
"""
    assert stored(body).tolist() == [9] * 32 + [3 * 35] * 32


def test_an_instruction_of_a_warp_that_some_of_its_threads_miss_is_an_error() -> None:
    some = "setp.lt.u32 %p1, %r1, 40; @%p1 bra $end; {}\n$end:\n mov.b32 %r10, %r1;"
    for body in ("shfl.sync.bfly.b32 %r10, %r1, 1, 31, -1;", "bar.sync 0;"):
        with pytest.raises(GpuError, match="some threads of a warp"):
            stored(some.format(body))
    with pytest.raises(GpuError, match="wait at different barriers"):
        stored("setp.lt.u32 %p1, %r1, 32; @%p1 bra $on; bar.sync 0;\n$on:\n bar.sync 0;")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("bfe.u32 %r10, %r9, 4, 8;", 0x67),
        ("bfe.s32 %r10, %r9, 8, 8;", 0x56),
        ("prmt.b32 %r10, %r9, %r9, 0x0123;", 0x78563412),
        ("lop3.b32 %r10, %r9, 0xff, 0, 0x30;", 0x12345600),
        ("shl.b32 %r10, %r9, 40;", 0),
        ("shr.s32 %r11, -8, 1; add.s32 %r10, %r11, 0;", -4),
        (
            "div.s32 %r10, -7, 2; rem.s32 %r11, -7, 2; mul.lo.s32 %r11, %r11, 16; add.s32 %r10, %r10, %r11;",
            -19,
        ),
        ("div.s32 %r10, 0x80000000, 3;", -715827882),
        ("bfe.s32 %r10, 0xF0000000, 28, 8;", -1),
        ("bfe.u32 %r10, %r9, 40, 8;", 0),
        ("mul.rn.bf16x2 %r10, 0x3F804000, 0x40403F81;", 0x40404001),
        ("cvt.rmi.ftz.f32.f32 %r10, 0f80000001;", words(-0.0).item()),
        ("ex2.approx.f32 %r10, 0f43480000;", words(float("inf")).item()),
        ("mul.hi.u32 %r10, %r9, %r9;", 0x12345678**2 >> 32),
        ("cvt.rn.f32.s32 %r10, -3;", words(-3.0).item()),
        ("cvt.rzi.s32.f32 %r10, 0fC0700000;", -3),
        ("cvt.rmi.f32.f32 %r10, 0fC0700000;", words(-4.0).item()),
        ("ex2.approx.ftz.f32 %r10, 0f40A00000;", words(32.0).item()),
        ("min.relu.s32 %r10, -5, 3;", 0),
        ("{ .reg .b32 x; mov.b32 x, 5; { .reg .b32 x; mov.b32 x, 6; } mov.b32 %r10, x; }", 5),
        ("cvt.rn.bf16x2.f32 %r10, 0f3F800000, 0f40490FDB;", 0x3F804049),
        ("setp.lt.s32 %p1, %r1, 99; selp.b32 %r10, 1, 2, %p1;", 1),
        ("setp.ne.f32 %p1, 0f7FC00000, 0f7FC00000; selp.b32 %r10, 1, 2, %p1;", 2),
        ("max.f32 %r10, 0f7FC00000, 0f3F800000;", words(1.0).item()),
    ],
)
def test_an_instruction_gives_what_the_manual_says(body: str, wanted: int) -> None:
    mask = (1 << 32) - 1
    assert {int(x) & mask for x in stored(body, 0x12345678)} == {wanted & mask}


def test_a_product_and_a_sum_are_rounded_once() -> None:
    one = 1 + 2**-12
    body = "fma.rn.f32 %r10, %r9, %r9, 0fBF800000;"
    assert stored(body, words(one).item()).view(np.float32)[0] == np.float32(one * one - 1)


@pytest.mark.parametrize(
    "body",
    [
        "atom.global.add.u32 %r10, [%rd1], 1;",
        "add.rz.f32 %r10, %r9, %r9;",
        "max.bf16 %rs1, %rs2, %rs3;",
        "cvt.sat.f32.f32 %r10, %r9;",
        "shfl.sync.down.b32 %r10, %r9, 1, 31, -1;",
        "cp.async.cg.shared.global.L2::cache_hint [0], [%rd1], 16, %rd5;",
    ],
)
def test_an_instruction_that_is_not_known_is_an_error(body: str) -> None:
    with pytest.raises(UnknownError, match=body.split(" ")[0]):
        stored(body)


@pytest.mark.parametrize(
    "body",
    [
        "shfl.sync.idx.b32 %r10, %r1, 3, 31, 0xff;",
        "redux.sync.add.s32 %r10, %r1, 0xff;",
        "bar.warp.sync 0x1;",
    ],
)
def test_an_instruction_for_a_part_of_a_warp_is_refused(body: str) -> None:
    with pytest.raises(GpuError, match="for a part of a warp"):
        stored(body)
