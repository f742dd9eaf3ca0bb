"""Parallel text: two files whose lines translate each other, or a data set of the hub."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence.checks import require
from whence.experiments.hub import PREFIX, load_splits

COLUMN = "translation"  # of data sets of the hub: {"en": ..., "de": ...} in each row


@dataclass(frozen=True)
class Pairs:
    """Sentences and their translations."""

    source: tuple[str, ...]
    target: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.source)

    def joined(self, n: int) -> "Pairs":
        """Rows of n pairs each that follow each other; what is left over at the end is left out."""
        starts = range(0, len(self) - n + 1, n)
        return Pairs(
            tuple(" ".join(self.source[i : i + n]) for i in starts),
            tuple(" ".join(self.target[i : i + n]) for i in starts),
        )


@dataclass(frozen=True)
class ParallelText:
    """Pairs to train on, to choose by and to test on."""

    train: Pairs
    valid: Pairs
    tests: dict[str, Pairs]

    def sha256(self) -> str:
        """Of all sentences, in their order."""
        digest = hashlib.sha256()
        splits = (("train", self.train), ("valid", self.valid), *self.tests.items())
        for name, pairs in splits:
            digest.update(f"{name}\n".encode())
            for side in (pairs.source, pairs.target):
                digest.update("\n".join(side).encode())
                digest.update(b"\0")
        return digest.hexdigest()


def read_parallel(
    data: str, source: str, target: str, *, train: str, valid: str, tests: tuple[str, ...]
) -> ParallelText:
    """All splits, of a folder with files SPLIT.LANGUAGE or of the hub."""
    if data.startswith(PREFIX):
        found = _of_hub(data, source, target, (train, valid, *tests))
    else:
        folder = Path(data)
        require(
            folder.is_dir(),
            f"there is no folder {folder}. It holds {train}.{source}, {train}.{target} and so on; "
            f"a data set of the hub is {PREFIX}NAME.",
        )
        check_files(folder, (source, target), (train, valid, *tests))
        found = {
            split: read_pairs(folder / f"{split}.{source}", folder / f"{split}.{target}")
            for split in (train, valid, *tests)
        }
    return ParallelText(found[train], found[valid], {name: found[name] for name in tests})


def check_files(folder: Path, languages: tuple[str, str], splits: tuple[str, ...]) -> None:
    """Refuse a folder in which a side of a split is missing."""
    missing = [
        f"{split}.{language}"
        for split in splits
        for language in languages
        if not (folder / f"{split}.{language}").is_file()
    ]
    there = sorted(path.name for path in folder.iterdir() if path.suffix and path.is_file())
    require(
        not missing,
        f"{folder} has no {missing[0] if missing else ''}; it has {', '.join(there[:12])}. Name "
        "the splits with --train, --valid and --tests, the languages with --source and --target.",
    )


def read_pairs(source: Path, target: Path) -> Pairs:
    """Two files of as many lines, none of them empty, in UTF-8."""
    sides = [list(_lines(path)) for path in (source, target)]
    counts = [len(side) for side in sides]
    require(
        counts[0] == counts[1],
        f"{source} has {counts[0]} lines and {target} has {counts[1]}: line "
        f"{min(counts) + 1} of {source if counts[0] > counts[1] else target} has no translation.",
    )
    require(counts[0] > 0, f"{source} has no lines.")
    for path, side in zip((source, target), sides, strict=True):
        empty = next((number for number, line in enumerate(side, start=1) if not line), None)
        require(
            empty is None,
            f"{path}, line {empty}: the line is empty, so one side has no translation. Leave the "
            "line out of both files.",
        )
    return Pairs(tuple(sides[0]), tuple(sides[1]))


def _lines(path: Path) -> Iterator[str]:
    """Lines without white space around them. Only a line feed ends one."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        bad = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {bad}: this is not UTF-8.") from None
    if text:
        yield from (line.strip() for line in text.removesuffix("\n").split("\n"))


def _of_hub(data: str, source: str, target: str, splits: tuple[str, ...]) -> dict[str, Pairs]:
    found = load_splits(data)
    missing = [split for split in splits if split not in found]
    require(
        not missing,
        f"{data} has no split {', '.join(missing)}, it has {', '.join(found)}. Name the splits "
        "with --train, --valid and --tests.",
    )
    return {split: _rows(found[split], source, target, f"{data}, {split}") for split in splits}


def _rows(rows: Any, source: str, target: str, where: str) -> Pairs:
    """Rows of a data set: a column of translations, or a column for each language.

    A row in which a side is empty is left out: data sets from the web have some.
    """
    if COLUMN in rows.column_names:
        sides = [[row.get(language) for row in rows[COLUMN]] for language in (source, target)]
    else:
        for language in (source, target):
            require(
                language in rows.column_names,
                f"{where}: no column {COLUMN!r} or {language!r}, there are "
                f"{', '.join(rows.column_names)}.",
            )
        sides = [list(rows[language]) for language in (source, target)]
    require(
        all(isinstance(side[0], str) for side in sides if side),
        f"{where}: the rows have no text in {source!r} and {target!r}.",
    )
    kept = [(a.strip(), b.strip()) for a, b in zip(*sides, strict=True)]
    kept = [(a, b) for a, b in kept if a and b]
    require(len(kept) > 0, f"{where}: there are no rows.")
    return Pairs(tuple(a for a, _ in kept), tuple(b for _, b in kept))
