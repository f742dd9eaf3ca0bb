"""The frozen configuration of an experiment, read from TOML and flags, and its fingerprint."""

import hashlib
import json
import math
import tomllib
import types
import typing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from whence.analysis.json_result import Result
from whence.checks import at_most, require, unknown

C = TypeVar("C", bound=Result)
# The largest numbers that a configuration may ask for, far beyond any experiment: with larger
# ones a list of jobs would not fit into memory, or a run not end. A rate may be any finite number.
LARGEST = 2**31 - 1  # of whole numbers that are not named below
LARGEST_OF = {
    "seeds": 10_000,
    "n_layers": 2**16,
    "n_heads": 2**16,
    "d_model": 2**20,
    "d_ff": 2**22,
    "vocab_size": 2**24,
    "kernels": 2**16,
    "beams": 1_000,
    "average": 10_000,
    "joined": 1_000,
    "epochs": 1_000_000,
}


@dataclass(frozen=True, eq=False)
class ExperimentConfig(Result):
    """The configuration of an experiment; a subclass has the fields."""

    # Fields that may differ between two runs into one folder: which jobs, where they run, and the
    # names of files whose content is compared instead.
    free: ClassVar[tuple[str, ...]]

    def check_numbers(self) -> None:
        """Refuse numbers that are not finite, or beyond the largest of their name."""
        every = [(name, value) for name, value in vars(self).items() if name != "exceptions"]
        for own in getattr(self, "exceptions", {}).values():
            every += own.items()
        for name, given in every:
            for value in given if isinstance(given, tuple) else (given,):
                if not isinstance(value, int | float):
                    continue
                sound = isinstance(value, int) or math.isfinite(value)
                require(sound, f"{name} must be a finite number, got {value}.")
                if isinstance(value, int) or name in LARGEST_OF:
                    at_most(LARGEST_OF.get(name, LARGEST), **{name: value})

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    def fixed(self) -> dict[str, Any]:
        """What two runs into one folder must have in common."""
        return {key: value for key, value in self.plain().items() if key not in self.free}


def fingerprint(fixed: dict[str, Any], data_sha256: str) -> str:
    """A name for an experiment: its configuration and the content of its data."""
    text = json.dumps([fixed, data_sha256], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_options(path: Path | None, flags: dict[str, Any]) -> dict[str, Any]:
    """The options in a TOML file, over which flags that are not None win."""
    found: dict[str, Any] = {}
    if path is not None:
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not TOML: {error}.") from None
    return found | {name: value for name, value in flags.items() if value is not None}


def typed_config(kind: type[C], options: dict[str, Any], *, where: str) -> C:
    """The configuration with these fields; `where` names in an error what they were read from."""
    check_names(kind, options, where=where)
    hints = typing.get_type_hints(kind)
    return kind(**{name: _typed(name, hints[name], value) for name, value in options.items()})


def check_names(kind: type[C], options: dict[str, Any], *, where: str) -> None:
    """Refuse an option that the configuration does not have."""
    names = [field.name for field in fields(kind)]
    for name in options:
        require(name in names, unknown(f"option in {where}", name, names))


def _typed(name: str, hint: Any, value: Any) -> Any:
    """A value of TOML as the field's type, or an error that names the field."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        require(isinstance(value, (list, tuple)), f"{name} must be a list, got {value!r}.")
        return tuple(_typed(name, typing.get_args(hint)[0], item) for item in value)
    if typing.get_origin(hint) is dict:
        require(isinstance(value, dict), f"{name} must be a table of TOML, got {value!r}.")
        _, inner = typing.get_args(hint)
        return {key: _typed(f"{name}.{key}", inner, item) for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    right = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    require(right, f"{name} must be of type {hint.__name__}, got {value!r}.")
    return value
