"""Reports of experiments without their figures, which are most of the time of a run that is done."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from whence.report import experiment_report


@contextmanager
def undrawn() -> Iterator[None]:
    """Page, tables and results are written as ever."""
    write = experiment_report._write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            experiment_report,
            "_write",
            lambda out, texts, drawings, formats: write(out, texts, (), formats),
        )
        yield
