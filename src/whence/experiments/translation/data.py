"""The data of a translation experiment: read, put into tokens, and its folder claimed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from whence.analysis.json_result import Result
from whence.checks import require
from whence.experiments.folder import Experiment, check_claim, claim, load_result
from whence.experiments.processes import check_gpus, join_processes, named_device
from whence.experiments.translation.batches import Rows, rows_of
from whence.experiments.translation.bpe import Bpe, trained_bpe
from whence.experiments.translation.config import TranslationConfig
from whence.experiments.translation.model import new_model
from whence.experiments.translation.scoring import metrics
from whence.experiments.translation.text import Pairs, ParallelText, read_parallel
from whence.files import write_bytes

TOKENIZER, TOKENS = "tokenizer.json", "tokens.safetensors"
COMMAND = "whence translate"
SHORTEST = 4  # a joined row has at least a 4th of the longest's tokens, drawn anew for each


@dataclass(frozen=True, eq=False)
class StoredBpe(Result):
    """A tokenizer in a file."""

    tokenizer: str  # the JSON of the tokenizers library


@dataclass(frozen=True, eq=False)
class TranslationData:
    """Training rows in tokens, all texts, and the tokenizer."""

    source: Rows
    target: Rows
    text: ParallelText
    bpe: Bpe
    sha256: str
    left_out: int  # pairs that are longer than the configuration allows

    def facts(self) -> dict[str, Any]:
        """For the results."""
        n_pairs = {"train": len(self.text.train), "valid": len(self.text.valid)}
        return {
            "sha256": self.sha256,
            "pairs": n_pairs | {name: len(pairs) for name, pairs in self.text.tests.items()},
            "vocabulary": self.bpe.vocab_size,
            "rows": len(self.source),
            "left_out": self.left_out,
            "source_tokens": len(self.source.ids),
            "target_tokens": len(self.target.ids),
            "longest_row": int(max(self.source.lengths.max(), self.target.lengths.max())),
        }


def prepared(config: TranslationConfig, out: Path) -> TranslationData:
    """The data, and the folder made ready for it; of several processes the first one writes."""
    device = named_device(config.device)
    check_gpus(device)
    join_processes(device)
    text = read_parallel(
        config.data,
        config.source,
        config.target,
        train=config.train,
        valid=config.valid,
        tests=config.tests,
    )
    for name, pairs in text.tests.items():
        most = max(config.test_joined, default=0)
        require(
            most <= len(pairs),
            f"test_joined must be at most the {len(pairs)} sentences of {name}, got {most}.",
        )
    sha256 = text.sha256()
    ours = Experiment(config.fixed(), sha256)
    check_claim(out, ours, command=COMMAND)
    metrics()  # refuse what would fail in a job
    for position in config.positions:
        new_model(config, position, seed=0, vocab_size=8)

    def write() -> None:
        # All is made before the first file is written: what is refused leaves none behind.
        made, rows = None, None
        if not (out / TOKENIZER).is_file():
            both = (*text.train.source, *text.train.target)
            made = StoredBpe(trained_bpe(both, config.vocab_size))
        if made is not None or _stored(out / TOKENS, sha256) is None:
            bpe = read_bpe(out) if made is None else Bpe(made.tokenizer)
            rows = encoded(config, bpe, text.train)
        if made is not None:
            made.save(out / TOKENIZER)
        if rows is not None:
            _store(out / TOKENS, sha256, *rows)

    claim(out, ours, command=COMMAND, write=write)
    stored = _stored(out / TOKENS, sha256)
    require(stored is not None, f"{out / TOKENS} is of other data: delete it.")
    assert stored is not None
    return TranslationData(*stored[:2], text, read_bpe(out), sha256, stored[2])


def read_bpe(folder: Path) -> Bpe:
    """The tokenizer in a folder."""
    way_out = "Delete it, and one is trained anew."
    return Bpe(load_result(StoredBpe, folder / TOKENIZER, way_out=way_out).tokenizer)


def encoded(config: TranslationConfig, bpe: Bpe, pairs: Pairs) -> tuple[Rows, Rows, int]:
    """Both sides in tokens, without the pairs that are too long, and how many these are."""
    sides = zip(bpe.encode(pairs.source), bpe.encode(pairs.target), strict=True)
    kept = [(a, b) for a, b in sides if max(len(a), len(b)) <= config.max_length]
    require(
        len(kept) > 0,
        f"no pair has at most max_length = {config.max_length} tokens on both sides.",
    )
    rows = list(kept)
    draw = np.random.default_rng(0)
    for _ in range(config.joined):
        rows += joined([kept[i] for i in draw.permutation(len(kept))], config.max_length, draw)
    return rows_of([a for a, _ in rows]), rows_of([b for _, b in rows]), len(pairs) - len(kept)


def joined(
    pairs: Sequence[tuple[list[int], list[int]]], longest: int, draw: np.random.Generator
) -> list[tuple[list[int], list[int]]]:
    """Pairs in their order, joined to rows of at most `longest` tokens, of even lengths by chance.

    Of a joined row only the last sentence has its END.
    """
    found: list[tuple[list[int], list[int]]] = []
    limit = 0
    for source, target in pairs:
        before = found[-1] if found else ([], [])
        together = before[0][:-1] + source, before[1][:-1] + target
        if found and max(map(len, together)) <= limit:
            found[-1] = together
        else:
            found.append((source, target))
            limit = int(draw.integers(longest // SHORTEST, longest + 1))
    return found


def _store(path: Path, sha256: str, source: Rows, target: Rows, left_out: int) -> None:
    tensors = {
        f"{side}.{name}": getattr(rows, name)
        for side, rows in (("source", source), ("target", target))
        for name in ("ids", "starts")
    }
    write_bytes(path, save(tensors, {"sha256": sha256, "left_out": str(left_out)}))


def _stored(path: Path, sha256: str) -> tuple[Rows, Rows, int] | None:
    """What the file holds of this data, or None."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            if facts.get("sha256") != sha256:
                return None
            source, target = (
                Rows(file.get_tensor(f"{side}.ids"), file.get_tensor(f"{side}.starts"))
                for side in ("source", "target")
            )
    except SafetensorError:
        return None
    return source, target, int(facts["left_out"])
