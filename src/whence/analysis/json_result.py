"""A frozen result with JSON in and out: figures and pages are drawn from it, never recomputed."""

import base64
import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

import numpy as np

from whence.checks import require
from whence.files import write_text

Array = np.ndarray[Any, np.dtype[np.float32]]
R = TypeVar("R", bound="Result")  # typing.Self would stop the run-time checks of the tests


@dataclass(frozen=True, eq=False)
class Result:
    """A frozen dataclass of numbers, text, arrays and other results, that JSON can carry whole.

    Arrays go as base64 of little-endian float32 with their shape: small, and bit for bit the same
    on the way back.
    """

    def to_json(self) -> str:
        """The result as JSON text, with the name of its class."""
        return json.dumps({"kind": type(self).__name__, **_plain(self)}, indent=1)

    @classmethod
    def from_json(cls: type[R], text: str) -> R:
        """The result that `to_json` wrote; another kind, or a broken file, is an error."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is not a whole result file: {error}.") from error
        kind = data.pop("kind", None) if isinstance(data, dict) else None
        require(kind == cls.__name__, f"expected a result of kind {cls.__name__}, got {kind!r}.")
        result: R = _restored(cls, data)
        return result

    def save(self, path: Path) -> Path:
        """Write the JSON whole or not at all; the folder is made if it is missing."""
        return write_text(path, self.to_json())

    @classmethod
    def load(cls: type[R], path: Path) -> R:
        """The result in a file."""
        return cls.from_json(path.read_text())


def _plain(value: Any) -> Any:
    if isinstance(value, Result):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value, dtype="<f4")
        return {"shape": list(data.shape), "float32": base64.b64encode(data.tobytes()).decode()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _restored(kind: Any, data: Any) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        (kind,) = (part for part in get_args(kind) if part is not type(None))
        return _restored(kind, data)
    if origin is tuple:
        return tuple(_restored(get_args(kind)[0], item) for item in data)
    if origin is dict:
        return dict(data)
    if origin is np.ndarray:
        flat = np.frombuffer(base64.b64decode(data["float32"]), dtype="<f4")
        return flat.reshape(data["shape"]).astype(np.float32)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        missing = [
            field.name
            for field in dataclasses.fields(kind)
            if field.name not in data and field.default is dataclasses.MISSING
        ]
        name = getattr(kind, "__name__", "result")
        require(
            not missing,
            f"this {name} has no {', '.join(missing)}: another version of whence wrote it. "
            "Run the command that made it again, or delete it.",
        )
        make: Any = kind
        return make(**{key: _restored(hints[key], data[key]) for key in hints if key in data})
    return kind(data)
