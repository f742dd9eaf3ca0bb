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
.reqntid 64
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


def run(body: str, x: Tensor, number: Any = 0, grid: int = 1, shared: int = 256) -> Tensor:
    """Run 64 threads on a tensor; their word is at [%rd3]."""
    memory = GlobalMemory([x])
    kernel = Kernel(HEAD + body + "\nret;\n}")
    params = [memory.address(x), number]
    Machine(kernel, memory, shared=shared, threads=64, grid=(grid, 1, 1), params=params).run()
    memory.give_back()
    return x


def stored(body: str, number: Any = 0) -> np.ndarray[Any, Any]:
    """What the threads have in %r10."""
    body += "\nst.global.b32 [%rd3], %r10;"
    return run(body, torch.zeros(64, dtype=torch.int32), number).numpy()


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


def test_masked_threads_touch_nothing() -> None:
    body = "setp.lt.u32 %p1, %r1, 60; @%p1 st.global.b32 [%rd3+16], %r1;"
    assert run(body, torch.zeros(64, dtype=torch.int32))[4:].tolist() == list(range(60))


def test_shared_memory_that_nobody_wrote_is_no_number() -> None:
    assert np.isnan(stored("ld.shared.b32 %r10, [%r2];").view(np.float32)).all()


def test_a_copy_is_there_once_it_was_waited_for() -> None:
    x = torch.arange(256, dtype=torch.int32)
    start = "shl.b32 %r2, %r1, 4; mul.wide.u32 %rd4, %r1, 16; add.s64 %rd4, %rd1, %rd4;"
    start += "cp.async.cg.shared.global [%r2], [%rd4], 0x10; cp.async.commit_group;"
    load = "bar.sync 0; ld.shared.b32 %r10, [%r2+4]; st.global.b32 [%rd3], %r10;"
    late = run(f"{start} cp.async.wait_group 0; {load}", x.clone(), shared=1024)
    assert late[:64].tolist() == x[1::4].tolist()
    early = run(f"{start} cp.async.wait_group 1; {load}", x.clone(), shared=1024)
    assert early[:64].view(torch.float32).isnan().all()


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


def test_an_instruction_that_is_not_known_is_an_error() -> None:
    with pytest.raises(UnknownError, match="atom"):
        stored("atom.global.add.u32 %r10, [%rd1], 1;")
