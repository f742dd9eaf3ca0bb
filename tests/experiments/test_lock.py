"""A folder that one run works in at a time, and that goes again if nothing came of it."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from whence.experiments.lock import LOCK, only_one


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_folder_that_was_made_for_nothing_goes_again(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), only_one(tmp_path / "a" / "b"):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_or_was_written_stays(tmp_path: Path) -> None:

    def written() -> None:
        with only_one(tmp_path / "a" / "b"):
            (tmp_path / "a" / "b" / "file").touch()
            raise ValueError("after")

    with pytest.raises(ValueError, match="after"):
        written()
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [LOCK, "file"]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="at once"), only_one(empty):
        raise ValueError("at once")
    assert list(empty.iterdir()) == []
    with only_one(empty):
        pass
    assert [path.name for path in empty.iterdir()] == [LOCK]


def test_a_run_that_waits_for_one_that_fails_has_the_folder_to_itself(tmp_path: Path) -> None:
    folder, inside, most = tmp_path / "a" / "b", [0], [0]
    waiting = threading.Event()

    def work() -> None:
        with only_one(folder, say=lambda what, share: waiting.set()):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            assert (folder / LOCK).is_file()
            time.sleep(0.05)
            inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]

    def fail() -> None:
        with only_one(folder):
            for thread in threads:
                thread.start()
            assert waiting.wait(10)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert (inside, most) == ([0], [1])


def test_a_folder_that_goes_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path.mkdir finds a folder there, looks whether it is one, and finds nothing."""
    mkdir, errors = Path.mkdir, [FileExistsError, FileNotFoundError]

    def unlucky(path: Path, *arguments: Any, **options: Any) -> None:
        if errors:
            raise errors.pop()
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", unlucky)
    with only_one(tmp_path / "a"):
        assert (tmp_path / "a" / LOCK).is_file()
    assert not errors


def test_what_is_there_and_is_no_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError), only_one(tmp_path / name):
            pass
