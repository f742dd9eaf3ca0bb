"""Rows of a task in a model's tokens, made once, kept in a file and cut into batches."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import Dataset

from whence.experiments.glue.rows import Rows, TaskRows
from whence.files import write_bytes

MULTIPLE = 8  # a batch is padded to a multiple of it, as matrix units of GPUs like it
TRAIN = "train"


@dataclass(frozen=True, eq=False)
class Encoded(Dataset[dict[str, Tensor]]):
    """Sequences one after another: the i-th is ids[starts[i] : starts[i + 1]]."""

    ids: Int[Tensor, " tokens"]
    types: Int[Tensor, " tokens"] | None  # which text of a pair, where the model wants to know
    starts: Int[Tensor, " rows_and_one"]
    labels: Float[Tensor, " rows"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        here = slice(int(self.starts[index]), int(self.starts[index + 1]))
        found = {"input_ids": self.ids[here], "labels": self.labels[index]}
        return found if self.types is None else found | {"token_type_ids": self.types[here]}

    @property
    def lengths(self) -> Int[Tensor, " rows"]:
        """Tokens of each row."""
        return self.starts.diff()


@dataclass(frozen=True, eq=False)
class EncodedTask:
    """The training rows of a task and those to score on, by the name that their metrics carry."""

    train: Encoded
    dev: dict[str, Encoded]


class Padded:
    """Makes a batch of rows: padded on the right to the longest of them."""

    def __init__(self, pad: int, *, regression: bool) -> None:
        self.pad, self.dtype = pad, torch.float32 if regression else torch.int64

    def __call__(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The batch as a model takes it."""
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // MULTIPLE) * MULTIPLE
        ids = torch.full((len(rows), width), self.pad)
        mask = torch.zeros_like(ids)
        types = torch.zeros_like(ids) if "token_type_ids" in rows[0] else None
        for place, row in enumerate(rows):
            n = len(row["input_ids"])
            ids[place, :n] = row["input_ids"]
            mask[place, :n] = 1
            if types is not None:
                types[place, :n] = row["token_type_ids"]
        labels = torch.stack([row["labels"] for row in rows]).to(self.dtype)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return batch if types is None else batch | {"token_type_ids": types}


def encode(rows: Rows, tokenizer: Any, *, length: int) -> Encoded:
    """All rows in tokens, cut at `length`; of a pair the longer text is cut first."""
    second = None if rows.second is None else list(rows.second)
    found = tokenizer(list(rows.first), second, truncation=True, max_length=length)
    ids = found["input_ids"]
    types = found.get("token_type_ids")
    starts = torch.tensor([0, *map(len, ids)]).cumsum(dim=0)
    return Encoded(
        _flat(ids),
        None if types is None else _flat(types),
        starts,
        torch.tensor(rows.labels, dtype=torch.float32),
    )


def encoded_task(
    rows: TaskRows, tokenizer: Any, *, length: int, path: Path, name: str
) -> EncodedTask:
    """The rows in tokens, read from `path` where it has the ones of that name, else written."""
    stored = stored_task(path, name)
    if stored is not None:
        return stored
    train = encode(rows.train, tokenizer, length=length)
    dev = {split: encode(part, tokenizer, length=length) for split, part in rows.dev.items()}
    _store(EncodedTask(train, dev), path, name)
    return EncodedTask(train, dev)


def stored_task(path: Path, name: str) -> EncodedTask | None:
    """What `path` holds under that name; None where it holds something else or nothing."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            if facts.get("name") != name:
                return None
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError:
        return None
    splits = json.loads(facts["splits"])
    parts = [
        Encoded(
            *(tensors.get(f"{place}.{field}") for field in ("ids", "types", "starts", "labels"))  # type: ignore[arg-type]
        )
        for place in range(1 + len(splits))
    ]
    return EncodedTask(parts[0], dict(zip(splits, parts[1:], strict=True)))


def _store(task: EncodedTask, path: Path, name: str) -> None:
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    for place, part in enumerate((task.train, *task.dev.values())):
        fields = {"ids": part.ids, "types": part.types, "starts": part.starts}
        for field, tensor in (fields | {"labels": part.labels}).items():
            if tensor is not None:
                tensors[f"{place}.{field}"] = tensor
    write_bytes(path, save(tensors, {"name": name, "splits": json.dumps(list(task.dev))}))


def _flat(rows: Sequence[Sequence[int]]) -> Int[Tensor, " tokens"]:
    return torch.tensor([number for row in rows for number in row], dtype=torch.int32)
