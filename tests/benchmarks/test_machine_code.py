"""Two checkouts' launches are compared by their instructions, not by the lines that these came from."""

import pytest

pytest.importorskip("triton", reason="Triton is a Linux package")

from machine_code import code_of, differences

PTX = """
    .loc 1 20 5 // tile.py:20:5
$L__tmp4:
    mul.f32 %f1, %f2, %f3;
    .section .debug_abbrev
    .b8 1
"""


def test_a_comment_in_the_source_does_not_change_the_code() -> None:
    moved = PTX.replace("1 20 5", "1 21 5").replace("tmp4", "tmp7").replace(".b8 1", ".b8 2")
    assert code_of(moved) == code_of(PTX)
    assert code_of(PTX.replace("mul", "add")) != code_of(PTX)


def test_a_line_names_the_kernels_that_differ() -> None:
    before = {"a": [["key", "1", [2]], ["query", "2", [2]]], "b": [["key", "1", [2]]], "c": []}
    now = {"a": [["key", "1", [3]], ["query", "2", [2]]], "b": [], "c": [], "d": []}
    assert differences(before, before) == []
    wanted = ["a: key", "b: 1 launches before, 0 now", "d: only now"]
    assert differences(before, now) == wanted
