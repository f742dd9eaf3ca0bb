"""A text from a data set of the Hugging Face hub, or from a folder of files, through `datasets`."""

from pathlib import Path
from typing import Any

from whence.checks import require
from whence.experiments.hub import PREFIX, load_splits

TRAIN, VALID = "train", "validation"  # datasets itself reads valid, val and dev as the second


def is_dataset(name: str) -> bool:
    """Whether this is for `datasets`: a folder, or a name of the hub that is no file here."""
    path = Path(name)
    return path.is_dir() or (name.startswith(PREFIX) and not path.exists())


def split_texts(name: str, column: str) -> tuple[str, str | None]:
    """Training text, and validation text where the data set has a split for it.

    Rows follow each other, each with an end of line where it has none. A data set of one split is
    taken for training whatever the split is called; a test split is never read.
    """
    found = load_splits(name)
    splits = list(found)
    if len(splits) == 1:
        return _text(found[splits[0]], column, name), None
    require(
        TRAIN in splits,
        f"{name} has no split {TRAIN!r}, it has {', '.join(splits)}: whence lm needs one, or one "
        "split alone.",
    )
    valid = _text(found[VALID], column, name) if VALID in splits else None
    return _text(found[TRAIN], column, name), valid


def validation_text(name: str, column: str) -> str:
    """The validation split, or the only one there is."""
    found = load_splits(name)
    splits = list(found)
    require(
        VALID in splits or len(splits) == 1,
        f"{name} has no split {VALID!r}, it has {', '.join(splits)}. Give a text file as --valid.",
    )
    return _text(found[VALID if VALID in splits else splits[0]], column, name)


def _text(rows: Any, column: str, name: str) -> str:
    require(
        column in rows.column_names,
        f"{name} has no column {column!r}, it has {', '.join(rows.column_names)}. Name the one "
        "with the text: --text-column.",
    )
    kind = getattr(rows.features[column], "dtype", "a list")
    require(
        kind in ("string", "large_string"),
        f"the column {column!r} of {name} holds {kind}, not text. Name another: --text-column.",
    )
    lines = (row or "" for row in rows[column])
    text = "".join(row if row.endswith("\n") else f"{row}\n" for row in lines)
    require(text.strip() != "", f"the data set {name} is empty.")
    return text
