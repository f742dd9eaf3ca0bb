"""Tiny models of every family: what is read from their files is what their own modules compute."""

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from whence.analysis.checkpoint import open_checkpoint
from whence.analysis.heads import positional_attention
from whence.analysis.inspect import inspect
from whence.analysis.relative_curves import relative_reports
from whence.analysis.stack_reader import StackReader, read_stack
from whence.families import FAMILIES, INSPECTABLE

with warnings.catch_warnings():  # both files call torch.jit.script, which is deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformers import DebertaModel, DebertaV2Model

BERT = {
    "vocab_size": 30,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 8,
    "max_position_embeddings": 21,
}


@dataclass(frozen=True)
class Case:
    """A family's model with a table, and its positions, queries and keys by its own modules."""

    build: Callable[[], nn.Module]
    table: Callable[[nn.Module], Tensor]
    query_key: Callable[[nn.Module, int, Tensor], tuple[Tensor, Tensor]]
    n_heads: int = 3
    scale: float = 8**-0.5
    first_row: int = 0
    stack: str | None = None
    project: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: x
    causal: bool = False


def embedded(model: nn.Module) -> Tensor:
    return model.base_model.embeddings.position_embeddings.weight


def bert(model: nn.Module, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    part = model.base_model.encoder.layer[layer].attention.self
    return part.query(x), part.key(x)


def linear(part: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return part.q_proj(x), part.k_proj(x)


def albert(model: nn.Module, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    part = model.base_model.encoder.albert_layer_groups[0].albert_layers[0].attention
    return part.query(x), part.key(x)


def distilbert(model: nn.Module, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    part = model.transformer.layer[layer].attention
    return part.q_lin(x), part.k_lin(x)


def mpnet(model: nn.Module, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    part = model.encoder.layer[layer].attention.attn
    return part.q(x), part.k(x)


def deberta(model: nn.Module, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    part = model.encoder.layer[layer].attention.self
    split = part.transpose_for_scores(part.in_proj(x)[None])[0]  # [h, n, 3 d]
    query, key, _ = split.transpose(0, 1).chunk(3, dim=-1)
    return query.flatten(1) + part.q_bias, key.flatten(1)


def deberta_v2(model: nn.Module, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    part = model.encoder.layer[layer].attention.self
    return part.query_proj(x), part.key_proj(x)


def gpt2(model: nn.Module, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    query, key, _ = model.base_model.h[layer].attn.c_attn(x).split(24, dim=-1)
    return query, key


def whisper_config() -> hf.WhisperConfig:
    return hf.WhisperConfig(
        vocab_size=30,
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        num_mel_bins=4,
        max_source_positions=21,
        max_target_positions=13,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )


def roberta_like(model_class: type, config_class: type) -> Case:
    return Case(lambda: model_class(config_class(**BERT)), embedded, bert, first_row=2)


CASES: dict[str, Case] = {
    "bert": Case(lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)), embedded, bert),
    "bert alone": Case(lambda: hf.BertModel(hf.BertConfig(**BERT)), embedded, bert),
    "ernie": Case(lambda: hf.ErnieModel(hf.ErnieConfig(**BERT)), embedded, bert),
    "roberta": roberta_like(hf.RobertaForMaskedLM, hf.RobertaConfig),
    "xlm-roberta": roberta_like(hf.XLMRobertaModel, hf.XLMRobertaConfig),
    "xlm-roberta-xl": roberta_like(hf.XLMRobertaXLModel, hf.XLMRobertaXLConfig),
    "camembert": roberta_like(hf.CamembertForMaskedLM, hf.CamembertConfig),
    "data2vec-text": roberta_like(hf.Data2VecTextModel, hf.Data2VecTextConfig),
    "roberta, padding 0": Case(
        lambda: hf.RobertaModel(hf.RobertaConfig(**BERT, pad_token_id=0)),
        embedded,
        bert,
        first_row=1,
    ),
    "albert": Case(
        lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**BERT, embedding_size=10)),
        embedded,
        albert,
        project=lambda model, x: model.base_model.encoder.embedding_hidden_mapping_in(x),
    ),
    "electra": Case(
        lambda: hf.ElectraForPreTraining(hf.ElectraConfig(**BERT, embedding_size=10)),
        embedded,
        bert,
        project=lambda model, x: model.base_model.embeddings_project(x),
    ),
    "electra, as wide": Case(
        lambda: hf.ElectraModel(hf.ElectraConfig(**BERT, embedding_size=24)), embedded, bert
    ),
    "distilbert": Case(
        lambda: hf.DistilBertModel(
            hf.DistilBertConfig(
                vocab_size=30,
                dim=24,
                n_layers=2,
                n_heads=3,
                hidden_dim=8,
                max_position_embeddings=21,
            )
        ),
        embedded,
        distilbert,
    ),
    "mpnet": Case(lambda: hf.MPNetModel(hf.MPNetConfig(**BERT)), embedded, mpnet, first_row=2),
    "deberta": Case(
        lambda: DebertaModel(
            hf.DebertaConfig(**BERT, relative_attention=True, pos_att_type=["c2p", "p2c"])
        ),
        embedded,
        deberta,
        scale=24**-0.5,
    ),
    "deberta-v2": Case(
        lambda: DebertaV2Model(
            hf.DebertaV2Config(**BERT, relative_attention=True, pos_att_type="c2p")
        ),
        embedded,
        deberta_v2,
        scale=16**-0.5,
    ),
    "gpt2": Case(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=30,
                n_embd=24,
                n_layer=2,
                n_head=3,
                n_positions=21,
                bos_token_id=1,
                eos_token_id=2,
            )
        ),
        lambda model: model.base_model.wpe.weight,
        gpt2,
        causal=True,
    ),
    "opt": Case(
        lambda: hf.OPTForCausalLM(
            hf.OPTConfig(
                vocab_size=30,
                hidden_size=24,
                num_hidden_layers=2,
                num_attention_heads=3,
                ffn_dim=8,
                max_position_embeddings=21,
                word_embed_proj_dim=10,
            )
        ),
        lambda model: model.base_model.decoder.embed_positions.weight,
        lambda model, layer, x: linear(model.base_model.decoder.layers[layer].self_attn, x),
        first_row=2,
        causal=True,
    ),
    "whisper": Case(
        lambda: hf.WhisperForConditionalGeneration(whisper_config()),
        lambda model: model.base_model.encoder.embed_positions.weight,
        lambda model, layer, x: linear(model.base_model.encoder.layers[layer].self_attn, x),
    ),
    "whisper's decoder": Case(
        lambda: hf.WhisperModel(whisper_config()),
        lambda model: model.decoder.embed_positions.weight,
        lambda model, layer, x: linear(model.decoder.layers[layer].self_attn, x),
        stack="decoder",
        causal=True,
    ),
}


def saved(build: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """A model whose every weight, biases too, is random, written to a folder."""
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0.0, 0.5)
    model.save_pretrained(folder)
    return model.double().requires_grad_(False)


def without_biases(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    return model


def reader_of(folder: Path, stack: str | None = None) -> StackReader:
    return read_stack(open_checkpoint(folder), stack=stack)


def close(found: np.ndarray, expected: Tensor | np.ndarray, **bounds: float) -> None:
    torch.testing.assert_close(
        torch.from_numpy(np.asarray(found, dtype=float)),
        torch.as_tensor(expected).detach().double(),
        **bounds,
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("biases", [False, True])
def test_positional_attention_is_what_the_models_own_modules_give(name, biases, tmp_path):
    case = CASES[name]
    model = saved(case.build, tmp_path)
    model = model if biases else without_biases(model)
    for layer in (0, 1):
        table = case.table(model)[case.first_row :]
        query, key = case.query_key(model, layer, case.project(model, table))
        query, key = (x.unflatten(-1, (case.n_heads, 8)).transpose(0, 1) for x in (query, key))
        found = positional_attention(reader_of(tmp_path, case.stack), layer, biases=biases)
        close(found, query @ key.transpose(1, 2) * case.scale)


@pytest.mark.parametrize("name", CASES)
def test_inspect_fills_every_part_for_a_model_with_a_table(name, tmp_path):
    case = CASES[name]
    model = saved(case.build, tmp_path)
    found = inspect(tmp_path, layer=1, biases=True, stack=case.stack, fit=False, profiles=False)
    table = case.table(model)[case.first_row :]
    assert found.table is not None
    close(found.table.gram, table @ table.T, atol=1e-4, rtol=1e-5)
    n = len(table)
    assert found.model.n_positions == n
    assert (found.model.n_layers, found.model.n_heads, found.model.d_head) == (2, 3, 8)
    assert [head.head for head in found.heads] == [0, 1, 2]
    matrix = positional_attention(reader_of(tmp_path, case.stack), 1, biases=True)
    for head in found.heads:
        close(head.matrix, matrix[head.head], atol=1e-4, rtol=1e-5)
        lags = range(1 - n, 1 if case.causal else n)
        close(head.lag, torch.tensor(lags))
        means = [np.diagonal(matrix[head.head], lag).mean() for lag in lags]
        close(head.curve, np.array(means), atol=1e-4, rtol=1e-5)
    assert any(head.sensitive for head in found.heads)


def test_every_model_type_of_the_table_is_tested():
    tested = {CASES[name].build().config.model_type for name in CASES}
    rest = {"t5", "mt5", "umt5", "bloom", "gpt_neox", *ROTARY}
    types = [x for row in FAMILIES for x in (*row.model_types, *row.inspect_only)]
    assert sorted(types) == sorted(tested | rest | {"vit"})  # ViT is there for attach alone
    assert sorted(INSPECTABLE) == sorted(tested | rest)


def test_albert_reads_the_group_that_a_layer_belongs_to(tmp_path):
    model = saved(
        lambda: hf.AlbertModel(
            hf.AlbertConfig(
                **{**BERT, "num_hidden_layers": 4}, num_hidden_groups=2, inner_group_num=2
            )
        ),
        tmp_path,
    )
    reader = reader_of(tmp_path)
    assert reader.n_layers == 8
    for layer, (group, inner) in enumerate([(0, 0), (0, 1)] * 2 + [(1, 0), (1, 1)] * 2):
        part = model.encoder.albert_layer_groups[group].albert_layers[inner].attention
        close(reader.projections(layer).query.reshape(24, 24), part.query.weight)


def test_gpt2_scales_as_its_config_says(tmp_path):
    saved(CASES["gpt2"].build, tmp_path)
    plain = positional_attention(reader_of(tmp_path), 1, biases=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "scale_attn_by_inverse_layer_idx": True}))
    close(positional_attention(reader_of(tmp_path), 1, biases=True), plain / 2)
    path.write_text(json.dumps({**config, "scale_attn_weights": False}))
    close(positional_attention(reader_of(tmp_path), 1, biases=True), plain * math.sqrt(8))


def t5_config(config_class: type) -> object:
    return config_class(
        vocab_size=30,
        d_model=24,
        d_kv=5,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=3,
        d_ff=8,
        relative_attention_num_buckets=12,
        relative_attention_max_distance=40,
    )


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize(
    ("model_class", "config_class"),
    [
        (hf.T5ForConditionalGeneration, hf.T5Config),
        (hf.MT5Model, hf.MT5Config),
        (hf.UMT5ForConditionalGeneration, hf.UMT5Config),
    ],
)
def test_the_stated_curve_of_t5_is_the_bias_that_its_module_makes(
    model_class, config_class, stack, tmp_path
):
    model = saved(lambda: model_class(t5_config(config_class)), tmp_path)
    layer = 1
    owner = layer if config_class is hf.UMT5Config else 0
    blocks = (model.encoder if stack == "encoder" else model.decoder).block
    bias = blocks[owner].layer[0].SelfAttention.compute_bias(60, 60)[0]
    reports = relative_reports(reader_of(tmp_path, stack), layer=layer)
    for head in reports:
        lags = head.lag.astype(int)
        assert (lags[0], lags[-1]) == (-40, 0 if stack == "decoder" else 40)
        expected = [float(bias[head.head].diagonal(lag)[0]) for lag in lags]
        close(head.curve, np.array(expected), atol=1e-6, rtol=1e-6)
    assert len(reports) == 3
    found = inspect(tmp_path, layer=layer, stack=stack, fit=False, profiles=False)
    assert found.table is None
    assert found.model.position == "t5 bias"
    assert found.model.n_layers == {"encoder": 2, "decoder": 3}[stack]


def test_the_stated_curve_of_mpnet_is_its_bias_whatever_its_config_says(tmp_path):
    model = saved(CASES["mpnet"].build, tmp_path)
    bias = model.encoder.compute_position_bias(torch.zeros(1, 150, 24))[0]
    for head in relative_reports(reader_of(tmp_path)):
        expected = [float(bias[head.head].diagonal(int(lag))[0]) for lag in head.lag]
        close(head.curve, np.array(expected), atol=1e-6, rtol=1e-6)
        close(head.matrix, bias[head.head, :128, :128], atol=1e-6, rtol=1e-6)
    found = inspect(tmp_path, fit=False, profiles=False)
    assert found.model.position == "table + t5 bias"
    assert len(found.heads) == len(found.relative) == 3


def bloom() -> nn.Module:
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=30, hidden_size=24, n_layer=2, n_head=3))


def test_bloom_splits_its_fused_projection_as_the_model_does(tmp_path):
    part = saved(bloom, tmp_path).transformer.h[1].self_attention
    found = reader_of(tmp_path).projections(1)
    x = torch.randn(1, 7, 24, dtype=torch.float64)
    query, key, _ = part._reshape(part.query_key_value(x))
    for expected, weight, bias in (
        (query, found.query, found.query_bias),
        (key, found.key, found.key_bias),
    ):
        close(np.einsum("nm,hdm->hnd", x[0].numpy(), weight) + bias[:, None], expected[0])


def test_the_stated_curve_of_bloom_is_its_alibi_up_to_a_constant_a_row(tmp_path):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    saved(bloom, tmp_path)
    alibi = build_alibi_tensor(torch.ones(1, 129), 3, torch.float32)[:, 0]
    for head in relative_reports(reader_of(tmp_path)):
        close(head.lag, torch.arange(-128, 1))
        row = alibi[head.head]
        close(head.curve, row - row[-1], atol=1e-5, rtol=1e-5)


def neox() -> nn.Module:
    config = hf.GPTNeoXConfig(
        **BERT, rotary_pct=0.5, attn_implementation="eager", attention_dropout=0.0
    )
    return hf.GPTNeoXForCausalLM(config)


ROTARY = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig),
    "mistral": (hf.MistralModel, hf.MistralConfig),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config),
    "gemma3_text": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig),
    "granite": (hf.GraniteForCausalLM, hf.GraniteConfig),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config),
    "starcoder2": (hf.Starcoder2ForCausalLM, hf.Starcoder2Config),
}
GROUPED = {**BERT, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}


def rotary(name: str) -> nn.Module:
    model_class, config_class = ROTARY[name]
    config = config_class(**GROUPED, pad_token_id=0, attn_implementation="eager")
    config.head_dim = 6
    return model_class(config)


@pytest.mark.parametrize("name", ROTARY)
def test_llama_types_are_read_with_their_shared_keys_repeated(name, tmp_path):
    model = saved(lambda: rotary(name), tmp_path)
    part = model.base_model.layers[1].self_attn
    found = reader_of(tmp_path).projections(1)
    close(found.query.reshape(24, 24), part.q_proj.weight)
    close(found.key[::2].reshape(12, 24), part.k_proj.weight)
    close(found.key[1::2], found.key[::2])
    inspected = inspect(tmp_path, fit=False, profiles=False)
    assert (inspected.model.position, inspected.model.family) == ("rope", "llama")
    assert bool(inspected.relative) == (name in ("qwen2", "starcoder2"))


def weights_of(part: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The model's own attention weights of a layer for the input x, every key seen by all."""
    return part(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)[1][0]


def test_neox_splits_its_fused_projection_as_the_model_does(tmp_path):
    model = saved(neox, tmp_path)
    found = reader_of(tmp_path).projections(1)
    x = 0.3 * torch.randn(1, 7, 24, dtype=torch.float64)
    unturned = torch.ones(1, 7, 4, dtype=torch.float64), torch.zeros(1, 7, 4, dtype=torch.float64)
    expected = weights_of(model.gpt_neox.layers[1].attention, x, *unturned)
    query, key = (
        np.einsum("nm,hdm->hnd", x[0].numpy(), weight) + bias[:, None]
        for weight, bias in ((found.query, found.query_bias), (found.key, found.key_bias))
    )
    logits = torch.from_numpy(query @ key.transpose(0, 2, 1) * 8**-0.5)
    torch.testing.assert_close(logits.softmax(dim=-1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt_neox", "qwen2", "starcoder2"])
def test_the_stated_curve_of_rope_is_attention_to_an_input_of_zero(name, tmp_path):
    model = saved(neox if name == "gpt_neox" else lambda: rotary(name), tmp_path)
    base = model.base_model
    part = base.layers[1].attention if name == "gpt_neox" else base.layers[1].self_attn
    x, pos = torch.zeros(1, 129, 24, dtype=torch.float64), torch.arange(129)[None]
    expected = weights_of(part, x, *base.rotary_emb(x, pos))[:, -1]
    found = torch.stack(
        [torch.from_numpy(head.curve) for head in relative_reports(reader_of(tmp_path), layer=1)]
    )
    torch.testing.assert_close(found.double().softmax(-1), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("buckets", [-1, 8])
@pytest.mark.parametrize("shared", [False, True])
def test_the_stated_curve_of_deberta_v2_is_attention_to_an_input_of_zero(buckets, shared, tmp_path):
    model = saved(
        lambda: DebertaV2Model(
            hf.DebertaV2Config(
                **BERT,
                relative_attention=True,
                pos_att_type=["c2p", "p2c"],
                position_buckets=buckets,
                share_att_key=shared,
                norm_rel_ebd="layer_norm",
                position_biased_input=False,
            )
        ),
        tmp_path,
    )
    deberta_agrees(model, tmp_path, model.encoder.get_rel_embedding())
    found = inspect(tmp_path, fit=False, profiles=False)
    assert (found.model.position, found.table, found.heads) == ("deberta relative", None, ())


def test_the_stated_curve_of_deberta_is_attention_to_an_input_of_zero(tmp_path):
    model = saved(CASES["deberta"].build, tmp_path)
    deberta_agrees(model, tmp_path, model.encoder.get_rel_embedding())


def deberta_agrees(model: nn.Module, folder: Path, table: Tensor) -> None:
    """Rows of the model's weights for x = 0: b_Q . b_K is a constant that the softmax drops."""
    part, n = model.encoder.layer[1].attention.self, 21
    x = torch.zeros(1, n, 24, dtype=torch.float64)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    relative = model.encoder.get_rel_pos(x) if hasattr(model.encoder, "get_rel_pos") else distance
    weights = part(
        x,
        torch.ones(1, 1, n, n),
        output_attentions=True,
        relative_pos=relative,
        rel_embeddings=table,
    )[1]
    reports = relative_reports(reader_of(folder), layer=1)
    assert len(reports) == 3
    for head in reports:
        assert head.with_biases
        logits = torch.from_numpy(head.matrix)[:n, :n].double()
        expected = weights.reshape(3, n, n)[head.head]
        torch.testing.assert_close(logits.softmax(-1), expected, atol=1e-5, rtol=1e-4)


def test_an_unknown_family_says_what_it_found_and_how_to_add_a_row(tmp_path):
    hf.XLNetModel(
        hf.XLNetConfig(vocab_size=30, d_model=8, n_layer=1, n_head=2, d_inner=8)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'xlnet'.* look like positions: .*row .* in FAMILIES"):
        inspect(tmp_path)


def test_a_model_without_attention_is_refused(tmp_path):
    hf.ResNetModel(
        hf.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], num_channels=1)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model without attention.*'resnet'"):
        inspect(tmp_path)


def test_a_stack_that_a_model_does_not_have_is_refused(tmp_path):
    saved(CASES["bert"].build, tmp_path)
    with pytest.raises(ValueError, match="no stack 'decoder': a bert has only one"):
        inspect(tmp_path, stack="decoder")
    saved(CASES["whisper"].build, tmp_path)
    with pytest.raises(ValueError, match="has 'encoder' and 'decoder'"):
        inspect(tmp_path, stack="both")
