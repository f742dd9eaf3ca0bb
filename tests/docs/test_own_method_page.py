"""docs/own_method.md as a newcomer takes it: the module saved as a file, then what uses it."""

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own_method.md"


def test_the_module_of_the_page_works_as_the_page_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (module,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_module.py").write_text(module, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    used = re.findall(r"^```py\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, re.DOTALL | re.M)
    assert [bool(said) for _, said in used] == [True, False]
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for code, said in used:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, PAGE.name, "exec"), names)
            assert printed.getvalue() == said
    finally:
        sys.modules.pop("my_module", None)
