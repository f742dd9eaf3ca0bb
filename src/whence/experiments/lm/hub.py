"""A text from a data set of the Hugging Face hub, or from a folder of files, through `datasets`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whence.checks import require

PREFIX = "hub:"
TRAIN, VALID = "train", "validation"  # datasets itself reads valid, val and dev as the second
WAY = "It is hub:NAME or hub:NAME:CONFIG, for example hub:Salesforce/wikitext:wikitext-2-raw-v1."


def is_dataset(name: str) -> bool:
    """Whether this is for `datasets`: a folder, or a name of the hub that is no file here."""
    path = Path(name)
    return path.is_dir() or (name.startswith(PREFIX) and not path.exists())


def split_texts(name: str, column: str) -> tuple[str, str | None]:
    """Training text, and validation text where the data set has a split for it.

    Rows follow each other, each with an end of line where it has none. A data set of one split is
    taken for training whatever the split is called; a test split is never read.
    """
    found = _loaded(name)
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
    found = _loaded(name)
    splits = list(found)
    require(
        VALID in splits or len(splits) == 1,
        f"{name} has no split {VALID!r}, it has {', '.join(splits)}. Give a text file as --valid.",
    )
    return _text(found[VALID if VALID in splits else splits[0]], column, name)


def _loaded(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{name} is a data set, which needs datasets: pip install 'whence[hf]'", name="datasets"
        ) from error
    if Path(name).is_dir():
        where: tuple[str, ...] = (str(Path(name).resolve()),)
    else:
        where = tuple(name.removeprefix(PREFIX).split(":"))
        require(len(where) <= 2 and all(where), f"{name!r} names no data set. {WAY}")
    with _without_bars(datasets):
        try:
            return datasets.load_dataset(*where)
        except datasets.exceptions.DatasetNotFoundError:
            raise ValueError(
                f"there is no data set {where[0]} on the hub, or it is not public. {WAY}"
            ) from None
        except ConnectionError as error:
            raise ConnectionError(
                f"the hub cannot be reached for {where[0]}, and it is not in the cache here "
                f"({_first_line(error)}). Give a text file or a folder as --data."
            ) from None
        except (
            datasets.exceptions.DatasetsError,
            FileNotFoundError,  # an empty folder
            ValueError,
            RuntimeError,
        ) as error:
            raise ValueError(f"datasets cannot load {name}: {_first_line(error)}") from error


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


def _first_line(error: Exception) -> str:
    """Of what datasets says; the error that it wraps says more."""
    lines = str(error.__cause__ or error).splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _without_bars(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
