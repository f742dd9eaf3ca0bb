"""The drawings of the docs are those that the code draws now."""

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import make_kernel_pictures
import make_method_pictures
from whence.report import save_figure

DOCS = Path(__file__).resolve().parents[2] / "docs"


def drawing(path: Path) -> str:
    """An SVG without the pixels of its matrices, whose compression depends on the machine."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r'"data:image/png;base64,[^"]*"', '""', text)


def check(figure: Figure, committed: Path, folder: Path) -> None:
    drawn = drawing(save_figure(figure, folder / committed.name))
    assert drawn == drawing(committed), (
        f"{committed.name} is out of date: run docs/make_*_pictures.py"
    )


@pytest.mark.parametrize("name", ["alibi"])
def test_the_picture_of_a_method(name: str, tmp_path: Path) -> None:
    check(make_method_pictures.draw(name), DOCS / "methods" / f"{name}.svg", tmp_path)


@pytest.mark.parametrize("name", ["layout", "short"])
def test_the_pictures_of_the_kernels(name: str, tmp_path: Path) -> None:
    figure = getattr(make_kernel_pictures, name)()
    check(figure, DOCS / f"fused_{name}.svg", tmp_path)


def test_the_page_that_explains_position_makes_its_own_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / "why_position.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        exec(compile(code, "why_position.md", "exec"), names)
    made, committed = (folder / "why_position_words.svg" for folder in (tmp_path, DOCS))
    assert drawing(made) == drawing(committed)
