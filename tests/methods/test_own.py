"""A method of one's own, outside of whence: by module:Class, or by an entry point."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from own_method import own_module
from whence import METHODS, Sum, build
from whence.methods.registry import import_modules, named


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    with own_module(tmp_path):
        yield tmp_path


@pytest.fixture
def waves(folder: Path):
    import_modules("my_waves:Wave")
    return sys.modules["my_waves"]


@pytest.fixture
def installed(waves, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package had brought it: pyproject.toml, [project.entry-points."whence.methods"]."""
    points = [EntryPoint("wave", "my_waves:Wave", "whence.methods")]
    points += [EntryPoint("tisa", "my_waves:Wave", "whence.methods")]  # a name that is taken
    points += [EntryPoint("bare", "my_waves:no_class", "whence.methods")]
    monkeypatch.setattr(
        "whence.methods.registry.entry_points",
        lambda *, group: EntryPoints(points).select(group=group),
    )


def made(spec: str):
    return build(spec, n_heads=4, d_head=8)


def test_a_class_of_an_imported_module_is_built_with_its_options(waves) -> None:
    assert type(made("my_waves:Wave")) is waves.Wave
    assert made("my_waves:Wave:period=3").period == 3.0
    assert made(" my_waves : Wave : period = 3 ").period == 3.0
    total = made("tisa:kernels=2+my_waves:Wave:period=2+alibi")
    assert isinstance(total, Sum)
    assert [type(part).__name__ for part in total.parts] == ["Tisa", "Wave", "Alibi"]


def test_no_module_is_imported_because_a_text_names_it(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"not imported. Write `import my_waves` before"):
        made("my_waves:Wave")
    assert "my_waves" not in sys.modules


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_waves:Waves", "the module 'my_waves' has no class 'Waves'"),
        ("my_waves:no_class", "'my_waves:no_class' is no subclass of whence.PositionMethod"),
        ("my_waves:torch", "is no subclass of whence.PositionMethod"),
        ("my_waves.Wave", "A class of your own is written as 'my_waves:Wave'"),
        ("my_waves:Wave:perod=3", "Unknown option of method 'my_waves:Wave': 'perod'"),
        ("my_waves:Wave:period", "option 'period' of method 'my_waves:Wave' has no value"),
        ("my_waves:Wave:period=nan", "my_waves:Wave:period must be a finite number, got 'nan'"),
        ("my_waves:Wanting", "method 'my_waves:Wanting' needs its option 'size'"),
        ("my_waves:Wanting:size=1,sizes=2", "my_waves:Wanting:sizes cannot be given in a text"),
        ("tisa:kernels", "option 'kernels' of method 'tisa' has no value"),
        ("my_waves:", "Unknown method 'my_waves'"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(waves, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(spec)


def test_importing_says_which_module_is_missing(folder: Path) -> None:
    with pytest.raises(ValueError, match="there is no module 'no_waves' for the method"):
        import_modules("no_waves:Wave")
    with pytest.raises(ValueError, match=r"there is no module 'my_waves\.inner'"):
        import_modules("tisa+my_waves.inner:Wave")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        import_modules("broken_waves:Wave")  # it is there: what it imports is not
    import_modules("tisa:kernels+rope")  # names of methods are no modules


@pytest.mark.usefixtures("installed")
def test_an_entry_point_adds_a_name_and_takes_none_away(waves) -> None:
    assert made("wave:period=5").period == 5.0
    assert type(made("tisa")) is METHODS["tisa"]
    with pytest.raises(ValueError, match=r"'bare' is no subclass of whence\.PositionMethod"):
        made("bare")
    with pytest.raises(ValueError, match=r"Did you mean 'wave'\?"):
        made("wavy")


@pytest.mark.parametrize(
    ("text", "name"),
    [("TISA", "tisa"), ("RoPE", "rope"), ("Transformer-XL", "transformer_xl"), ("T5", "t5")],
)
def test_a_name_is_found_in_any_case(text: str, name: str) -> None:
    assert [part.name for part in named(text)] == [name]
    assert type(made(text)) is METHODS[name]


def test_a_native_model_with_it_is_saved_and_loaded(waves, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from models import VOCAB, causal

    model = causal("my_waves:Wave:period=3+tisa:kernels=2")
    assert any(name.endswith("Wave.weight") for name, _ in model.named_parameters())
    model.save_pretrained(tmp_path / "model")
    ids = torch.randint(2, VOCAB, (2, 9))
    same = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert_close(same(ids).logits, model(ids).logits, rtol=0, atol=0)
    del sys.modules["my_waves"]
    with pytest.raises(ValueError, match="Write `import my_waves` before"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_a_model_that_it_is_attached_to_is_saved_and_loaded(waves, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from hf_models import awake, hidden, inputs, tiny
    from whence.hf import attach, from_pretrained

    model = tiny("bert")
    awake(attach(model, "my_waves:Wave:period=3"), 0.5)
    model.save_pretrained(tmp_path / "model")
    given = inputs("bert")
    same = from_pretrained(tmp_path / "model").eval()
    assert_close(hidden(same, given), hidden(model.eval(), given), rtol=0, atol=0)
    del sys.modules["my_waves"]
    with pytest.raises(ValueError, match="Write `import my_waves` before"):
        from_pretrained(tmp_path / "model")
