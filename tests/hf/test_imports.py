"""Positions of other models as methods, against the modules of transformers they come from."""

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    CodeGenConfig,
    Gemma3TextConfig,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MPNetConfig,
    MPNetModel,
    RoFormerConfig,
    T5Config,
    T5Model,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from whence import build
from whence.hf import rope_from, t5_from, tisa_from_released


def dense(method, n_q: int, n_k: int) -> torch.Tensor:
    q, place = torch.zeros(1, method.n_heads, n_q, 1), torch.arange(n_k)
    return method.score_term(q, place[n_k - n_q :], place).to_dense(place[n_k - n_q :], place)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_t5s_table_gives_t5s_bias(stack):
    config = T5Config(
        d_model=16,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_heads=4,
        vocab_size=10,
        relative_attention_num_buckets=20,
        relative_attention_max_distance=50,
    )
    model = T5Model(config)
    attention = getattr(model, stack).block[0].layer[0].SelfAttention
    want = attention.compute_bias(150, 150)
    assert_close(dense(t5_from(model, stack=stack), 150, 150), want, rtol=0, atol=0)


def test_umt5s_and_mpnets_tables_give_their_bias():
    small = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    umt5 = UMT5EncoderModel(UMT5Config(**small, vocab_size=10))
    want = umt5.encoder.block[0].layer[0].SelfAttention.compute_bias(90, 90)
    assert_close(dense(t5_from(umt5), 90, 90), want, rtol=0, atol=0)
    mpnet = MPNetModel(
        MPNetConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=4, vocab_size=10)
    )
    want = mpnet.encoder.compute_position_bias(torch.zeros(1, 200, 16))
    assert_close(dense(t5_from(mpnet), 200, 200), want, rtol=0, atol=0)


def test_a_model_without_a_relative_table_says_so():
    mpnet = MPNetModel(
        MPNetConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=4, vocab_size=10)
    )
    with pytest.raises(ValueError, match="no relative_attention_bias in its decoder"):
        t5_from(mpnet, stack="decoder")


def released(state: dict[str, torch.Tensor], n: int) -> torch.Tensor:
    """The authors' way: Gaussians of query - key - 1."""
    a, b, c = (state[f"kernel_{name}"] for name in ("amplitudes", "sharpness", "offsets"))
    place = torch.arange(n, dtype=torch.float64)
    at = place[:, None] - place[None, :] - 1
    gaussians = torch.exp(-b.abs()[..., None, None] * (c[..., None, None] - at) ** 2)
    return (a[..., None, None] * gaussians).sum(0)


def test_released_tisa_weights_give_the_released_bias():
    torch.manual_seed(1)
    names = ("kernel_amplitudes", "kernel_sharpness", "kernel_offsets")
    state = {name: torch.randn(5, 3, dtype=torch.float64) for name in names}
    method = tisa_from_released(state)
    assert (method.n_heads, method.kernels) == (3, 5)
    assert_close(dense(method, 9, 9)[0].double(), released(state, 9), rtol=1e-4, atol=1e-5)
    layer = {f"layers.3.tisa.{key}": value for key, value in state.items()}
    again = tisa_from_released(layer | {"x.kernel_offsets": state[names[2]]}, prefix="layers.3.")
    assert_close(again.offset, method.offset, rtol=0, atol=0)
    turned = tisa_from_released({k: v.T for k, v in state.items()}, heads_first=True)
    assert_close(turned.amplitude, method.amplitude, rtol=0, atol=0)
    with pytest.raises(ValueError, match="one tensor with 'offset' in its name"):
        tisa_from_released({key: state[key] for key in names[:2]})


D = 16
LLAMA = {"hidden_size": 4 * D, "num_attention_heads": 4, "max_position_embeddings": 64}
SETTINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "dynamic with a length that nobody reads": {
        "factor": 2.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with all": {
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
    "yarn of DeepSeek": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.707,
        "mscale_all_dim": 0.5,
    },
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("n", [40, 100])
def test_rope_settings_of_a_config_give_its_rotation(kind, n):
    settings = {"rope_type": kind.split()[0], "rope_theta": 5000.0, **SETTINGS[kind]}
    config = LlamaConfig(**LLAMA, rope_parameters=settings)
    method = build(rope_from(config), n_heads=4, d_head=D)
    x, pos = torch.randn(1, 4, n, D), torch.arange(n)
    cos, sin = LlamaRotaryEmbedding(config)(x, pos[None])
    turned = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], dim=-1)
    assert_close(method.query_heads(x, pos), x * cos + turned * sin, rtol=1e-4, atol=1e-5)


def test_partial_rotation_and_layouts_and_layer_types_are_read():
    neox = GPTNeoXConfig(
        **LLAMA,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25},
    )
    method = build(rope_from(neox), n_heads=4, d_head=D)
    x, pos = torch.randn(1, 4, 9, D), torch.arange(9)
    cos, sin = GPTNeoXRotaryEmbedding(neox)(x, pos[None])
    part = x[..., :4]
    turned = torch.cat([-part[..., 2:], part[..., :2]], dim=-1)
    want = torch.cat([part * cos + turned * sin, x[..., 4:]], dim=-1)
    assert_close(method.query_heads(x, pos), want, rtol=1e-5, atol=1e-6)
    gptj = GPTJConfig(n_embd=64, n_head=4, rotary_dim=8)
    assert rope_from(gptj) == "rope:base=10000.0,fraction=0.5,layout=interleaved"
    assert rope_from(CodeGenConfig(n_embd=64, n_head=4, rotary_dim=16)).endswith("interleaved")
    assert rope_from(RoFormerConfig()) == "rope:base=10000.0,layout=interleaved"
    gemma = Gemma3TextConfig()
    assert rope_from(gemma, layer_type="full_attention") == "rope:base=1000000.0"
    with pytest.raises(ValueError, match=r"Unknown layer_type 'None'.*sliding_attention"):
        rope_from(gemma)
    with pytest.raises(ValueError, match="LlamaConfig has one setting for all layers"):
        rope_from(LlamaConfig(**LLAMA), layer_type="full_attention")


def test_rope_settings_that_the_method_does_not_have_are_refused():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        **factors,
    }
    with pytest.raises(ValueError, match=r"Unknown rope_type 'longrope'.*default, dynamic, linear"):
        rope_from(LlamaConfig(**LLAMA, rope_parameters=longrope))
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    }
    with pytest.raises(ValueError, match="truncate=False"):
        rope_from(LlamaConfig(**LLAMA, rope_parameters=yarn))
    with pytest.raises(ValueError, match="MPNetConfig has no rope_parameters"):
        rope_from(MPNetConfig())
