"""Files and folders appear whole or not at all: on errors, full disks and planted links."""

import ast
import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from whence import files
from whence.files import (
    add_to_folder,
    open_log,
    replace_file,
    replace_folder,
    write_bytes,
    write_json,
    write_text,
)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_bytes_text_and_json_are_written_into_a_folder_that_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert write_bytes(folder / "x.bin", b"\0\r\n").read_bytes() == b"\0\r\n"
    assert write_text(folder / "x.txt", "Länge\r\n").read_bytes() == "Länge\r\n".encode()
    path = write_json(folder / "x.json", {"n": [1, 2]})
    assert json.loads(path.read_text()) == {"n": [1, 2]}
    assert path.read_text().endswith("}\n")
    assert sorted(x.name for x in folder.iterdir()) == ["x.bin", "x.json", "x.txt"]


def test_a_link_planted_at_the_temporary_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = tmp_path / "result.json"
    path.write_text("old")
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "guessed")
    planted = tmp_path / ".result.json.guessed.tmp"
    planted.symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_text(path, "new")
    assert victim.read_text() == "mine"
    assert path.read_text() == "old"
    assert planted.is_symlink()  # it is not ours to remove


def test_links_planted_at_names_of_the_former_kind_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = tmp_path / "result.json"
    for name in (f"result.{os.getpid()}.tmp", "result.tmp", ".result.json.tmp"):
        (tmp_path / name).symlink_to(victim)
    write_json(path, 1)
    assert victim.read_text() == "mine"
    assert path.read_text() == "1\n"


def test_a_link_at_the_path_itself_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "result.json"
    victim.write_text("mine")
    path.symlink_to(victim)
    write_text(path, "new")
    assert victim.read_text() == "mine"
    assert not path.is_symlink()
    assert path.read_text() == "new"


def test_an_error_in_the_block_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "result.bin"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with replace_file(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    monkeypatch.setattr(files.os, step, full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"n": 1})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_replaced_file_keeps_its_mode_and_a_new_one_gets_what_the_umask_leaves(
    tmp_path: Path,
) -> None:
    path = tmp_path / "private"
    path.write_text("old")
    path.chmod(0o640)
    before = os.umask(0o077)
    try:
        write_text(path, "new")
        fresh = write_text(tmp_path / "fresh", "new")
    finally:
        os.umask(before)
    assert mode(path) == 0o640
    assert mode(fresh) == 0o600


def test_a_file_that_only_its_owner_reads_is_never_open_to_others(tmp_path: Path) -> None:
    path = tmp_path / "private"
    path.write_text("old")
    path.chmod(0o600)
    with replace_file(path) as file:
        file.write(b"secret")
        (temporary,) = (x for x in tmp_path.iterdir() if x != path)
        assert mode(temporary) == 0o600


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "stale").touch()
    with replace_folder(folder) as new:
        (new / "weights").write_text("new")
        assert (folder / "stale").exists()
    assert [x.name for x in folder.iterdir()] == ["weights"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("context", [replace_folder, add_to_folder])
def test_an_error_leaves_the_old_folder_as_it_was(tmp_path: Path, context: Any) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "kept").write_text("old")

    def interrupted() -> None:
        with context(folder) as new:
            (new / "kept").write_text("half")
            full()

    with pytest.raises(OSError, match="No space"):
        interrupted()
    assert (folder / "kept").read_text() == "old"
    assert list(tmp_path.iterdir()) == [folder]


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "kept").write_text("old")
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name == "new":
            full()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="No space"), replace_folder(folder) as new:
        (new / "kept").write_text("new")
    assert (folder / "kept").read_text() == "old"
    assert list(tmp_path.iterdir()) == [folder]


def test_the_old_folder_is_not_removed_if_it_cannot_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "kept").write_text("old")
    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda path, to: rename(path, to) if path == folder else full()
    )
    with pytest.raises(OSError, match="No space"), replace_folder(folder) as new:
        (new / "kept").write_text("new")
    assert [x.read_text() for x in tmp_path.rglob("kept")] == ["old"]


def test_files_are_added_to_a_folder_and_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (folder / "figures").mkdir(parents=True)
    (folder / "notes").write_text("mine")
    (folder / "page").write_text("old")
    (folder / "page").chmod(0o640)
    with add_to_folder(folder) as new:
        (new / "figures").mkdir()
        (new / "figures" / "a.png").write_text("a")
        (new / "page").write_text("new")
    found = {str(x.relative_to(folder)): x.read_text() for x in folder.rglob("*") if x.is_file()}
    assert found == {"notes": "mine", "page": "new", "figures/a.png": "a"}
    assert mode(folder / "page") == 0o640
    assert list(tmp_path.iterdir()) == [folder]


def test_a_log_does_not_follow_a_link_and_begins_anew(tmp_path: Path) -> None:
    log, secret = tmp_path / "logs" / "0.txt", tmp_path / "secret"
    for text in (b"a long first line", b"second"):
        handle = open_log(log)
        os.write(handle, text)
        os.close(handle)
    assert log.read_bytes() == b"second"
    secret.write_text("as it was")
    log.unlink()
    log.symlink_to(secret)
    with pytest.raises(OSError, match=r"symbolic links"):
        open_log(log)
    assert secret.read_text() == "as it was"


WRITES = {"write_text", "write_bytes", "touch", "rename", "symlink_to", "hardlink_to"}
TEMPORARY = {"mkstemp", "mkdtemp", "NamedTemporaryFile", "mktemp"}
WRITERS = {("torch", "save"), ("np", "save"), ("np", "savez"), ("json", "dump"), ("shutil", "move")}
# The kernel's own files.
ALLOWED = {
    ("experiments/memory.py", "write_text"),
    ("bench/peak_memory.py", "write_text"),
}


def written_by_hand(source: str) -> list[str]:
    """The calls in a module that write a file under its own name."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        words = [x.value for x in given if isinstance(x, ast.Constant) and isinstance(x.value, str)]
        name, owner = None, None
        if isinstance(call.func, ast.Name):
            name = call.func.id
        elif isinstance(call.func, ast.Attribute):
            name = call.func.attr
            owner = call.func.value.id if isinstance(call.func.value, ast.Name) else "something"
        opens = name == "open" and any(
            re.fullmatch(r"[rwaxbt+]*[wax+][rwaxbt+]*", w) for w in words
        )
        if opens or (owner and name in WRITES) or name in TEMPORARY or (owner, name) in WRITERS:
            found.append(str(name))
    return found


def test_nothing_but_this_module_writes_files() -> None:
    assert written_by_hand("path.open('w'); open(path, mode='ab'); path.open('rb')") == ["open"] * 2
    assert written_by_hand("path.write_text(x); write_text(path, x)") == ["write_text"]
    assert written_by_hand("torch.save(x, path); tempfile.mkdtemp()") == ["save", "mkdtemp"]
    package = Path(files.__file__).parent
    found = {
        (path.relative_to(package).as_posix(), call)
        for path in sorted(package.rglob("*.py"))
        if path.name != "files.py"
        for call in written_by_hand(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED
