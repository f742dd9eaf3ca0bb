"""The class that each name stands for: built in, of an installed package, or of one's own module.

A new built-in method is one file beside this one and one line in METHODS.
"""

import importlib
import re
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from whence.checks import require, unknown
from whence.method import PositionMethod
from whence.methods.alibi import Alibi
from whence.methods.content_band import ContentBand
from whence.methods.cope import Cope
from whence.methods.deberta import Deberta
from whence.methods.fire import Fire
from whence.methods.floater import Floater
from whence.methods.forget import Forget
from whence.methods.kerple import Kerple
from whence.methods.learned import Learned
from whence.methods.nope import Nope
from whence.methods.rope import Rope
from whence.methods.sandwich import Sandwich
from whence.methods.shaw import Shaw
from whence.methods.sinusoidal import Sinusoidal
from whence.methods.spec import parse
from whence.methods.synthesizer import Synthesizer
from whence.methods.t5 import T5
from whence.methods.table2d import Table2d
from whence.methods.tisa import Tisa
from whence.methods.tisa2 import Tisa2
from whence.methods.tisa2d import Tisa2d
from whence.methods.transformer_xl import TransformerXL
from whence.methods.tupe import Tupe
from whence.methods.xpos import Xpos

GROUP = "whence.methods"  # the entry points by which an installed package adds methods

METHODS: dict[str, type[PositionMethod]] = {
    # the nine of Table 1, in its order
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "shaw": Shaw,
    "t5": T5,
    "floater": Floater,
    "synthesizer": Synthesizer,
    "tupe": Tupe,
    "rope": Rope,
    "tisa": Tisa,
    # their successors
    "tisa2": Tisa2,
    "alibi": Alibi,
    "kerple": Kerple,
    "sandwich": Sandwich,
    "fire": Fire,
    "xpos": Xpos,
    "nope": Nope,
    "cope": Cope,
    "forget": Forget,
    "content_band": ContentBand,
    "deberta": Deberta,
    "transformer_xl": TransformerXL,
    "tisa2d": Tisa2d,
    "table2d": Table2d,
}


class Named(NamedTuple):
    """One part of a method's text: its name as the tables have it, its class and its options."""

    name: str
    cls: type[PositionMethod]
    options: dict[str, str]


def named(spec: str) -> list[Named]:
    """The parts of a text such as "tisa:kernels=5+rope", each with its class.

    A name is found whatever its case, and with - for _: "TISA" is "tisa".

        >>> [(part.name, part.options) for part in named("TISA:kernels=5+Transformer-XL")]
        [('tisa', {'kernels': '5'}), ('transformer_xl', {})]
    """
    return [Named(*_find(name), options) for name, options in parse(spec)]


def plugins() -> dict[str, EntryPoint]:
    """The methods of installed packages by name, not loaded yet; a built-in name stays built in."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in METHODS}


def import_modules(spec: str) -> None:
    """Import the modules of the parts that are written as module:Class.

    Only for a text that the user wrote: `named` does not import, because the text may come from
    somebody else's checkpoint.
    """
    for name, _ in parse(spec):
        module, colon, _ = name.partition(":")
        if not colon or _built_in(module) is not None:
            continue
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, and one that it imports is not
            raise ValueError(
                f"there is no module {module!r} for the method {name!r}. It must be installed, in "
                "a folder of PYTHONPATH or, for a command, in the current folder."
            ) from None


def _find(name: str) -> tuple[str, type[PositionMethod]]:
    known = _built_in(name)
    if known is not None:
        return known, METHODS[known]
    if ":" in name:
        return name, _of_module(name)
    installed = plugins()
    if name in installed:
        return name, _checked(name, installed[name].load())
    message = unknown("method", name, [*METHODS, *installed])
    if "." in name:
        message += f" A class of your own is written as {':'.join(name.rsplit('.', 1))!r}."
    raise ValueError(message)


def _built_in(name: str) -> str | None:
    plain = re.sub(r"[\s-]", "_", name.lower())
    return plain if plain in METHODS else None


def _of_module(name: str) -> type[PositionMethod]:
    """The class that module:Class names, of a module that is imported already."""
    module, _, cls = name.partition(":")
    known = _built_in(module)
    require(
        known is None,
        f"option {cls!r} of method {known!r} has no value. Write it like '{known}:{cls}=...'.",
    )
    require(
        module in sys.modules,
        f"the method {name!r} is of a module that is not imported. Write `import {module}` before: "
        "whence imports none by itself, as a checkpoint could name any.",
    )
    found = getattr(sys.modules[module], cls, None)
    require(found is not None, f"the module {module!r} has no class {cls!r}.")
    return _checked(name, found)


def _checked(name: str, found: object) -> type[PositionMethod]:
    right = isinstance(found, type) and issubclass(found, PositionMethod)
    require(right, f"{name!r} is no subclass of whence.PositionMethod, but {found!r}.")
    assert isinstance(found, type)
    return found
