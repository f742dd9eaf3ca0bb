"""A model with a method is saved by its own save_pretrained and loaded again, also elsewhere."""

import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    BertModel,
    GPT2Model,
)
from transformers.utils import logging

from hf_models import FAMILIES, awake, hidden, inputs, spec, tiny
from whence.hf import attach, attached, from_pretrained
from whence.methods.tisa import Tisa


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert_close(a, b, rtol=0, atol=0)


QUICK = ("bert", "albert", "gpt2", "mpnet", "vit")  # shared layers, causal, own buckets, images
REST = tuple(name for name in FAMILIES if name not in QUICK)


def save(folder: Path, families: Iterable[str]) -> Path:
    """A folder a family and form: model, input and output."""
    for name in families:
        for keep in (True, False):
            torch.manual_seed(0)
            model, given = tiny(name), inputs(name)
            handle = attach(model, spec(name, "kernels=2"), keep_positions=keep)
            awake(handle, 0.5)
            where = folder / f"{name}-{keep}"
            model.save_pretrained(where)
            save_file(given, where / "given.st")
            save_file({"out": hidden(model, given).contiguous()}, where / "out.st")
            handle.undo()
            save_file({"out": hidden(model, given).contiguous()}, where / "plain.st")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved"), QUICK)


LOAD = """
import sys
import whence
assert "transformers" not in sys.modules
from pathlib import Path
import torch
from safetensors.torch import load_file
from transformers import AutoModel
for folder in sorted(Path(sys.argv[1]).iterdir()):
    given, out = load_file(folder / "given.st"), load_file(folder / "out.st")["out"]
    for model in (AutoModel.from_pretrained(folder), whence.hf.from_pretrained(folder)):
        with torch.no_grad():
            assert torch.equal(model(**given)[0], out), folder
        whence.hf.attached(model).undo()
        with torch.no_grad():
            assert torch.equal(model(**given)[0], load_file(folder / "plain.st")["out"]), folder
    print(folder.name)
"""


@pytest.mark.parametrize("families", [QUICK, pytest.param(REST, marks=pytest.mark.slow)])
def test_every_family_loads_in_a_fresh_process_with_equal_outputs_and_comes_off(
    families, saved, tmp_path
):
    folder = saved if families == QUICK else save(tmp_path, families)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) == 2 * len(families)


ORDERS = {
    "transformers first": "from transformers import AutoModel; import whence",
    "a part of transformers after": "import whence; import transformers.modeling_utils",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_the_auto_classes_know_them_in_any_order_of_imports(order, saved):
    code = f"import sys; {ORDERS[order]}; from transformers import AutoModel\n"
    code += "print(type(AutoModel.from_pretrained(sys.argv[1]).config).__name__)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(saved / "bert-True")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "WhenceBertConfig", done.stderr[-2000:]


def test_the_config_carries_the_method_and_the_weights_are_safetensors(saved):
    config = json.loads((saved / "bert-False" / "config.json").read_text())
    assert config["model_type"] == "whence-bert"
    assert config["architectures"] == ["BertModel"]
    assert config["whence"] == {
        "format": 1,
        "position": "tisa:kernels=2,start=zero",
        "keep_positions": False,
        "share": False,
        "layers": None,
        "backend": "auto",
    }
    with safe_open(saved / "bert-False" / "model.safetensors", "pt") as file:
        assert "whence.layer1_tisa.raw_offset" in file.keys()  # noqa: SIM118


def test_shards_and_another_head_and_saving_again(tmp_path):
    model, given = tiny("bert", AutoModelForSequenceClassification), inputs("bert")
    awake(attach(model, "t5+tisa:kernels=2+alibi", layers=[1]), 0.5)
    want = hidden(model, given)
    model.save_pretrained(tmp_path / "a", max_shard_size="10KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    loaded = from_pretrained(tmp_path / "a")
    assert isinstance(loaded, BertForSequenceClassification)
    same(hidden(loaded, given), want)
    loaded.save_pretrained(tmp_path / "b")
    same(hidden(from_pretrained(tmp_path / "b"), given), want)
    base = AutoModel.from_pretrained(tmp_path / "b")
    same(hidden(base, given), hidden(model.bert, given))
    other = from_pretrained(tmp_path / "b", AutoModelForMaskedLM)
    same(hidden(other.bert, given), hidden(model.bert, given))
    named = from_pretrained(tmp_path / "b", BertModel)
    same(hidden(named, given), hidden(model.bert, given))


@pytest.mark.parametrize(
    "method",
    [
        "alibi",
        "sinusoidal",
        "rope",
        "t5:start=normal",
        "floater",
        "tupe",
        "kerple+rope",
        "sandwich",
    ],
)
def test_methods_with_shared_or_computed_numbers_load_with_equal_outputs(method, tmp_path):
    model, given = tiny("albert"), inputs("albert")
    attach(model, method, keep_positions=False)
    want = hidden(model, given)
    model.save_pretrained(tmp_path)
    same(hidden(AutoModel.from_pretrained(tmp_path), given), want)


def test_a_loaded_model_after_undo_is_saved_as_a_plain_one(saved, tmp_path):
    model = from_pretrained(saved / "vit-False")
    attached(model).undo()
    model.save_pretrained(tmp_path)
    plain = AutoModel.from_pretrained(tmp_path)
    assert plain.config.model_type == "vit"
    given, out = (load_file(saved / "vit-False" / f"{x}.st") for x in ("given", "plain"))
    same(hidden(plain, given), out["out"])


def test_precision_attention_and_loading_info_are_transformers_own(saved):
    model = AutoModel.from_pretrained(saved / "bert-True", dtype=torch.bfloat16)
    for key, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "whence." in key else torch.bfloat16)
    eager = AutoModel.from_pretrained(saved / "bert-True", attn_implementation="eager")
    given = load_file(saved / "bert-True" / "given.st")
    assert len(eager(**given, output_attentions=True).attentions) == 2
    _, info = AutoModel.from_pretrained(saved / "bert-True", output_loading_info=True)
    assert not info["missing_keys"]


def test_a_model_can_be_made_from_its_config_alone(saved):
    config = AutoConfig.from_pretrained(saved / "gpt2-True")
    model = AutoModel.from_config(config)
    assert attached(model).position == "tisa:kernels=2,start=zero"


def test_models_and_configs_go_through_pickle(saved):
    given = load_file(saved / "mpnet-False" / "given.st")
    for model in (
        from_pretrained(saved / "mpnet-False"),
        attach(tiny("bert"), "tisa:start=local").model,
    ):
        twin = pickle.loads(pickle.dumps(model))
        same(hidden(twin, given), hidden(model, given))
        attached(twin).undo()
        assert attached(model) is not None


def test_pushing_to_the_hub_uploads_the_same_files(monkeypatch):
    model = tiny("bert")
    attach(model, "tisa")
    sent = {}

    def stub(self, folder, repo_id, **_):
        sent.update({path.name: path.read_bytes() for path in Path(folder).iterdir()})

    monkeypatch.setattr(type(model), "_upload_modified_files", stub)
    monkeypatch.setattr("transformers.utils.hub.hf_api", _Api)
    monkeypatch.setattr(
        "transformers.utils.hub.create_and_tag_model_card", lambda *_, **__: _Card()
    )
    model.push_to_hub("me/bert-tisa")
    assert json.loads(sent["config.json"])["whence"]["position"] == "tisa:start=zero"
    assert "model.safetensors" in sent


class _Api:
    repo_id = "me/bert-tisa"

    def create_repo(self, *_, **__) -> "_Api":
        return self


class _Card:
    def save(self, _: str) -> None: ...


def altered(saved: Path, target: Path, **changes: object) -> Path:
    shutil.copytree(saved / "bert-True", target)
    config = json.loads((target / "config.json").read_text())
    config["whence"] |= changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_checkpoint_of_a_newer_whence_says_so(saved, tmp_path):
    path = altered(saved, tmp_path / "new", format=2)
    for load in (from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(ValueError, match=r"format 2 of whence.*pip install -U whence"):
            load(path)


@pytest.mark.parametrize(
    "changes",
    [{"position": 5}, {"position": ["tisa"]}, {"layers": 5}, {"share": "no"}, {"backend": 1}],
    ids=str,
)
def test_an_entry_of_the_wrong_kind_is_named(saved, tmp_path, changes):
    path = altered(saved, tmp_path / "odd", **changes)
    ((name, value),) = changes.items()
    for load in (from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(ValueError, match=re.escape(f"has {name} = {value!r}, which attach")):
            load(path)


def test_a_checkpoint_without_some_of_the_methods_weights_says_which(saved, tmp_path):
    path = altered(saved, tmp_path / "less")
    weights = load_file(path / "model.safetensors")
    del weights["whence.layer1_tisa.raw_offset"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    for load in (from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(
            ValueError, match=r"lacks weights .*: whence\.layer1_tisa\.raw_offset\."
        ):
            load(path)


def test_a_method_given_as_an_object_cannot_be_loaded_and_says_why(tmp_path):
    model = tiny("bert")
    attach(model, Tisa(4, kernels=2))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="given to attach as an object"):
        AutoModel.from_pretrained(tmp_path)


def test_from_pretrained_refuses_a_model_without_a_method(tmp_path):
    tiny("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"saved without a method \(bert\)"):
        from_pretrained(tmp_path)


def pickled(saved: Path, target: Path, index: str | None) -> Path:
    """A checkpoint with pickled weights, in a file or as the shard that an index names."""
    shutil.copytree(saved / "bert-True", target)
    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    name = "pytorch_model.bin" if index is None else "model-00001-of-00001.bin"
    torch.save(weights, target / name)
    if index is not None:
        shards = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, name)}
        (target / index).write_text(json.dumps(shards))
    return target


@pytest.mark.parametrize(
    "index", [None, "pytorch_model.bin.index.json", "model.safetensors.index.json"]
)
def test_pickled_weights_are_read_only_when_asked_for(index, saved, tmp_path, monkeypatch):
    path = pickled(saved, tmp_path / "bin", index)

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle was read")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", refuse)
        for load in (from_pretrained, AutoModel.from_pretrained):
            with pytest.raises(ValueError, match=r"a pickle can run code.*allow_pickle=True"):
                load(path)
        with pytest.raises(ValueError, match=r"use_safetensors=False asks for pickled weights"):
            from_pretrained(path, use_safetensors=False)
    given, out = (load_file(path / f"{name}.st") for name in ("given", "out"))
    same(hidden(from_pretrained(path, allow_pickle=True), given), out["out"])


@pytest.mark.parametrize("path", ["./not-there", Path("not-there"), "a/b/c"])
def test_a_folder_that_is_not_there_is_named(path):
    with pytest.raises(
        ValueError, match=r"there is no folder .*Give a folder that save_pretrained"
    ):
        from_pretrained(path)


def test_a_folder_without_a_config_and_a_name_that_the_hub_has_not_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        from_pretrained(tmp_path)

    def refuse(*args, **kwargs):
        raise OSError("We couldn't connect.\nCheck your connection.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    with pytest.raises(ValueError, match=r"no folder bert-tisa here.*\(We couldn't.* connection\)"):
        from_pretrained("bert-tisa")


def test_the_class_to_load_in_may_be_a_loaded_models_but_not_another_familys(saved):
    first = from_pretrained(saved / "bert-True")
    again = from_pretrained(saved / "bert-True", type(first))
    assert type(again) is type(first)
    with pytest.raises(ValueError, match=r"of the family bert, and GPT2Model is of 'gpt2'"):
        from_pretrained(saved / "bert-True", GPT2Model)
    with pytest.raises(ValueError, match=r"output_loading_info=True .* an Auto class"):
        from_pretrained(saved / "bert-True", output_loading_info=True)


@pytest.mark.parametrize(("backend", "attn"), [("auto", "eager"), ("sdpa", "sdpa")])
def test_a_model_of_an_attached_ones_config_has_the_method_and_comes_off(backend, attn):
    model = tiny("bert", attn="eager")
    attach(model, "tisa:kernels=2", backend=backend)
    other = AutoModel.from_config(model.config)
    assert other.config._attn_implementation == model.config._attn_implementation
    assert attached(other).position == "tisa:kernels=2,start=zero"
    attached(other).undo()
    assert (other.config.model_type, other.config._attn_implementation) == ("bert", attn)
