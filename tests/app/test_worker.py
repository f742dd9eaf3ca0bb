"""The process that computes for the page is replaced when it dies."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from whence.app.settings import Settings
from whence.app.worker import RefusedError, Worker


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(Settings(tmp_path, tmp_path))
    yield worker
    worker.stop()


def test_a_process_that_died_between_two_calls_is_replaced_without_a_word(worker: Worker) -> None:
    names = worker.call("method_names")
    first = worker._process
    assert first is not None
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    with patch.object(first, "is_alive", lambda: True):  # as it is for a moment
        assert worker.call("method_names") == names
    assert worker._process is not first


SHOWN = {"n_heads": 2, "head": 1, "n": 8, "causal": False, "moved": {}}
DYING = """
import os
from whence import PositionMethod

class Dying(PositionMethod):
    def __init__(self, n_heads: int) -> None:
        open("asked", "a").write("once ")
        os._exit(1)
"""


def test_a_call_that_ends_the_process_is_refused_and_not_made_again(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dying.py").write_text(DYING)
    worker.settings = replace(worker.settings, methods=("dying:Dying",))
    with pytest.raises(RefusedError, match="ended by itself"):
        worker.call("method", spec="dying:Dying", sentence="some words", **SHOWN)
    assert (tmp_path / "asked").read_text() == "once "
    assert "dying:Dying" in worker.call("method_names")
