"""A corpus of Python source for language models, made of the packages that are installed here.

    python benchmarks/python_source.py --out DIR [--constraints constraints.txt] [--allow-missing]

The packages are those that constraints.txt pins, in exactly these versions, so that anyone can make
the same text with pip. DIR/valid.txt has packages that are not in DIR/train.txt: first those whose
loss is reported, then those on which learning rates are chosen. DIR/manifest.json says what is in
each part. The same installed packages give the same bytes.
"""

import argparse
import hashlib
import json
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

REPORT = ("huggingface-hub", "hypothesis", "networkx", "pydantic", "werkzeug")
CHOOSE = ("fsspec", "jinja2", "rich")
TRAIN_CAP = 5_500_000  # bytes of one package: nine have more, and would be most of the text
VALID_CAP = 600_000
LARGEST = 256 * 1024  # bytes of a file; larger ones are mostly tables
LONGEST = 1000  # characters of a line
# Copies of other packages, code written by programs, and tables of characters.
SKIPPED = re.compile(
    r"vendor|third_?party|generated|_pb2|plotly/(graph_objs|validators)/|_unicode_data|_emoji_codes"
)
PIN = re.compile(r"([\w.-]+)==([^\s;]+)")


@dataclass(frozen=True)
class Source:
    """One file of a package; `path` is the one in the package's RECORD."""

    package: str
    path: str
    text: str

    @property
    def size(self) -> int:
        """Bytes in UTF-8."""
        return len(self.text.encode())


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_pins(constraints: Path) -> dict[str, str]:
    """Package -> version."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    return {pin[1]: pin[2] for pin in map(PIN.match, lines) if pin}


def missing(pins: dict[str, str]) -> dict[str, str]:
    """Package -> what is wrong with it. A local version such as 2.13.0+cpu is the pinned 2.13.0."""
    wrong = {}
    for package, pinned in pins.items():
        try:
            found = distribution(package).version
        except PackageNotFoundError:
            wrong[package] = f"{pinned} is not installed"
            continue
        if pinned not in (found, found.partition("+")[0]):
            wrong[package] = f"{found} is installed, not {pinned}"
    return wrong


def readable(package: str) -> Iterable[Source]:
    """The package's Python files in the order of their paths, without those that teach nothing."""
    installed = distribution(package)
    for file in sorted(installed.files or [], key=str):
        path = file.as_posix()
        if file.suffix != ".py" or ".." in file.parts or SKIPPED.search(path):
            continue
        try:
            text = Path(str(installed.locate_file(file))).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        source = Source(package, path, text.strip("\n"))
        if text.strip() and source.size <= LARGEST and max(map(len, text.split("\n"))) <= LONGEST:
            yield source


def unseen(sources: Iterable[Source], seen: set[str]) -> list[Source]:
    """Those whose text, white space aside, is not in `seen`; their digests are there afterwards."""
    new = []
    for source in sources:
        digest = sha256("".join(source.text.split()))
        if digest not in seen:
            seen.add(digest)
            new.append(source)
    return new


def spread(sources: list[Source], cap: int) -> list[Source]:
    """About `cap` bytes of files at even distances, so that every folder of a package has some."""
    stride = max(1.0, sum(source.size for source in sources) / cap)
    return [sources[int(i * stride)] for i in range(int(len(sources) / stride))]


def part(packages: Iterable[str], cap: int, seen: set[str]) -> list[Source]:
    """Files of all packages, in the order of the hashes of their paths, which mixes them."""
    taken: list[Source] = []
    for package in sorted(packages):
        taken += spread(unseen(readable(package), seen), cap)
    return sorted(taken, key=lambda source: sha256(source.path))


def joined(sources: Iterable[Source]) -> str:
    return "\n".join(f"# file: {source.path}\n{source.text}\n" for source in sources)


def summary(sources: list[Source]) -> dict[str, Any]:
    sizes: dict[str, list[int]] = {}
    for source in sorted(sources, key=lambda source: source.package):
        sizes.setdefault(source.package, []).append(source.size)
    packages = {
        name: {"version": distribution(name).version, "files": len(own), "bytes": sum(own)}
        for name, own in sizes.items()
    }
    return {"files": len(sources), "bytes": sum(map(sum, sizes.values())), "packages": packages}


def build(
    out: Path,
    pins: dict[str, str],
    *,
    report: Iterable[str] = REPORT,
    choose: Iterable[str] = CHOOSE,
    train_cap: int = TRAIN_CAP,
    valid_cap: int = VALID_CAP,
    allow_missing: bool = False,
) -> dict[str, Any]:
    """Writes the three files and returns the manifest."""
    wrong = missing(pins)
    if wrong and not allow_missing:
        rows = "\n".join(f"  {package}: {what}" for package, what in wrong.items())
        raise ValueError(
            f"these packages are not as pinned:\n{rows}\n"
            "Install them with pip install -c, or leave them out with --allow-missing."
        )
    if unpinned := {*report, *choose} - pins.keys():
        raise ValueError(f"no version is pinned of the validation packages {sorted(unpinned)}.")
    usable = pins.keys() - wrong.keys()
    seen: set[str] = set()  # validation comes first: what it has, training must not have
    parts = {
        "report": part(usable & {*report}, valid_cap, seen),
        "choose": part(usable & {*choose}, valid_cap, seen),
        "train": part(usable - {*report, *choose}, train_cap, seen),
    }
    manifest: dict[str, Any] = {
        "python": platform.python_version(),
        "missing": wrong,
        "parts": {name: summary(sources) for name, sources in parts.items()},
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, sources in (("train", parts["train"]), ("valid", parts["report"] + parts["choose"])):
        text = joined(sources)
        manifest[f"{name}.txt"] = {"characters": len(text), "sha256": sha256(text)}
        (out / f"{name}.txt").write_text(text, encoding="utf-8", newline="\n")
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--constraints", type=Path, default=Path("constraints.txt"))
    parser.add_argument("--allow-missing", action="store_true", help="Leave such packages out.")
    given = parser.parse_args()
    manifest = build(given.out, read_pins(given.constraints), allow_missing=given.allow_missing)
    for name, content in manifest["parts"].items():
        print(f"{name}: {content['files']} files, {content['bytes'] / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
