"""What tests of commands share."""

from collections.abc import Iterator

import pytest

from undrawn import undrawn


@pytest.fixture
def _undrawn() -> Iterator[None]:
    with undrawn():
        yield
