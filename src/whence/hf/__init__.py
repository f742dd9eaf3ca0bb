"""Positional methods on pretrained models of `transformers`: attach, undo, save and load."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from whence.extras import install

if TYPE_CHECKING:
    from whence.hf.attaching import Attached, attach, attached
    from whence.hf.loading import from_pretrained
    from whence.hf.pretrained_methods import t5_from, tisa_from_released
    from whence.hf.rates import parameter_groups
    from whence.methods.rope_settings import rope_from

# Looked up when asked for: transformers' Auto classes import a part of this package while
# transformers itself is still being imported.
_WHERE = {
    "Attached": "whence.hf.attaching",
    "attach": "whence.hf.attaching",
    "attached": "whence.hf.attaching",
    "from_pretrained": "whence.hf.loading",
    "parameter_groups": "whence.hf.rates",
    "rope_from": "whence.methods.rope_settings",
    "t5_from": "whence.hf.pretrained_methods",
    "tisa_from_released": "whence.hf.pretrained_methods",
}

__all__ = [
    "Attached",
    "attach",
    "attached",
    "from_pretrained",
    "parameter_groups",
    "rope_from",
    "t5_from",
    "tisa_from_released",
]

if importlib.util.find_spec("transformers") is None:
    raise ImportError(f"whence.hf needs transformers: {install('hf')}", name="transformers")


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
