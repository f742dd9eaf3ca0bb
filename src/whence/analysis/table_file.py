"""A bare table of position vectors in a file of its own: .npy, or .safetensors with one tensor."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from whence.analysis.results import ModelFacts
from whence.checks import require
from whence.files import from_home

Doubles = np.ndarray[Any, np.dtype[np.float64]]
SUFFIXES = (".npy", ".safetensors")


def is_table_file(name: str | Path) -> bool:
    """Whether a name is that of a file with a table, and not of a model."""
    path = from_home(name)
    return path.suffix in SUFFIXES and not path.is_dir()


def read_table(name: str | Path) -> tuple[Doubles, ModelFacts]:
    """The table in float64, row 0 being the first position, and what is known of it."""
    path = from_home(name)
    require(path.is_file(), f"there is no file {path}.")
    values = _numpy(path) if path.suffix == ".npy" else _safetensors(path)
    require(
        values.ndim == 2 and values.dtype.kind in "fiu",
        f"{path} must hold a table of numbers, one row for each position, got the shape "
        f"{list(values.shape)} of {values.dtype}.",
    )
    n, d = values.shape
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    facts = ModelFacts(str(name), "bare table", "table", 0, 0, d, 0, n, digest)
    return values.astype(np.float64), facts


def _numpy(path: Path) -> np.ndarray[Any, np.dtype[Any]]:
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"{path} is not a whole .npy file of plain numbers: {reason}.") from None
    require(isinstance(found, np.ndarray), f"{path} holds no array: save one with numpy.save.")
    values: np.ndarray[Any, np.dtype[Any]] = found
    return values


def _safetensors(path: Path) -> np.ndarray[Any, np.dtype[Any]]:
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            names = sorted(file.keys())
            require(
                len(names) == 1,
                f"{path} has {len(names)} tensors ({', '.join(names[:3])}, ...), and a bare table "
                "is a file with one. Give the folder of the model, with its config.json.",
            )
            found = file.get_tensor(names[0])
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}.") from None
    half = found.dtype in (torch.bfloat16, torch.float16)
    values: np.ndarray[Any, np.dtype[Any]] = (found.float() if half else found).numpy()
    return values
