"""A small parallel text for `whence translate`: numbers in words, and the same words reversed."""

import random
from pathlib import Path
from typing import Any

from whence.experiments.translation.config import TranslationConfig

SOURCE = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TARGET = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
SIZES = {"train": 60, "val": 8, "test": 9}


def write_parallel(folder: Path) -> Path:
    """Files train, val and test in en and de."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, n in SIZES.items():
        rows = [[draw.randrange(10) for _ in range(draw.randint(2, 9))] for _ in range(n)]
        for language, words in (("en", SOURCE), ("de", TARGET[::-1])):
            lines = [" ".join(words[i] for i in row).capitalize() + "." for row in rows]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def tiny_translation(data: Path, **changes: Any) -> TranslationConfig:
    """A configuration that takes a second."""
    options: dict[str, Any] = {
        "positions": ("sinusoidal", "shaw:clip=2"),
        "vocab_size": 300,
        "n_layers": 1,
        "n_heads": 2,
        "d_model": 16,
        "d_ff": 16,
        "max_length": 40,
        "tokens": 256,
        "steps": 6,
        "warmup": 2,
        "average": 3,
        "average_every": 1,
        "more_tokens": 3,
        "device": "cpu",
    }
    return TranslationConfig(str(data), "en", "de", **(options | changes))
