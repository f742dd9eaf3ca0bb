"""The notebooks are whole and without outputs, what they import is there, and failures are seen.

`make notebooks` runs them.
"""

import ast
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def sources(notebook: nbformat.NotebookNode) -> list[str]:
    """The Python of every code cell, without IPython's own lines."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return [
        "\n".join(line for line in text.splitlines() if not line.startswith("%")) for text in cells
    ]


def test_there_are_three_notebooks() -> None:
    names = ["reproduce_the_slides", "tisa_in_your_own_model", "which_head_looks_where"]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_parses_has_no_outputs_and_imports_what_is_there(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code), "strip the outputs"
    assert [cell.execution_count for cell in code] == [None] * len(code), "strip the outputs"
    for text in sources(notebook):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), {})


def test_the_attention_of_the_notebook_has_fifteen_lines_of_code() -> None:
    notebook = nbformat.read(EXAMPLES / "tisa_in_your_own_model.ipynb", as_version=4)
    lines = sources(notebook)[0].splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith('"""')]
    assert len(code) <= 15


@pytest.mark.slow  # starts three kernels
def test_a_cell_that_fails_fails_the_run_and_one_that_stops_is_skipped(tmp_path: Path) -> None:
    cells = {"fails": "1 / 0", "runs": "print(1)", "stops": "raise SystemExit('no model here')"}
    for name, cell in cells.items():
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
        nbformat.write(made, tmp_path / f"{name}.ipynb")

    def run(*names: str) -> subprocess.CompletedProcess[str]:
        paths = [str(tmp_path / f"{name}.ipynb") for name in names]
        command = [sys.executable, str(EXAMPLES / "run_notebooks.py"), *paths]
        return subprocess.run(command, capture_output=True, text=True, timeout=150)

    good = run("runs", "stops")
    assert (good.returncode, good.stderr) == (0, "")  # a kernel that is left behind complains
    assert "runs.ipynb: ran in" in good.stdout
    assert "stops.ipynb: skipped. no model here" in good.stdout
    bad = run("fails", "runs")
    assert bad.returncode == 1
    assert "fails.ipynb: failed" in bad.stderr
    assert "ZeroDivisionError" in bad.stderr
    assert "runs.ipynb: ran in" in bad.stdout  # one failure does not hide the others
