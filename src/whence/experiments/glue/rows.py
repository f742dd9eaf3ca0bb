"""Rows of GLUE from the official TSV files; what is wrong with one is said with file and line."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from whence.checks import require
from whence.experiments.glue.tasks import HIGHEST, LOWEST, Task

FEWEST = 2  # rows of a dev set: a correlation needs two


@dataclass(frozen=True, eq=False)
class Rows:
    """Texts with their labels: the number of a class, or a score of STS-B."""

    first: tuple[str, ...]
    second: tuple[str, ...] | None  # of a pair
    labels: tuple[float, ...]
    left_out: int = 0  # official rows that break off in the middle

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class TaskRows:
    """The training rows of a task, and those to score on by the name that their metrics carry."""

    task: Task
    train: Rows
    dev: dict[str, Rows]

    @property
    def sha256(self) -> str:
        """Of all texts and labels, however they were stored."""
        digest = hashlib.sha256(self.task.name.encode())
        for rows in (self.train, *self.dev.values()):
            for column in (rows.first, rows.second or (), map(repr, rows.labels)):
                for text in column:
                    digest.update(text.encode() + b"\0")
                digest.update(b"\1")
        return digest.hexdigest()


def read_task(task: Task, folder: Path) -> TaskRows:
    """The files of a task in a folder in the official layout: FOLDER/SST-2/train.tsv and so on."""
    home = folder / task.title
    wanted = [f"{split}.tsv" for split in ("train", *(split for split, _ in task.dev))]
    missing = [name for name in wanted if not (home / name).is_file()]
    require(
        not missing,
        f"there is no {home / missing[0] if missing else ''}: {task.title} needs "
        f"{', '.join(wanted)} there. Give the folder of GLUE in the official layout as --data, or "
        "leave the task out.",
    )
    train = read_rows(task, home / "train.tsv")
    dev = {name: read_rows(task, home / f"{split}.tsv") for split, name in task.dev}
    for (split, _), found in zip(task.dev, dev.values(), strict=True):
        require(
            len(found) >= FEWEST,
            f"{home / split}.tsv holds {len(found)} rows, and a dev set needs {FEWEST} or more to "
            "be scored.",
        )
    require(len(train) > 0, f"{home / 'train.tsv'} has no rows to train on.")
    return TaskRows(task, train, dev)


def read_rows(task: Task, path: Path) -> Rows:
    """All rows of a file: columns between tabs, quotation marks as they are, UTF-8."""
    lines = _lines(path)
    if task.places is None:
        width, places = _header(task, path, lines)
    else:
        assert task.width is not None
        width, places = task.width, task.places
    texts: list[list[str]] = [[] for _ in task.columns]
    labels: list[float] = []
    left_out = 0
    for number, line in lines:
        cells = line.split("\t")
        if task.leaves_out_short_rows and len(cells) < width:
            left_out += 1
            continue
        require(
            len(cells) == width,
            f"{path}, line {number}: {len(cells)} columns between tabs, and {task.title} has "
            f"{width}.",
        )
        for column, place in zip(texts, places[:-1], strict=True):
            require(cells[place].strip() != "", f"{path}, line {number}: the text is empty.")
            column.append(cells[place])
        labels.append(_label(task, cells[places[-1]], f"{path}, line {number}"))
    first, *others = (tuple(column) for column in texts)
    return Rows(first, others[0] if others else None, tuple(labels), left_out)


def check_score(score: float, where: str) -> float:
    """A score of STS-B, which people gave from 0 to 5."""
    inside = math.isfinite(score) and LOWEST <= score <= HIGHEST
    require(inside, f"{where}: the score {score} is not between {LOWEST:g} and {HIGHEST:g}.")
    return score


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines. Only a line feed ends one: texts hold other characters that could."""
    try:
        text = path.read_bytes().decode("utf-8-sig")  # a byte-order mark is no part of a column
    except UnicodeDecodeError as error:
        bad = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {bad}: this is not UTF-8.") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.removesuffix("\r"):
            yield number, line.removesuffix("\r")


def _header(
    task: Task, path: Path, lines: Iterator[tuple[int, str]]
) -> tuple[int, tuple[int, ...]]:
    """The number of columns, and the places of texts and label."""
    number, line = next(lines, (1, ""))
    names = line.split("\t")
    wanted = (*task.columns, task.label)
    missing = [name for name in wanted if name not in names]
    require(
        not missing,
        f"{path}, line {number}: {task.title} has a line of column names with "
        f"{', '.join(map(repr, wanted))}, and this one has no {', '.join(map(repr, missing))}.",
    )
    return len(names), tuple(names.index(name) for name in wanted)


def _label(task: Task, text: str, where: str) -> float:
    if task.labels:
        known = ", ".join(task.labels)
        require(text in task.labels, f"{where}: the label {text!r} is not one of {known}.")
        return float(task.labels.index(text))
    try:
        score = float(text)
    except ValueError:
        raise ValueError(f"{where}: the score {text!r} is not a number.") from None
    return check_score(score, where)
