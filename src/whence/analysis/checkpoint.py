"""A model's files, read tensor by tensor: the model itself is never built."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from whence.analysis.json_result import read_json
from whence.checks import require
from whence.extras import install
from whence.files import from_home

Doubles = np.ndarray[Any, np.dtype[np.float64]]
Progress = Callable[[str, float], None]  # what is being done, and the share of all that is done

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
FILES = ("*.json", "*.txt", "*.model", "model*.safetensors")  # what is fetched from the hub


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The weights of a folder: `names` says in which file each tensor lies."""

    name: str  # as the caller gave it
    folder: Path
    config: dict[str, Any]
    names: dict[str, Path]

    def tensor(self, name: str) -> Doubles:
        """One tensor in float64; NaN or infinity in it is an error."""
        path = self.names[name]
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt") as file:
                    found = file.get_tensor(name)
            else:
                found = _unpickled(path)[name]
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}.") from None
        values: Doubles = found.to(torch.float64).numpy()
        bad = int((~np.isfinite(values)).sum())
        require(
            bad == 0,
            f"{name} in {path} has NaN or infinity in {bad} of {values.size} numbers: "
            "the training diverged or the file is damaged. Take another checkpoint.",
        )
        return values

    def find(self, name: str) -> str | None:
        """The stored name of a tensor, with or without the prefix of a model with a head.

        Two that end alike (two towers) are an error: which one is meant cannot be known.
        """
        if name in self.names:
            return name
        found = [stored for stored in self.names if stored.endswith("." + name)]
        require(
            len(found) < 2,
            f"{self.name} has {len(found)} tensors that end in {name}: {', '.join(found[:3])}. "
            "Save the part to inspect as a model of its own.",
        )
        return found[0] if found else None

    def sha256(self, progress: Progress | None = None) -> str:
        """Of the weights' file; of all files one after the other, in order of name, for shards."""
        digest, done = hashlib.sha256(), 0
        paths = sorted(set(self.names.values()))
        total = sum(path.stat().st_size for path in paths)
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while block := file.read(1 << 24):
                    digest.update(block)
                    done += len(block)
                    if progress is not None:
                        progress("SHA-256 of the weights", done / total)
        return digest.hexdigest()


def open_checkpoint(name_or_folder: str | Path, *, allow_pickle: bool = False) -> Checkpoint:
    """The checkpoint in a folder, or of that name on the hub: from its cache, else fetched.

    Pickled weights can run code when they are read. They are refused unless `allow_pickle`, and
    then read by torch's loader of plain tensors alone.
    """
    name = str(name_or_folder)
    folder = from_home(name)
    require(
        not folder.is_file(),
        f"{name} is a file, and a model is the folder with its config.json and model.safetensors.",
    )
    if not folder.is_dir():
        folder = _from_hub(name, allow_pickle)
    path = folder / "config.json"
    require(
        path.is_file(),
        f"{name} has no config.json, so its family is not known. Save the model with "
        "save_pretrained, or give the folder that holds config.json and model.safetensors.",
    )
    config = read_json(path)
    require(isinstance(config, dict), f"{path} holds no JSON object.")
    return Checkpoint(name, folder, config, _names(folder, name, allow_pickle))


def _names(folder: Path, name: str, allow_pickle: bool) -> dict[str, Path]:
    """Every tensor with its file."""
    pickled = (folder / PICKLED).is_file() or (folder / f"{PICKLED}.index.json").is_file()
    for stem in (SAFE, PICKLED) if allow_pickle else (SAFE,):
        if (folder / stem).is_file():
            return dict.fromkeys(sorted(_names_in(folder / stem)), folder / stem)
        index = folder / f"{stem}.index.json"
        if index.is_file():
            return _sharded(index, allow_pickle)
    require(
        not pickled,
        f"{name} has pickled weights alone ({PICKLED}), and a pickle can run code when read. "
        "Convert them to safetensors, or pass allow_pickle=True (--allow-pickle) if you trust "
        "their author.",
    )
    raise ValueError(f"{name} has no weights: there is no {SAFE} and no {SAFE}.index.json in it.")


def _sharded(index: Path, allow_pickle: bool) -> dict[str, Path]:
    try:
        shard_of = read_json(index)["weight_map"]
        names = {name: index.parent / Path(shard).name for name, shard in shard_of.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of shards: {error!r}.") from None
    require(bool(names), f"{index} names no tensors.")
    for path in sorted(set(names.values())):
        require(path.is_file(), f"{index} names {path.name}, which is not there.")
        require(
            allow_pickle or path.suffix == ".safetensors",
            f"{index} names {path.name}, which is no safetensors file, and a pickle can run code "
            "when read. Convert it to safetensors, or pass allow_pickle=True (--allow-pickle) if "
            "you trust its author.",
        )
        missing = {name for name, shard in names.items() if shard == path} - _names_in(path)
        require(not missing, f"{path} should hold {', '.join(sorted(missing)[:3])} and does not.")
    return names


def _names_in(path: Path) -> set[str]:
    if path.suffix != ".safetensors":
        return set(_unpickled(path))
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}.") from None


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # it raises whatever the damaged file makes it trip over
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} could not be read as plain tensors: {reason}") from None
    require(isinstance(weights, dict), f"{path} holds no dictionary of tensors.")
    return {name: x for name, x in weights.items() if isinstance(x, torch.Tensor)}


def _from_hub(name: str, allow_pickle: bool) -> Path:
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or os.sep in name[-1:]
    require(not looks_local, f"there is no folder {name}.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"there is no folder {name} here, and without huggingface_hub no model of that name "
            f"can be found: {install('hf')}."
        ) from None
    patterns = [*FILES, "pytorch_model*"] if allow_pickle else list(FILES)
    try:
        cached = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        if any(cached.glob("*.safetensors*")) or (allow_pickle and any(cached.glob("*.bin"))):
            return cached
    except Exception:  # not in the cache: the hub itself is asked
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # many kinds: no network, no such model, a gate, a bad name
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"there is no folder {name} here and no model of that name in the hub's cache, and it "
            f"could not be fetched ({type(error).__name__}: {reason}). Give a local folder, or "
            "connect to the network."
        ) from None
