"""The wheel in empty environments: what it holds, what runs, and what a missing extra says.

Nothing is downloaded: see tests/shared/bare_environment.py.
"""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bare_environment import BareEnvironment

pytestmark = pytest.mark.slow  # builds the package, and imports torch some thirty times

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"
USUAL = ("analysis", "cli", "flow", "hf", "plot")  # those of the README's install line

# A short call of each command that needs an extra beyond cli, and what it says or leaves behind.
COMMANDS = {
    "inspect": "inspect table.npy --out found",
    "compare-checkpoints": "compare-checkpoints table.npy other.npy --out found",
    "report": "report found",
    "bench": "bench --methods tisa --peers none --modes forward --lengths 16 --tokens 16 --device cpu",
    "demo": "demo --no-train",
    "lm": "lm --methods nope --data absent.txt",
    "glue": "glue --model absent --data absent",
    "distill": "distill absent --out distilled",
    "translate": "translate --data absent --source en --target de",
}
RUNS = {
    "inspect",
    "compare-checkpoints",
    "bench",
    "demo",
}  # the others want files that are not there

PROMISED = {
    "analysis": "import whence.analysis.inspect, whence.analysis.fit, whence.analysis.profile",
    "flow": "import whence; whence.build('floater', n_heads=2, d_head=4, max_length=8)",
    "glue": "import whence.experiments.glue.sweep, sklearn.metrics, whence.hf",
    "hf": "import whence.hf, whence.models; whence.models.WhenceForCausalLM",
    "plot": "import whence.report",
    "translate": "import whence.experiments.translation.sweep, sacrebleu.metrics, whence.hf",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist, as `python -m build` does, without a network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (built,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    assert sdist.stat().st_size < 10_000_000
    return built


@pytest.fixture(scope="module")
def with_cli(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> BareEnvironment:
    return BareEnvironment(tmp_path_factory.mktemp("cli") / "env", wheel, ("cli",))


@pytest.fixture(scope="module")
def usual(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> BareEnvironment:
    return BareEnvironment(tmp_path_factory.mktemp("usual") / "env", wheel, USUAL)


def test_every_file_of_the_sources_is_in_the_wheel(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    wanted = {
        path.relative_to(SOURCES).as_posix()
        for path in (SOURCES / "whence").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == wanted
    assert {"whence/py.typed", "whence/report/templates/page.css"} <= held


def test_the_core_runs_the_readmes_example_and_says_what_the_command_line_needs(
    wheel: Path, tmp_path: Path
) -> None:
    bare = BareEnvironment(tmp_path / "env", wheel)
    assert not {"numpy[]", "typer[]", "transformers[]"} & bare.linked
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert example is not None
    done = bare.run("-W", "ignore", "-c", example[1])
    assert done.returncode == 0, done.stderr
    said = re.search(r"# (torch\.Size.*)", example[1])
    assert said is not None
    assert done.stdout.startswith(said[1])
    done = bare.run("-W", "ignore", "-m", "whence", "methods")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "the command line needs rich" in done.stderr
    assert "pip install 'whence[cli]'" in done.stderr


@pytest.mark.parametrize(
    "command", ["--help", "--version", "methods", "methods tisa", "params", "explain tisa"]
)
def test_a_command_that_computes_little_needs_the_extra_cli_alone(
    with_cli: BareEnvironment, command: str
) -> None:
    done = with_cli.whence(*command.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() != ""


@pytest.mark.parametrize("command", COMMANDS)
def test_the_extras_that_a_command_names_are_all_that_it_needs(
    wheel: Path, with_cli: BareEnvironment, tmp_path: Path, command: str
) -> None:
    (with_cli.folder / "found").mkdir(exist_ok=True)  # or `report` has nothing to ask for
    done = with_cli.whence(*COMMANDS[command].split())
    assert done.returncode == 1, done.stderr
    named = re.search(r"is not installed: pip install 'whence\[([\w,]+)\]', or in", done.stderr)
    assert named is not None, done.stderr
    extras = tuple(named[1].split(","))
    full = BareEnvironment(tmp_path / "env", wheel, ("cli", *extras))
    save = "import numpy as np; np.save('table.npy', np.eye(32)); np.save('other.npy', np.eye(16))"
    assert full.run("-c", save).returncode == 0
    (full.folder / "found").mkdir()
    done = full.whence(*COMMANDS[command].split())
    assert "not installed" not in done.stderr
    assert "mistake in whence" not in done.stderr
    assert done.returncode == (0 if command in RUNS else 2), done.stderr
    if command == "inspect":
        assert "<html" in (full.folder / "found" / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("extra", PROMISED)
def test_an_extra_brings_what_it_promises(wheel: Path, tmp_path: Path, extra: str) -> None:
    done = BareEnvironment(tmp_path / "env", wheel, (extra,)).run("-c", PROMISED[extra])
    assert done.returncode == 0, done.stderr


def test_the_readmes_install_line_runs_the_whole_readme(usual: BareEnvironment) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    done = usual.run("-c", code)
    assert done.returncode == 0, done.stderr
