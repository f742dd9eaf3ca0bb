"""The README: its example runs, its tables are up to date, its picture is there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT
    )


def test_the_example_runs_as_it_stands_and_prints_what_it_says() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = run("-c", example)
    assert done.returncode == 0, done.stderr
    said = re.search(r"# (torch\.Size.*)", example)
    assert said is not None
    assert done.stdout.startswith(said[1])


def test_the_tables_are_up_to_date() -> None:
    done = run("docs/make_tables.py", "--check")
    assert done.returncode == 0, done.stderr


def test_every_linked_file_is_there() -> None:
    for link in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / link).exists(), link
