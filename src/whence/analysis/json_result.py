"""A frozen result with JSON in and out: figures and pages are drawn from it, never recomputed."""

import base64
import binascii
import dataclasses
import json
import math
import sys
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
AGAIN = "Run the command that made it again, or delete it."


@dataclass(frozen=True, eq=False)
class Result:
    """A frozen dataclass of numbers, text, arrays and other results, that JSON can carry whole.

    Arrays go as base64 of little-endian float32 with their shape: small, and bit for bit the same
    on the way back. A number outside of arrays must be finite: what has no value is None. What is
    read back must have exactly the types of the fields, so that a file that a hand or another
    program changed is refused here, in one line, and not in the middle of a figure.
    """

    def to_json(self) -> str:
        """The result as JSON text, with the name of its class."""
        kind = type(self).__name__
        return json.dumps({"kind": kind, **_plain(self, kind)}, indent=1)

    @classmethod
    def from_json(cls: type[R], text: str) -> R:
        """The result that `to_json` wrote; another kind, or a broken file, is an error."""
        return cls.from_data(parsed(text))

    @classmethod
    def from_data(cls: type[R], data: Any) -> R:
        """The result in JSON that has been read already."""
        kind = kind_of(data)
        require(kind == cls.__name__, f"expected a result of kind {cls.__name__}, got {kind!r}.")
        result: R = _restored(cls, data, cls.__name__)
        return result

    def save(self, path: Path) -> Path:
        """Write the JSON whole or not at all; the folder is made if it is missing."""
        return write_text(path, self.to_json())

    @classmethod
    def load(cls: type[R], path: Path) -> R:
        """The result in a file."""
        data = read_json(path)
        try:
            return cls.from_data(data)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from None


def read_json(path: Path) -> Any:
    """The JSON in a file that a person may have named or changed."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8.") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}.") from None
    try:
        return parsed(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def parsed(text: str) -> Any:
    """JSON as Python has it; nesting that would exhaust the stack is refused."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists are nested too deeply for a result.") from None
    except ValueError as error:
        raise ValueError(f"this is not a whole result file: {error}.") from None


def kind_of(data: Any) -> str | None:
    """The class whose result this is, or None."""
    kind = data.get("kind") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else None


def one_length(owner: str, **vectors: Array) -> None:
    """These fields must be vectors of one length that is not 0."""
    shapes = {name: vector.shape for name, vector in vectors.items()}
    first, *others = shapes.values()
    require(
        len(first) == 1 and first[0] > 0 and all(shape == first for shape in others),
        f"{owner} needs vectors of one length: "
        + ", ".join(f"{name} has the shape {list(shape)}" for name, shape in shapes.items())
        + f". {AGAIN}",
    )


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Result):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name), f"{where}.{name}") for name in names}
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value, dtype="<f4")
        return {"shape": list(data.shape), "float32": base64.b64encode(data.tobytes()).decode()}
    if isinstance(value, tuple | list):
        return [_plain(item, f"{where}[{place}]") for place, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    require(
        not isinstance(value, float) or math.isfinite(value),
        f"{where} is {value}, which is no number to keep: None says that there is none.",
    )
    return value


def _restored(kind: Any, data: Any, where: str) -> Any:
    origin = get_origin(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        return _one_of(get_args(kind), data, where)
    if origin is tuple:
        items = _checked(data, list, "a list", where)
        (kind, _) = get_args(kind)
        return tuple(_restored(kind, item, f"{where}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        (_, kind) = get_args(kind)
        found = _checked(data, dict, "an object", where)
        return {key: _restored(kind, item, f"{where}[{key!r}]") for key, item in found.items()}
    if origin is np.ndarray:
        return _array(_checked(data, dict, "an array", where), where)
    if dataclasses.is_dataclass(kind):
        return _object(kind, _checked(data, dict, "an object", where), where)
    return _scalar(kind, data, where)


def _one_of(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    """The first of the types that the data has."""
    if data is None and type(None) in kinds:
        return None
    known = [kind for kind in kinds if kind is not type(None)]
    for kind in known[:-1]:
        try:
            return _restored(kind, data, where)
        except ValueError:
            continue
    return _restored(known[-1], data, where)


def _object(kind: Any, data: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in data and field.default is dataclasses.MISSING
    ]
    require(
        not missing,
        f"{where} has no {', '.join(missing)}: another version of whence wrote it. {AGAIN}",
    )
    fields = {
        name: _restored(hint, data[name], f"{where}.{name}")
        for name, hint in hints.items()
        if name in data
    }
    return kind(**fields)


def _array(data: dict[str, Any], where: str) -> Array:
    shape: Any = data.get("shape")
    text: Any = data.get("float32")
    wrong = f"{where} must be an array, the base64 of float32 with its shape. {AGAIN}"
    require(isinstance(text, str) and isinstance(shape, list), wrong)
    require(all(type(size) is int and size >= 0 for size in shape), wrong)
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(wrong) from None
    require(
        len(content) == 4 * math.prod(shape),
        f"{where} has {len(content)} bytes, which are no array of the shape {shape}. {AGAIN}",
    )
    return np.frombuffer(content, dtype="<f4").reshape(shape).astype(np.float32)


def _scalar(kind: type, data: Any, where: str) -> Any:
    if kind is float:
        number = isinstance(data, int | float) and not isinstance(data, bool)
        if not (number and abs(data) <= sys.float_info.max):  # an integer may be beyond it
            raise _wrong(where, "a finite number", data)
        return float(data)
    if kind is int:
        if type(data) is not int or abs(data) >= 1 << 63:
            raise _wrong(where, "a whole number of 64 bits", data)
        return data
    return _checked(data, kind, {str: "text", bool: "true or false"}[kind], where)


def _checked(data: Any, kind: type, what: str, where: str) -> Any:
    if not isinstance(data, kind):
        raise _wrong(where, what, data)
    return data


def _wrong(where: str, what: str, data: Any) -> ValueError:
    got = repr(data) if isinstance(data, str | int | float | None) else f"a {type(data).__name__}"
    if len(got) > 40:
        got = f"{got[:36]}..."
    return ValueError(f"{where} must be {what}, got {got}. {AGAIN}")
