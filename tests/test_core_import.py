"""The core needs torch and jaxtyping alone: here every other dependency is blocked."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BLOCKED_THEN = '''
import socket, sys, time

BLOCKED = set({blocked!r})

class Hiding:
    """A finder that does not see what is blocked; jaxtyping only asks whether NumPy is there."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]

def refuse(*_):
    raise AssertionError("a network connection was made")

socket.socket.connect = socket.socket.connect_ex = socket.create_connection = refuse
import torch
{code}
'''


def extras() -> set[str]:
    """Every package of every extra, by its import name, and NumPy, which torch can do without."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [text for extra in project["optional-dependencies"].values() for text in extra]
    names = {re.split(r"[\[<>=!~;, ]", text)[0].replace("-", "_") for text in wanted}
    assert {"typer", "transformers", "torchdiffeq", "matplotlib"} <= names
    return (names | {"numpy"}) - {"whence"}


def run_blocked(code: str) -> subprocess.CompletedProcess[str]:
    script = BLOCKED_THEN.format(blocked=sorted(extras()), code=code)
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_core_imports_and_runs_with_torch_and_jaxtyping_alone() -> None:
    done = run_blocked(
        """
import whence, whence.nn
position = whence.build("tisa:kernels=3", n_heads=2, d_head=4)
q, k, v = torch.randn(3, 1, 2, 5, 4)
out = whence.nn.positioned_attention(position, q, k, v)
out.sum().backward()
assert out.shape == (1, 2, 5, 4) and position.raw_amplitude.grad is not None
print(whence.explain(q, k, v).chosen)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("fused", "sdpa", "reference")


def test_every_method_that_needs_an_extra_says_which() -> None:
    done = run_blocked(
        """
from whence import METHODS, build
for name in METHODS:
    try:
        method = build(name, n_heads=2, d_head=4, max_length=8)
        pos, heads = torch.arange(8), torch.ones(1, 2, 8, 4)
        method.query_heads(heads, pos), method.input_term(pos)
    except ImportError as error:
        print(name, error)
"""
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["floater"]
    assert "pip install 'whence[flow]'" in lines[0]


def test_whence_hf_without_transformers_says_which_extra_it_needs() -> None:
    done = run_blocked("import whence\ntry:\n    whence.hf\nexcept ImportError as e:\n    print(e)")
    assert done.returncode == 0, done.stderr
    assert "pip install 'whence[hf]'" in done.stdout


def test_the_command_line_without_its_extra_says_so_in_one_line() -> None:
    done = run_blocked("import whence.cli\nwhence.cli.main()")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'whence[cli]'" in done.stderr


def test_importing_takes_little_longer_than_importing_torch() -> None:
    done = run_blocked(
        "start = time.perf_counter()\nimport whence, whence.nn\nprint(time.perf_counter() - start)\n"
        "assert 'torch._dynamo' not in sys.modules  # the compiler takes longer than all of torch"
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 10.0  # about 0.3 s on an idle machine; this one may be busy


def test_whence_itself_imports_no_torch_and_has_all_its_names() -> None:
    code = (
        "import sys, whence; assert 'torch' not in sys.modules; "
        "assert set(whence.__all__) <= set(dir(whence)); "
        "print(whence.methods.METHODS is whence.METHODS, whence.attend.__module__)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.stdout, done.returncode) == ("True whence.kernels.attend\n", 0), done.stderr
