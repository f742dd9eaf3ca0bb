"""Lags in two dimensions: Swin's and BEiT's tables, and TISA on a grid of patches."""

import math

import pytest
import torch
from torch.testing import assert_close
from transformers import BeitConfig
from transformers.models.beit.modeling_beit import BeitRelativePositionBias
from transformers.models.swin.modeling_swin import SwinRelativePositionBias

from shaking import shake
from whence.lag import DenseBias
from whence.methods import build
from whence.methods.table2d import Table2d
from whence.methods.tisa import Tisa
from whence.methods.tisa2d import Tisa2d
from whence.nn.positioned import positioned_attention

SPECS = ["tisa2d:width=3", "tisa2d:width=3,prefix=2", "table2d", "table2d:prefix=1"]


def dense(method, q_pos, k_pos):
    q = torch.zeros(1, method.n_heads, len(q_pos), 4)
    bias = method.score_term(q, q_pos, k_pos)
    assert isinstance(bias, DenseBias)
    return bias.to_dense(q_pos, k_pos)


def randomised(method):
    shake(method, 1.0)
    return method


@pytest.mark.parametrize("size", [(7, 7), (2, 5), (4, 1), (1, 6), (1, 1)])
def test_table2d_equals_swins_relative_position_bias(size):
    swin, pos = SwinRelativePositionBias(3, size), torch.arange(size[0] * size[1])
    torch.nn.init.normal_(swin.relative_position_bias_table)
    table = swin.relative_position_bias_table.detach()
    method = Table2d.from_swin(table, height=size[0], width=size[1])
    assert_close(dense(method, pos, pos), swin())
    assert_close(dense(method, pos[-1:], pos), swin()[:, :, -1:])


@pytest.mark.parametrize("image", [(8, 8), (6, 6)])
def test_table2d_with_a_class_token_equals_beits_relative_position_bias(image):
    config = BeitConfig(
        image_size=image, patch_size=2, num_attention_heads=4, use_relative_position_bias=True
    )
    beit, size = BeitRelativePositionBias(config), (image[0] // 2, image[1] // 2)
    torch.nn.init.normal_(beit.relative_position_bias_table)
    table = beit.relative_position_bias_table.detach()
    method = Table2d.from_swin(table, height=size[0], width=size[1], prefix=1)
    pos = torch.arange(1 + size[0] * size[1])
    assert_close(dense(method, pos, pos), beit(size))


def test_table2d_looks_up_the_lag_from_query_to_key():
    method, pos = Table2d(2, 6, height=2, width=3), torch.arange(6)
    found = dense(method, pos, pos)
    table = method.table.view(3, 5, 2)
    assert_close(found[0, :, 0, 5], table[1 + 1, 2 + 2])  # one row down, two columns right
    assert_close(found[0, :, 2, 3], table[1 + 1, 2 - 2])  # one row down, two columns left


def test_the_grid_is_the_square_of_max_length_or_the_least_that_holds_it():
    for length, prefix, size in [(196, 0, (14, 14)), (197, 1, (14, 14)), (23, 0, (6, 4))]:
        method = Table2d(2, length, prefix=prefix)
        assert (method.height, method.width) == size
        assert method.max_length == prefix + size[0] * size[1] >= length
        assert Tisa2d(2, length, prefix=prefix).width == size[1]
    assert Table2d(2, 24, width=8).height == 3
    assert Table2d(2, 24, height=2).width == 12
    assert Table2d(2, 1, height=2, width=3).max_length == 6


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize(
    "rows", [(0, 0, 14, 14), (0, 9, 14, 5), (4, 20, 17, 1), (3, 3, 3, 3), (0, 0, 1, 1)]
)
def test_tisa2d_is_a_sum_of_gaussians_of_both_lags(rows, prefix):
    k_start, q_start, n_k, n_q = rows
    width, method = 4, randomised(Tisa2d(3, 16, kernels=2, width=4, prefix=prefix).double())
    k_pos = torch.arange(k_start, k_start + n_k)
    q_pos = torch.arange(q_start, q_start + n_q)
    expected = torch.zeros(1, 3, n_q, n_k, dtype=torch.float64)
    for row, i in enumerate((q_pos - prefix).tolist()):
        for column, j in enumerate((k_pos - prefix).tolist()):
            if i < 0 or j < 0:
                continue
            dy, dx = j // width - i // width, j % width - i % width
            for h in range(3):
                for s in range(2):
                    a, b = method.amplitude[h, s].item(), method.sharpness[h, s].item()
                    y, x = dy - method.offset_y[h, s].item(), dx - method.offset_x[h, s].item()
                    expected[0, h, row, column] += a * math.exp(-abs(b) * (y * y + x * x))
    assert_close(dense(method, q_pos, k_pos), expected)


def test_tisa2d_on_a_single_row_of_patches_is_tisa():
    flat, line, pos = Tisa2d(3, 9, width=9, start="released"), Tisa(3), torch.arange(9)
    flat.offset_y = 0.0
    for theirs, ours in (("amplitude",) * 2, ("sharpness",) * 2, ("offset_x", "offset")):
        setattr(line, ours, getattr(flat, theirs).detach())
    q = torch.zeros(1, 3, 9, 4)
    assert_close(dense(flat, pos, pos), line.score_term(q, pos, pos).to_dense(pos, pos))


def test_tisa2d_goes_on_for_any_number_of_rows():
    method = Tisa2d(2, 16)
    short, long = torch.arange(16), torch.arange(103)
    assert_close(dense(method, long, long)[..., :16, :16], dense(method, short, short))


@pytest.mark.parametrize("spec", SPECS)
def test_image_methods_do_not_change_when_the_image_is_moved_by_rows(spec):
    method = randomised(build(spec, n_heads=2, d_head=4, max_length=26))
    start, width = method.prefix, method.width
    upper = torch.arange(start, start + 2 * width)
    lower = upper + 2 * width
    assert_close(dense(method, lower, lower), dense(method, upper, upper))


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_of_image_methods_are_right(spec):
    method = randomised(build(spec, n_heads=2, d_head=4, max_length=9).double())
    q_pos, k_pos = torch.arange(1, 6), torch.arange(7)
    assert torch.autograd.gradcheck(
        lambda *_: dense(method, q_pos, k_pos), tuple(method.parameters())
    )


@pytest.mark.parametrize("spec", SPECS)
def test_a_cached_step_and_a_block_of_rows_equal_the_full_pass_of_image_methods(spec):
    method = randomised(build(spec, n_heads=3, d_head=4, max_length=16).double())
    q, k, v = torch.randn(3, 2, 3, 13, 4, dtype=torch.float64).unbind()
    whole = positioned_attention(method, q, k, v, causal=True, backend="reference")
    for n in (1, 6, 13):
        step = positioned_attention(
            method, q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], causal=True, backend="reference"
        )
        assert_close(step, whole[:, :, n - 1 : n])
    pos = torch.arange(13)
    bias = method.score_term(q, pos, pos)
    assert_close(bias.rows(2, 5).to_dense(pos[2:5], pos), bias.to_dense(pos, pos)[:, :, 2:5])


@pytest.mark.parametrize("spec", [*SPECS, "table2d:height=2,width=5"])
def test_image_methods_have_as_many_parameters_as_their_formula_says(spec):
    method = build(spec, n_heads=7, d_head=4, max_length=19)
    assert method.n_parameters() == method.n_parameters_by_formula()
    assert method.fixed_length == spec.startswith("table2d")


def test_table2d_refuses_positions_outside_its_grid():
    method = Table2d(2, 7, height=2, width=3, prefix=1)
    pos = torch.arange(8)
    assert dense(method, pos[:7], pos[:7]).shape == (1, 2, 7, 7)
    with pytest.raises(
        ValueError, match=r"table2d of 2 x 3 patches knows positions 0\.\.6.*got position 7"
    ):
        dense(method, pos, pos)
    with pytest.raises(ValueError, match="got position 7"):
        dense(method, pos[-1:], pos[:7])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tisa2d:width=0", "width must be at least 1, got 0"),
        ("tisa2d:prefix=-1", "prefix must be at least 0, got -1"),
        ("tisa2d:kernels=0", "kernels must be at least 1, got 0"),
        ("table2d:height=0", "height must be at least 1, got 0"),
        ("table2d:prefix=16", "max_length = 16 leaves no patch after prefix = 16 tokens"),
    ],
)
def test_bad_options_of_image_methods_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        build(spec, n_heads=2, d_head=4, max_length=16)


def test_a_swin_table_of_another_size_is_refused():
    with pytest.raises(ValueError, match="height 2, width 3 and prefix 0 has 15 rows, got 16"):
        Table2d.from_swin(torch.zeros(16, 2), height=2, width=3)
