"""Of a test with many cases `make test` runs some, and `make test-all` all of them.

A quarter of the cases that are drawn from seeds, and every fourth one of a test in Triton's
interpreter with more than six others.
"""

from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MANY = 6


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    listed: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        case = getattr(getattr(item, "callspec", None), "id", "")
        if HERE not in item.path.parents or not case or item.get_closest_marker("slow"):
            continue
        if case.isdigit() and int(case) % 4:
            item.add_marker(pytest.mark.slow)
        elif not case.isdigit() and item.get_closest_marker("triton"):
            listed[item.path, item.originalname].append(item)
    for cases in listed.values():
        for place, item in enumerate(cases if len(cases) > MANY else ()):
            if place % 4:
                item.add_marker(pytest.mark.slow)
