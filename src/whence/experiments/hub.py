"""Data sets of the Hugging Face hub, or of a folder of files, through `datasets`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whence.checks import require
from whence.extras import install

PREFIX = "hub:"
WAY = "It is hub:NAME or hub:NAME:CONFIG, for example hub:Salesforce/wikitext:wikitext-2-raw-v1."


def load_splits(name: str) -> Any:
    """The splits of a folder, of hub:NAME or of hub:NAME:CONFIG, by name."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{name} is a data set, which needs datasets: {install('hf')}", name="datasets"
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
                f"({_first_line(error)}). Give files or a folder as --data."
            ) from None
        except (
            datasets.exceptions.DatasetsError,
            FileNotFoundError,  # an empty folder
            ValueError,
            RuntimeError,
        ) as error:
            raise ValueError(f"datasets cannot load {name}: {_first_line(error)}") from error


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
