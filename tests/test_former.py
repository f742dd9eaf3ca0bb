"""Checkpoints of earlier versions, in the units of the formula, load to the same function.

data/former.json was written by whence before its units changed: for each method a state dict, and
what it adds to scores and values.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from hf_models import hidden, inputs, tiny
from models import VOCAB, causal
from shaking import shake
from whence import build
from whence.hf import attach, attached, from_pretrained
from whence.method import PositionMethod
from whence.methods.t5 import T5
from whence.models import WhenceForCausalLM, WhenceModel

DATA = json.loads((Path(__file__).parent / "data" / "former.json").read_text())
NEAR = {"rtol": 0, "atol": 1e-6}
NATIVE, ATTACHED = "tisa+t5+shaw", "tisa:kernels=3+t5:start=normal"


@pytest.mark.parametrize("spec", DATA)
def test_a_state_dict_of_the_former_version_gives_the_same_function(spec):
    method, stored = build(spec, n_heads=2, d_head=4, max_length=9), DATA[spec]
    state = {name: torch.tensor(value) for name, value in stored["state"].items()}
    method.load_state_dict(state)
    assert set(state) == set(stored["state"])  # load_state_dict works on a copy
    q, pos = torch.linspace(-1, 1, 72).view(1, 2, 9, 4), torch.arange(9)
    bias, values = method.score_term(q, pos, pos), method.value_term(pos, pos)
    assert (bias is None, values is None) == ("score" not in stored, "values" not in stored)
    if bias is not None:
        assert_close(bias.to_dense(pos, pos), torch.tensor(stored["score"]), **NEAR)
    if values is not None:
        assert_close(values.table, torch.tensor(stored["values"]), **NEAR)


def to_former(model: torch.nn.Module, folder: Path) -> None:
    """Give the files of a saved model the names and units of the former version."""
    prefix = f"{model.base_model_prefix}."
    renamed = {}  # the name without the prefix -> the names that replace it, and their values
    for name, method in model.named_modules():
        if isinstance(method, PositionMethod) and method.former_names:
            now = [f"{name}.{each}" for each, _ in method.named_parameters(recurse=False)]
            then = {f"{name}.{x}": getattr(method, x).detach() for x in method.former_names}
            for key, (former, value) in zip(now, then.items(), strict=True):
                renamed[key.removeprefix(prefix)] = former.removeprefix(prefix), value
    index, seen = folder / "model.safetensors.index.json", {}
    for file in folder.glob("*.safetensors"):
        tensors = {}
        for key, value in load_file(file).items():
            plain = key.removeprefix(prefix)
            former, number = renamed.get(plain, (plain, value))
            tensors[key.removesuffix(plain) + former] = number.contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
        seen |= dict.fromkeys(tensors, file.name)
    assert not any("raw_" in key for key in seen)
    assert sum(key.endswith((".amplitude", ".table")) for key in seen) >= 3
    if index.exists():
        index.write_text(json.dumps(json.loads(index.read_text()) | {"weight_map": seen}))


def without(folder: Path, ending: str) -> None:
    weights = load_file(folder / "model.safetensors")
    less = {key: value for key, value in weights.items() if not key.endswith(ending)}
    assert len(less) == len(weights) - 1
    save_file(less, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def native(tmp_path):
    model = causal(NATIVE)
    model.save_pretrained(tmp_path)
    to_former(model, tmp_path)
    return model, tmp_path


@pytest.fixture
def positioned(tmp_path):
    model = tiny("bert", AutoModelForSequenceClassification)
    attach(model, ATTACHED)
    shake(model.bert.whence, 0.5)
    model.save_pretrained(tmp_path)
    to_former(model, tmp_path)
    return model, tmp_path


IDS = {"input_ids": torch.arange(2, 2 + 20)[None] % VOCAB}


def assert_equal_outputs(
    loaded: torch.nn.Module, model: torch.nn.Module, given: dict[str, torch.Tensor] = IDS
) -> None:
    """In float64: a model's own rounding in float32, some 2e-6, would hide what loading changes."""
    found, wanted = (hidden(each.double(), given) for each in (loaded, model))
    assert_close(found, wanted, rtol=0, atol=2e-7)


def test_a_former_native_model_gives_its_outputs(native, caplog):
    model, folder = native
    loaded, info = WhenceForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert_equal_outputs(loaded, model)
    assert "units of an earlier version" in caplog.text


def test_a_former_native_model_gives_its_outputs_in_its_base_class(native):
    model, folder = native
    assert_equal_outputs(WhenceModel.from_pretrained(folder), model.model)


def test_a_former_native_base_model_gives_its_outputs_in_a_class_with_a_head(tmp_path):
    base = causal(NATIVE).model
    base.save_pretrained(tmp_path)
    to_former(base, tmp_path)
    loaded = WhenceForCausalLM.from_pretrained(tmp_path)
    assert_equal_outputs(loaded.model, base)


@pytest.mark.parametrize(
    "load", [from_pretrained, AutoModelForSequenceClassification.from_pretrained]
)
def test_a_former_attached_model_gives_its_outputs(positioned, load):
    model, folder = positioned
    assert_equal_outputs(load(folder), model)


def test_a_former_attached_model_gives_its_outputs_in_its_base_class(positioned):
    model, folder = positioned
    loaded, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert_equal_outputs(loaded, model.bert)


def test_a_former_attached_base_model_gives_its_outputs_in_a_class_with_a_head(tmp_path):
    model = tiny("bert")
    attach(model, ATTACHED)
    shake(model.whence, 0.5)
    model.save_pretrained(tmp_path)
    to_former(model, tmp_path)
    loaded = from_pretrained(tmp_path, AutoModelForMaskedLM)
    assert_equal_outputs(loaded.bert, model)


@pytest.mark.parametrize("kind", ["native", "attached"])
def test_a_former_model_in_shards_gives_its_outputs(kind, tmp_path):
    if kind == "native":
        model, load = causal(NATIVE), WhenceForCausalLM.from_pretrained
    else:
        model, load = tiny("bert"), from_pretrained
        shake(attach(model, ATTACHED).model.whence, 0.5)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    to_former(model, tmp_path)
    assert_equal_outputs(load(tmp_path), model)


def test_a_former_model_that_was_loaded_is_saved_in_the_units_of_now(positioned, tmp_path):
    model, folder = positioned
    from_pretrained(folder).save_pretrained(tmp_path / "now")
    names = load_file(tmp_path / "now" / "model.safetensors")
    assert "bert.whence.layer0_tisa.raw_deviation" in names
    assert not any(key.endswith(("amplitude", "sharpness")) and "raw" not in key for key in names)
    assert_equal_outputs(from_pretrained(tmp_path / "now"), model)


def test_a_former_model_in_half_precision_gives_nearly_its_outputs(native):
    model, folder = native
    for file in folder.glob("*.safetensors"):
        tensors = {key: value.bfloat16() for key, value in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    loaded = WhenceForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for now, then in zip(modules(loaded), modules(model), strict=True):
        for name in then.former_names:
            want = getattr(then, name).bfloat16().float()
            assert_close(getattr(now, name), want, rtol=1e-5, atol=1e-6)


def modules(model: torch.nn.Module) -> list[PositionMethod]:
    return [m for m in model.modules() if isinstance(m, PositionMethod) and m.former_names]


def test_a_former_attached_model_that_lacks_a_number_is_refused(positioned):
    _, folder = positioned
    without(folder, "layer1_tisa.sharpness")
    lacking = r"numbers of bert\.whence\.layer1_tisa as an earlier version .* but lacks sharpness"
    for load in (from_pretrained, AutoModelForSequenceClassification.from_pretrained):
        with pytest.raises(ValueError, match=lacking) as raised:
            load(folder)
        assert "layer0_tisa" not in str(raised.value)


def test_a_former_native_model_that_lacks_a_number_is_refused(native):
    _, folder = native
    without(folder, "layers.1.tisa.offset")
    with pytest.raises(ValueError, match=r"position\.layers\.1\.tisa .* but lacks offset"):
        WhenceForCausalLM.from_pretrained(pretrained_model_name_or_path=folder)


def test_what_a_subclass_adds_is_loaded_beside_numbers_of_an_earlier_version():
    class Gated(T5):
        def __init__(self, n_heads: int) -> None:
            super().__init__(n_heads)
            self.gate = torch.nn.Parameter(torch.ones(n_heads))

    state = {"table": torch.randn(32, 2), "gate": torch.full((2,), 7.0)}
    method = Gated(2)
    method.load_state_dict(state)
    assert_close(method.gate.detach(), state["gate"], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"Missing key.*gate"):
        method.load_state_dict({"table": state["table"]})


def test_a_state_dict_that_lacks_a_number_is_not_half_converted():
    method = build("tisa:kernels=3", n_heads=2, d_head=4)
    before = {key: value.clone() for key, value in method.state_dict().items()}
    state = {key: torch.tensor(value) for key, value in DATA["tisa:kernels=3"]["state"].items()}
    del state["sharpness"]
    with pytest.raises(RuntimeError, match=r"Missing key.*raw_amplitude.*raw_deviation"):
        method.load_state_dict(state)
    found = method.load_state_dict(state, strict=False)
    assert set(found.missing_keys) == set(before)
    assert set(found.unexpected_keys) == {"amplitude", "offset"}
    assert_close(method.state_dict(), before, rtol=0, atol=0)


def test_trainer_goes_on_from_a_former_checkpoint(tmp_path):
    model = causal(NATIVE)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(2, VOCAB, (4, 9))]

    def trainer(model):
        options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_steps": 1}
        options |= {"dataloader_pin_memory": False, "max_steps": 1}
        return Trainer(model, TrainingArguments(str(tmp_path), **options), train_dataset=data)

    trainer(model).train()
    to_former(model, tmp_path / "checkpoint-1")
    other = causal(NATIVE)
    shake(other, 0.5)
    trainer(other).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))  # no step is left
    wanted = dict(model.named_parameters())
    for key, parameter in other.named_parameters():
        assert_close(parameter, wanted[key], rtol=1e-6, atol=1e-7)


def test_numbers_of_another_shape_are_refused_and_not_repeated():
    state = {name: torch.ones(2, 1) for name in ("amplitude", "sharpness", "offset")}
    with pytest.raises(
        ValueError, match=r"Tisa\.amplitude has the shape \(2, 5\) and was given \(2, 1\)"
    ):
        build("tisa:kernels=5", n_heads=2, d_head=4).load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"T5\.table has the shape \(32, 2\) and was given \(16, 2\)"
    ):
        build("t5", n_heads=2, d_head=4).load_state_dict({"table": torch.ones(16, 2)})


def test_an_attached_model_takes_a_former_state_dict():
    model, twin = tiny("bert"), tiny("bert")
    for each in (model, twin):
        shake(attach(each, ATTACHED).model.whence, 0.5)
    state = {key: value for key, value in model.state_dict().items() if "raw_" not in key}
    for name, method in model.named_modules():
        if isinstance(method, PositionMethod):
            state |= {f"{name}.{x}": getattr(method, x).detach() for x in method.former_names}
    twin.load_state_dict(state)
    assert_equal_outputs(twin, model, inputs("bert"))
    assert attached(twin).n_parameters() == attached(model).n_parameters()
