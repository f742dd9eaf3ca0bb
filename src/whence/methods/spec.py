"""The text form of a method, "tisa:kernels=5+rope", and the module it names."""

import inspect
import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from whence.checks import require, unknown
from whence.method import PositionMethod

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
OWN = re.compile(r"\s*([\w.]+\s*:\s*[^\W\d]\w*)\s*(?::|$)")  # my_module:Wave, and options after it
# The largest sizes that a text may ask for, far beyond any model: with larger ones a count of bytes
# would not fit an index, or a loop over heads not end.
LARGEST = 2**31 - 1
LARGEST_OF = {"n_heads": 2**16, "d_head": 2**16, "d_model": 2**20, "n_layers": 2**16}


def parse(spec: str) -> list[tuple[str, dict[str, str]]]:
    """ "tisa:kernels=5,reach=9+t5" -> [("tisa", {"kernels": "5", "reach": "9"}), ("t5", {})]."""
    require(isinstance(spec, str), f"a method is named by a text such as 'tisa', got {spec!r}.")
    parts = []
    for text in spec.split("+"):
        own = OWN.match(text)
        if own is None:
            name, _, rest = text.partition(":")
        else:
            name, rest = re.sub(r"\s", "", own[1]), text[own.end() :]
        name = name.strip()
        require(
            bool(name),
            f"empty method name in {spec!r}. Write it like 'tisa:kernels=5' or 'tisa+rope'.",
        )
        options: dict[str, str] = {}
        for item in filter(None, rest.split(",")):
            key, equals, value = item.partition("=")
            require(
                bool(equals),
                f"option {item!r} of method {name!r} has no value. "
                f"Write it like '{name}:{item}=...'.",
            )
            key = key.strip()
            require(key not in options, f"option {key!r} of method {name!r} is given twice.")
            options[key] = value.strip()
        parts.append((name, options))
    return parts


def options_of(cls: type[PositionMethod]) -> Mapping[str, inspect.Parameter]:
    """The arguments of a method's constructor by name, those filled in by a model among them."""
    wanted = inspect.signature(cls, eval_str=True).parameters
    return {k: p for k, p in wanted.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def instantiate(
    name: str, cls: type[PositionMethod], options: dict[str, str], context: dict[str, Any]
) -> PositionMethod:
    """The method of this class: options from the text, then what the model knows (context)."""
    known = options_of(cls)
    for key in options:
        require(key in known, unknown(f"option of method {name!r}:", key, known))
    arguments = {key: value for key, value in context.items() if key in known}
    for key, text in options.items():
        arguments[key] = _read(f"{name}:{key}", text, known[key].annotation)
    for key, parameter in known.items():
        given = key in arguments or parameter.default is not parameter.empty
        require(given, f"method {name!r} needs its option {key!r}: '{name}:{key}=...'.")
    check_sizes(arguments)
    return cls(**arguments)


def check_sizes(arguments: Mapping[str, Any]) -> None:
    """Whole numbers must not be beyond the largest of their name."""
    for name, value in arguments.items():
        largest = LARGEST_OF.get(name, LARGEST)
        require(
            not isinstance(value, int) or abs(value) <= largest,
            f"{name} must be at most {largest}, got {value}.",
        )


def _read(where: str, text: str, kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        if text.lower() == "none" and type(None) in get_args(kind):
            return None
        kinds = [part for part in get_args(kind) if part is not type(None)]
        kind = kinds[0] if len(kinds) == 1 else kind
    if get_origin(kind) is Literal:
        require(text in get_args(kind), unknown(f"value of {where}", text, get_args(kind)))
        return text
    if kind is bool:
        require(text.lower() in TRUE + FALSE, f"{where} must be true or false, got {text!r}.")
        return text.lower() in TRUE
    if kind is str:
        return text
    require(
        kind in (int, float),
        f"{where} cannot be given in a text: its annotation must be int, float, bool, str, a "
        "Literal of texts, or one of these or None. Build the method in Python.",
    )
    reader: Callable[[str], Any] = {int: int, float: float}[kind]
    try:
        value = reader(text)
    except ValueError:
        word = {int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"{where} must be {word}, got {text!r}.") from None
    require(math.isfinite(value), f"{where} must be a finite number, got {text!r}.")
    return value
