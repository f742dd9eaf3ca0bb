"""The corpus of installed packages: split by package, no text twice, the same bytes each time."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from python_source import LARGEST, build, read_pins

PINS = {"alpha": "1.0", "beta": "2.0", "gamma": "3.0", "delta": "4.0"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages: alpha and beta to train on, gamma and delta to test on."""
    folder = tmp_path / "site"
    for name, version in PINS.items():
        install(folder, name, version, {f"{name}/m{i}.py": f"{name} = {i}\n" for i in range(4)})
    monkeypatch.syspath_prepend(str(folder))
    return folder


def install(folder: Path, name: str, version: str, files: dict[str, str | bytes]) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())


def built(out: Path, pins: dict[str, str] = PINS, **options: Any) -> tuple[str, str, Any]:
    """(training text, validation text, manifest) as they are in the folder."""
    build(out, pins, report=["gamma"], choose=["delta"], **options)
    manifest = json.loads((out / "manifest.json").read_text())
    return (out / "train.txt").read_text(), (out / "valid.txt").read_text(), manifest


def paths(text: str) -> list[str]:
    return [line[8:] for line in text.split("\n") if line.startswith("# file: ")]


def test_each_package_is_in_one_part_and_packages_to_choose_on_come_last(site, tmp_path) -> None:
    train, valid, manifest = built(tmp_path / "out")
    assert {path.split("/")[0] for path in paths(train)} == {"alpha", "beta"}
    assert [path.split("/")[0] for path in paths(valid)] == ["gamma"] * 4 + ["delta"] * 4
    assert manifest["parts"]["train"]["packages"]["alpha"] == {
        "version": "1.0",
        "files": 4,
        "bytes": 4 * len("alpha = 0"),
    }
    for name, text in (("train.txt", train), ("valid.txt", valid)):
        digest = hashlib.sha256(text.encode()).hexdigest()
        assert manifest[name] == {"characters": len(text), "sha256": digest}


def test_a_file_follows_its_path_and_an_empty_line_divides_files(site, tmp_path) -> None:
    train, _, _ = built(tmp_path / "out")
    files = train.removesuffix("\n").split("\n\n")
    assert sorted(files)[0] == "# file: alpha/m0.py\nalpha = 0"
    assert len(files) == 8


def test_files_of_the_packages_of_a_part_are_mixed(site, tmp_path) -> None:
    train, _, _ = built(tmp_path / "out")
    order = paths(train)
    assert order == sorted(order, key=lambda path: hashlib.sha256(path.encode()).hexdigest())
    assert order != sorted(order)


def test_a_text_of_validation_or_an_earlier_file_is_not_repeated(site, tmp_path) -> None:
    files = {
        "echo/a.py": "echo = 0\n",
        "echo/b.py": "echo = 0\n",
        "echo/of_gamma.py": "\n\ngamma  =  1",
    }
    install(site, "echo", "5.0", files)
    train, _, _ = built(tmp_path / "out", {**PINS, "echo": "5.0"})
    assert [path for path in paths(train) if "echo" in path] == ["echo/a.py"]


def test_unsuitable_files_are_left_out(site, tmp_path) -> None:
    files: dict[str, str | bytes] = {
        "echo/good.py": "echo = 'é'\n",
        "echo/empty.py": " \n",
        "echo/latin.py": "echo = 'é'\n".encode("latin-1"),
        "echo/large.py": "x = 1\n" * (LARGEST // 6 + 1),
        "echo/wide.py": "x" * 1001,
        "echo/_vendor/copied.py": "y = 1\n",
        "echo/data.txt": "z = 1\n",
        "../bin/script.py": "w = 1\n",
    }
    install(site, "echo", "5.0", files)
    train, _, _ = built(tmp_path / "out", {**PINS, "echo": "5.0"})
    assert [path for path in paths(train) if path[:2] not in ("al", "be")] == ["echo/good.py"]


def test_a_large_package_gives_files_at_even_distances(site, tmp_path) -> None:
    install(site, "echo", "5.0", {f"echo/m{i:02}.py": f"echo = {i:02}\n" for i in range(40)})
    pins = {**PINS, "echo": "5.0"}
    train, _, _ = built(tmp_path / "out", pins, train_cap=10 * len("echo = 00"))
    kept = sorted(path for path in paths(train) if "echo" in path)
    assert kept == [f"echo/m{i:02}.py" for i in range(0, 40, 4)]
    assert len(paths(train)) == 10 + 4 + 4


def test_two_runs_write_the_same_bytes(site, tmp_path) -> None:
    for run in ("first", "second"):
        built(tmp_path / run)
    for name in ("train.txt", "valid.txt", "manifest.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_packages_that_are_not_as_pinned_are_named(site, tmp_path) -> None:
    pins = {**PINS, "beta": "2.1", "no-such-package": "1.0"}
    with pytest.raises(ValueError, match=r"beta: 2\.0 is installed, not 2\.1\n.*no-such-package"):
        built(tmp_path / "out", pins)
    train, _, manifest = built(tmp_path / "out", pins, allow_missing=True)
    assert manifest["missing"].keys() == {"beta", "no-such-package"}
    assert {path.split("/")[0] for path in paths(train)} == {"alpha"}


def test_a_local_version_is_the_pinned_one(site, tmp_path) -> None:
    install(site, "echo", "5.0+cpu", {"echo/a.py": "echo = 1\n"})
    train, _, _ = built(tmp_path / "out", {**PINS, "echo": "5.0"})
    assert "echo/a.py" in paths(train)


def test_a_validation_package_without_a_pin_is_an_error(site, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"validation packages \['delta'\]"):
        built(tmp_path / "out", {name: PINS[name] for name in ("alpha", "gamma")})


def test_pins_are_read_from_constraints(tmp_path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("# versions\n\nalpha==1.0\nbeta-two==2.0 ; python_version > '3'\n")
    assert read_pins(constraints) == {"alpha": "1.0", "beta-two": "2.0"}
