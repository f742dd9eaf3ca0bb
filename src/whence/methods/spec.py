"""The text form of a method, "tisa:kernels=5+rope", and the module it names."""

import inspect
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

from whence.checks import require, unknown
from whence.method import PositionMethod

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def parse(spec: str) -> list[tuple[str, dict[str, str]]]:
    """ "tisa:kernels=5,reach=9+t5" -> [("tisa", {"kernels": "5", "reach": "9"}), ("t5", {})]."""
    parts = []
    for text in spec.split("+"):
        name, _, rest = text.partition(":")
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


def instantiate(
    name: str, cls: type[PositionMethod], options: dict[str, str], context: dict[str, Any]
) -> PositionMethod:
    """The method of this class: options from the text, then what the model knows (context)."""
    wanted = inspect.signature(cls).parameters
    known = {key: p for key, p in wanted.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for key in options:
        require(key in known, unknown(f"option of method {name!r}:", key, known))
    arguments = {key: value for key, value in context.items() if key in known}
    for key, text in options.items():
        arguments[key] = _read(f"{name}:{key}", text, known[key].annotation)
    return cls(**arguments)


def _read(where: str, text: str, kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        if text.lower() == "none":
            return None
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        require(text in get_args(kind), unknown(f"value of {where}", text, get_args(kind)))
        return text
    if kind is bool:
        require(text.lower() in TRUE + FALSE, f"{where} must be true or false, got {text!r}.")
        return text.lower() in TRUE
    reader: Callable[[str], Any] = {int: int, float: float, str: str}[kind]
    try:
        return reader(text)
    except ValueError:
        word = {int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"{where} must be {word}, got {text!r}.") from None
