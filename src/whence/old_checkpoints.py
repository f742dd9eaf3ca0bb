"""Checkpoints of earlier versions, which hold numbers in the units of the formula.

`load_state_dict` converts them by itself (`PositionMethod`). `from_pretrained` of transformers goes
its own way, and leaves what it does not find by name: that is filled in here.
"""

import logging
from pathlib import Path
from typing import Any

from torch import nn

from whence.checks import require
from whence.method import PositionMethod

# Options of from_pretrained that say where a checkpoint is.
HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def convert_former(model: nn.Module, info: dict[str, Any], path: str | Path, **hub: Any) -> None:
    """Fill methods whose weights are missing from numbers under their former names.

    `info` is what from_pretrained says of its loading, and is told of what was found here; `hub` is
    what it was told of where the checkpoint is.
    """
    lacking = info["missing_keys"]
    methods = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, PositionMethod)
        and any(f"{name}.{each}" in lacking for each in module.former_names.values())
    }
    if not methods:
        return
    stored = _CheckpointTensors(path, str(getattr(model, "base_model_prefix", "")), hub)
    converted = False
    for name, method in methods.items():
        values = {each: stored.tensor(f"{name}.{each}") for each in method.former_names}
        missing = [each for each, value in values.items() if value is None]
        if len(missing) == len(values):
            continue
        require(
            not missing,
            f"the checkpoint {path} has numbers of {name} as an earlier version of whence wrote "
            f"them, but lacks {', '.join(missing)}.",
        )
        for each, value in values.items():
            setattr(method, each, value)
        lacking -= {f"{name}.{each}" for each in method.former_names.values()}
        info["unexpected_keys"] -= {stored.key(f"{name}.{each}") for each in values}
        converted = True
    if converted:
        logging.getLogger(__name__).warning(
            "%s holds numbers of its method in the units of an earlier version of whence. They "
            "were converted, and are not missing as the report above says.",
            path,
        )


class _CheckpointTensors:
    """The tensors of a checkpoint by name, with or without the prefix of the base model."""

    def __init__(self, path: str | Path, prefix: str, hub: dict[str, Any]) -> None:
        from safetensors import safe_open  # an extra, as what calls this is

        self.prefix = f"{prefix}."
        files: list[Any] = [safe_open(file, framework="pt") for file in _files(path, hub)]
        self.file = {self._plain(key): (file, key) for file in files for key in file.keys()}  # noqa: SIM118

    def tensor(self, name: str) -> Any:
        """The tensor of this name, or None."""
        file, key = self.file.get(self._plain(name), (None, ""))
        return None if file is None else file.get_tensor(key)

    def key(self, name: str) -> str:
        """The name as the file has it."""
        return str(self.file[self._plain(name)][1])

    def _plain(self, key: str) -> str:
        return key.removeprefix(self.prefix)


def _files(path: str | Path, hub: dict[str, Any]) -> list[Path]:
    """The safetensors files of a folder, or of a model that transformers has just loaded."""
    folder = Path(path) / str(hub.get("subfolder") or "")
    if not folder.is_dir():
        from transformers.utils import cached_file

        known = {key: value for key, value in hub.items() if value is not None}
        names = ("model.safetensors", "model.safetensors.index.json")
        options = {
            **known,
            "local_files_only": True,
            "_raise_exceptions_for_missing_entries": False,
        }
        at = next((x for name in names if (x := cached_file(path, name, **options))), None)
        folder = folder if at is None else Path(at).parent
    return sorted(folder.glob("*.safetensors"))
