"""Rotary embeddings, their scalings, and xPos."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.roformer import modeling_roformer as roformer

from whence import Sum, build
from whence.methods.alibi import Alibi
from whence.methods.rope import Rope
from whence.methods.xpos import Xpos
from whence.nn import positioned_attention
from whence.rotation import Rotation

B, H, N, D = 2, 3, 50, 16
EXACT = {"atol": 1e-6, "rtol": 1e-6}
CLOSE = {"atol": 2e-5, "rtol": 1e-5}  # transformers has its frequencies in float32


def heads(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def llama_config(**rope):
    return LlamaConfig(
        hidden_size=D * H,
        num_attention_heads=H,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **rope},
    )


def assert_equals_llama(method, config, pos):
    q, k = heads(B, H, pos.shape[-1], D), heads(B, 1, pos.shape[-1], D)
    ids = pos if pos.ndim == 2 else pos[None]
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, ids)
    theirs_q, theirs_k = llama.apply_rotary_pos_emb(q, k, cos, sin)
    assert_close(method.query_heads(q, pos), theirs_q, **CLOSE)
    assert_close(method.key_heads(k, pos), theirs_k, **CLOSE)


@pytest.mark.parametrize("start", [0, 17])
def test_half_layout_equals_llama(start):
    assert_equals_llama(Rope(D), llama_config(), torch.arange(start, start + N))


def test_half_layout_equals_llama_with_positions_for_each_sequence_and_another_base():
    pos = torch.stack([torch.arange(9), torch.arange(20, 29)])
    assert_equals_llama(Rope(D, base=500.0), llama_config(rope_theta=500.0), pos)


def test_interleaved_layout_equals_roformer():
    q, k = heads(B, H, N, D), heads(B, H, N, D)
    table = roformer.RoFormerSinusoidalPositionalEmbedding(N, D).create_weight()
    rotate = roformer.RoFormerSelfAttention.apply_rotary_position_embeddings
    theirs_q, theirs_k = rotate(table[None, None], q, k)
    method, pos = Rope(D, layout="interleaved"), torch.arange(N)
    assert_close(method.query_heads(q, pos), theirs_q, **CLOSE)
    assert_close(method.key_heads(k, pos), theirs_k, **CLOSE)


def test_interleaved_partial_layout_equals_gptj():
    q, part = heads(B, H, N, D), 6
    sin, cos = gptj.create_sinusoidal_positions(N, part)[None].chunk(2, dim=-1)
    turned = gptj.apply_rotary_pos_emb(q.transpose(1, 2)[..., :part], sin, cos).transpose(1, 2)
    method = Rope(D, layout="interleaved", fraction=part / D)
    assert_close(
        method.query_heads(q, torch.arange(N)), torch.cat([turned, q[..., part:]], -1), **CLOSE
    )


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_partial_half_layout_equals_gpt_neox(fraction):
    config = GPTNeoXConfig(
        hidden_size=D * H,
        num_attention_heads=H,
        rope_parameters={
            "rope_theta": 10000.0,
            "rope_type": "default",
            "partial_rotary_factor": fraction,
        },
    )
    q, k, pos = heads(B, H, N, D), heads(B, H, N, D), torch.arange(N)
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(q, pos[None])
    theirs_q, theirs_k = neox.apply_rotary_pos_emb(q, k, cos, sin)
    method = Rope(D, fraction=fraction)
    assert_close(method.query_heads(q, pos), theirs_q, **CLOSE)
    assert_close(method.key_heads(k, pos), theirs_k, **CLOSE)


def test_linear_scaling_is_position_interpolation():
    method = Rope(D, scaling="linear", factor=4.0)
    assert_equals_llama(method, llama_config(rope_type="linear", factor=4.0), torch.arange(N))
    q, pos = heads(B, H, N, D), torch.arange(N)
    assert_close(method.query_heads(q, 4 * pos), Rope(D).query_heads(q, pos), **CLOSE)


@pytest.mark.parametrize("n", [30, 64, 65, 150])
def test_dynamic_scaling_equals_llamas_below_and_beyond_the_trained_length(n):
    config = llama_config(rope_type="dynamic", factor=2.0)
    method = Rope(D, scaling="dynamic", factor=2.0, original_length=64)
    assert_equals_llama(method, config, torch.arange(n))


def test_dynamic_scaling_of_a_cached_query_agrees_with_its_keys():
    method = Rope(D, scaling="dynamic", factor=2.0, original_length=8)
    q, pos = heads(B, H, 30, D), torch.arange(30)
    assert_close(method.query_heads(q[:, :, -3:], pos[-3:]), method.query_heads(q, pos)[:, :, -3:])


def test_dynamic_scaling_of_a_sequence_does_not_depend_on_its_neighbours():
    method = Rope(D, scaling="dynamic", factor=2.0, original_length=8)
    pos, q = torch.stack([torch.arange(12), torch.arange(40, 52)]), heads(B, H, 12, D)
    apart = [method.query_heads(q[i : i + 1], pos[i]) for i in range(B)]
    assert_close(method.query_heads(q, pos), torch.cat(apart))


def test_static_ntk_changes_the_base_and_divides_only_the_slowest_frequency():
    method = Rope(D, scaling="ntk", factor=4.0)
    config = llama_config(rope_theta=10000.0 * 4.0 ** (D / (D - 2)))
    assert_equals_llama(method, config, torch.arange(N))
    ratio = Rope(D).frequency / method.frequency
    assert_close(ratio[[0, -1]], torch.tensor([1.0, 4.0]))


YARN = [
    {"factor": 4.0},
    {"factor": 8.0, "beta_fast": 6.0, "beta_slow": 2.0},
    {"factor": 4.0, "attention_factor": 0.7},
    {"factor": 1.0},
]


@pytest.mark.parametrize("options", YARN)
@pytest.mark.parametrize("original", [16, 64, 4096])
def test_yarn_equals_transformers_with_its_attention_factor_on_q_and_on_k(options, original):
    config = llama_config(rope_type="yarn", original_max_position_embeddings=original, **options)
    method = Rope(D, scaling="yarn", original_length=original, **options)
    inverse, attention = ROPE_INIT_FUNCTIONS["yarn"](config)
    assert_close(method.frequency, inverse, rtol=1e-5, atol=0)
    assert_close(method.attention_factor, float(attention))
    assert_equals_llama(method, config, torch.arange(N))


@pytest.mark.parametrize("ends", [{}, {"beta_slow": 2.0, "beta_fast": 9.0}])
def test_llama3_scaling_equals_transformers(ends):
    config = llama_config(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=ends.get("beta_slow", 1.0),
        high_freq_factor=ends.get("beta_fast", 4.0),
        original_max_position_embeddings=512,
    )
    method = Rope(D, scaling="llama3", factor=8.0, original_length=512, **ends)
    assert_close(method.frequency, ROPE_INIT_FUNCTIONS["llama3"](config)[0], rtol=1e-5, atol=0)
    assert_equals_llama(method, config, torch.arange(N))


@given(
    q_at=st.integers(0, 300),
    k_at=st.integers(0, 300),
    shift=st.integers(0, 500),
    name=st.sampled_from(
        [
            "rope",
            "rope:layout=interleaved,fraction=0.5",
            "rope:scaling=yarn,factor=4,original_length=64",
            "rope:scaling=ntk,factor=2",
            "xpos",
            "xpos:layout=half,scale_base=200,centre=9",
        ]
    ),
)
def test_the_product_depends_on_the_lag_alone(q_at, k_at, shift, name):
    method = build(name, n_heads=1, d_head=8).double()
    q, k = heads(1, 1, 1, 8, dtype=torch.float64), heads(1, 1, 1, 8, dtype=torch.float64)

    def product(by):
        turned_q = method.query_heads(q, torch.tensor([q_at + by]))
        return (turned_q * method.key_heads(k, torch.tensor([k_at + by]))).sum()

    assert_close(product(shift), product(0), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", [Rope, Xpos])
def test_the_two_layouts_are_one_up_to_a_permutation_of_the_columns(kind):
    pairs = torch.arange(D).view(2, D // 2).T.flatten()  # interleaved column -> half's column
    q, pos = heads(B, H, N, D), torch.arange(N)
    half = kind(D, layout="half").query_heads(q, pos)
    interleaved = kind(D, layout="interleaved").query_heads(q[..., pairs], pos)
    assert_close(half[..., pairs], interleaved)


def test_two_bases_do_not_share_anything():
    q, pos = heads(B, H, N, D), torch.arange(N)
    first = Rope(D).query_heads(q, pos)
    Rope(D, base=100.0).query_heads(q, pos)
    assert_close(Rope(D).query_heads(q, pos), first, rtol=0, atol=0)
    assert not torch.allclose(Rope(D, base=100.0).query_heads(q, pos), first)


def test_rope_in_float64_follows_the_formula_at_far_positions():
    method, q = Rope(4).double(), heads(1, 1, 1, 4, dtype=torch.float64)
    out = method.query_heads(q, torch.tensor([98765]))[0, 0, 0]
    for i in range(2):
        turn = complex(math.cos(a := 98765 * 10000 ** (-2 * i / 4)), math.sin(a))
        expected = complex(q[..., i], q[..., i + 2]) * turn
        assert_close(out[[i, i + 2]].tolist(), [expected.real, expected.imag])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_heads_are_turned_by_exact_angles(dtype):
    q, pos = heads(B, H, 4, D).to(dtype), torch.arange(4000, 4004)
    method = Rope(D).to(dtype)
    out = method.query_heads(q, pos)
    assert out.dtype == dtype
    exact = Rope(D).double().query_heads(q.double(), pos)
    assert_close(out.double(), exact, atol=8 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("at", [10_000, 1_000_000, 100_000_000])
@pytest.mark.parametrize("scaling", ["none", "dynamic"])
def test_float32_heads_are_turned_exactly_at_far_positions(at, scaling):
    options = {"original_length": 64, "factor": 2.0} if scaling == "dynamic" else {}
    method = Rope(D, scaling=scaling, **options)
    q, pos = heads(B, H, 9, D), torch.arange(at, at + 9)
    exact = method._rotation()._replace(frequency=method.frequency.double())
    assert_close(method.query_heads(q, pos).double(), exact.turned(q.double(), pos), **EXACT)


def test_float32_products_at_position_a_million_are_those_of_the_same_lags_at_0():
    method, pos = Rope(D), torch.arange(9)
    q, k = heads(B, H, 9, D), heads(B, H, 9, D)
    near, far = (
        method.query_heads(q, pos + at) @ method.key_heads(k, pos + at).mT for at in (0, 1_000_000)
    )
    assert_close(far, near, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["rope", "xpos", "rope:scaling=dynamic,factor=2,original_length=4"]
)
def test_every_query_of_a_cache_and_length_one_and_none(name):
    method = build(name, n_heads=H, d_head=D)
    q, pos = heads(B, H, 9, D), torch.arange(9)
    whole = method.query_heads(q, pos)
    assert_close(method.query_heads(q[:, :, -1:], pos[-1:]), whole[:, :, -1:])
    assert method.query_heads(q[:, :, :0], pos[:0]).shape == (B, H, 0, D)
    assert not method.state_dict()


@pytest.mark.parametrize(
    "name", ["rope:fraction=0.5", "xpos", "rope:scaling=dynamic,original_length=2"]
)
def test_the_turn_is_differentiable(name):
    method = build(name, n_heads=1, d_head=8).double()
    q = heads(1, 2, 3, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: method.key_heads(x, torch.arange(3)), (q,))


def test_rope_in_attention_with_a_cache_and_grouped_heads_equals_the_whole():
    method = Rope(D)
    q, k, v = heads(B, 4, 12, D), heads(B, 2, 12, D), heads(B, 2, 12, D)
    whole = positioned_attention(method, q, k, v, causal=True)
    last = positioned_attention(method, q[:, :, -5:], k, v, causal=True)
    shifted = positioned_attention(method, q, k, v, causal=True, k_start=33)
    assert_close(last, whole[:, :, -5:])
    assert_close(shifted, whole, atol=1e-4, rtol=1e-4)


def test_rope_in_a_sum_keeps_its_hooks():
    q, pos = heads(B, H, 5, D), torch.arange(5)
    both = Sum(Rope(D), Alibi(H))
    assert both.sites() == ("heads", "score")
    assert_close(both.query_heads(q, pos), Rope(D).query_heads(q, pos))


def test_a_sum_has_the_rotation_of_the_one_part_that_changes_heads():
    rope = Rope(D)
    both = Sum(Alibi(H), Sum(rope, Alibi(H))).rotation()
    assert both is not None
    assert both.frequency is rope.frequency
    assert Sum(rope, Rope(D)).rotation() is None
    assert Sum(Alibi(H)).rotation() is None


def test_a_subclass_with_hooks_of_its_own_has_no_rotation():
    class Turned(Rope):
        def key_heads(self, k, k_pos):
            return -super().key_heads(k, k_pos)

    assert Turned(D).rotation() is None
    assert not Turned.lengths_only
    assert Xpos(D).rotation() is None
    q, k, v = heads(B, H, 5, D), heads(B, H, 5, D), heads(B, H, 5, D)
    out = positioned_attention(Turned(D), q, k, v)
    assert_close(out, positioned_attention(Rope(D), q, -k, v))


def test_attention_shares_one_table_of_sines_between_queries_and_keys_at_the_same_positions(
    monkeypatch,
):
    tables = []
    waves = Rotation.waves
    monkeypatch.setattr(Rotation, "waves", lambda *a: tables.append(a[1]) or waves(*a))
    q, k = heads(B, H, 5, D), heads(B, H, 9, D)
    positioned_attention(Rope(D), q, k[:, :, :5], k[:, :, :5], backend="reference")
    assert len(tables) == 1
    positioned_attention(Rope(D), q, k, k, backend="reference")
    assert [len(pos) for pos in tables[1:]] == [5, 9]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_head": 5}, r"even number from 2 to d_head.*got 1.0 \* 5 = 5"),
        ({"fraction": 0.2}, r"got 0.2 \* 16 = 3.2"),
        ({"fraction": 1.5}, "even number from 2 to d_head"),
        ({"factor": 2.0}, "factor=2.0 does nothing with scaling='none'.*linear, ntk"),
        ({"scaling": "linear", "factor": 0.5}, "factor must be at least 1"),
        ({"scaling": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast=3.0 does nothing"),
        ({"scaling": "yarn", "factor": 2.0}, "scaling='yarn' needs original_length"),
        ({"scaling": "llama3", "original_length": 0}, "original_length must be at least 1"),
        (
            {"scaling": "yarn", "original_length": 9, "beta_slow": 40.0},
            r"in \(0, beta_fast\), got 40",
        ),
        ({"d_head": 2, "scaling": "ntk"}, "got 2 turning columns"),
        ({"base": 0.5}, "base must be above 1"),
    ],
)
def test_rope_says_what_is_wrong_with_its_options(options, message):
    with pytest.raises(ValueError, match=message):
        Rope(**{"d_head": 16, **options})


@pytest.mark.parametrize(
    ("option", "meant"), [("scaling=yearn", "yarn"), ("layout=halves", "half")]
)
def test_a_misspelt_choice_is_met_with_the_nearest(option, meant):
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        build(f"rope:{option}", n_heads=1, d_head=8)


def test_rope_refuses_heads_of_another_size():
    with pytest.raises(ValueError, match="built for heads of 16, got 8"):
        Rope(16).query_heads(heads(1, 1, 2, 8), torch.arange(2))


def test_xpos_equals_a_loop_over_the_formula():
    n, d, gamma, scale_base = 7, 6, 0.4, 512
    q, k = heads(1, 1, n, d, dtype=torch.float64), heads(1, 1, n, d, dtype=torch.float64)
    method, pos = Xpos(d).double(), torch.arange(3, 3 + n)
    ours = method.query_heads(q, pos)[0, 0] @ method.key_heads(k, pos)[0, 0].T
    for i in range(n):
        for j in range(n):
            logit = 0.0
            for m in range(d // 2):
                zeta = (m / (d / 2) + gamma) / (1 + gamma)
                a = complex(q[0, 0, i, 2 * m], q[0, 0, i, 2 * m + 1])
                b = complex(k[0, 0, j, 2 * m], k[0, 0, j, 2 * m + 1])
                angle = (i - j) * 10000 ** (-2 * m / d)
                turned = a * complex(math.cos(angle), math.sin(angle))
                logit += (turned * b.conjugate()).real * zeta ** ((i - j) / scale_base)
            assert_close(ours[i, j].item(), logit, rtol=1e-9, atol=1e-12)


def test_xpos_fades_with_the_distance_of_a_key_behind():
    method, ones = Xpos(D).double(), torch.ones(1, 1, 1, D, dtype=torch.float64)
    one = torch.tensor([4000])
    size = [
        (method.query_heads(ones, one).norm() * method.key_heads(ones, one - back).norm()).item()
        for back in (0, 500, 2000)
    ]
    assert size[0] > size[1] > size[2]


def test_xpos_stays_finite_and_right_at_eight_times_the_usual_length():
    n = 8 * 512
    q, k, pos = heads(1, 1, n, D), heads(1, 1, n, D), torch.arange(n)
    method, exact = Xpos(D), Xpos(D).double()
    turned_q, turned_k = method.query_heads(q, pos), method.key_heads(k, pos)
    assert bool(torch.isfinite(turned_q).all())
    assert bool(torch.isfinite(turned_k).all())
    rows = slice(n - 4, n)  # their factors are the most extreme
    ours = turned_q[:, :, rows] @ turned_k.transpose(-1, -2)
    reference_q = exact.query_heads(q[:, :, rows].double(), pos[rows])
    reference = reference_q @ exact.key_heads(k.double(), pos).transpose(-1, -2)
    assert_close(ours.double(), reference, atol=5e-3, rtol=1e-3)


def test_xpos_centre_changes_no_logit():
    q, pos = heads(1, 1, 40, D, dtype=torch.float64), torch.arange(40)

    def logits(method):
        return method.query_heads(q, pos) @ method.key_heads(q, pos).transpose(-1, -2)

    assert_close(logits(Xpos(D).double()), logits(Xpos(D, centre=20).double()))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 33427), (torch.float16, 1699)])
def test_xpos_refuses_positions_whose_factors_would_overflow(dtype, limit):
    method, one = Xpos(D), heads(1, 1, 1, D).to(dtype)
    for turn in (method.query_heads, method.key_heads):
        assert bool(torch.isfinite(turn(one, torch.tensor([limit]))).all())
        with pytest.raises(
            ValueError, match=f"reaches {limit} positions.*got {limit + 1}.*scale_base"
        ):
            turn(one, torch.tensor([limit + 1]))
    moved = Xpos(D, centre=limit)
    assert bool(torch.isfinite(moved.key_heads(one, torch.tensor([limit + 1]))).all())


def test_xpos_is_for_causal_use_and_checks_its_options():
    assert Xpos.causal_only
    with pytest.raises(ValueError, match="gamma must be above 0"):
        Xpos(D, gamma=0.0)
    with pytest.raises(ValueError, match="scale_base must be above 0"):
        Xpos(D, scale_base=0.0)
