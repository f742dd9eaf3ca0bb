"""Of a test whose cases are drawn from seeds, `make test` runs a quarter; `make test-all` runs all."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        seed = getattr(getattr(item, "callspec", None), "id", "")
        if seed.isdigit() and int(seed) % 4 and HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
