"""After `import whence`, transformers' Auto classes load what was saved with a method attached.

transformers asks nobody for the model types it does not know, and importing it takes seconds. So
the import of its table of configs is watched for, and the entries are added once it is there.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

TABLE = "transformers.models.auto.configuration_auto"
TEACHERS = ("whence.hf.classes",)  # each adds its entries when imported, without any model's code


def teach() -> None:
    """Add the entries: to the table of configs only, models follow when a config is made.

    Whatever goes wrong, transformers must stay usable for those who do not need them.
    """
    for name in TEACHERS:
        try:
            importlib.import_module(name)
        except Exception as error:
            warnings.warn(
                f"transformers' Auto classes will not load models saved with {name}: {error}",
                stacklevel=2,
            )


def teach_when_imported() -> None:
    """Now, if transformers has its table already, else as soon as it has."""
    if TABLE in sys.modules:
        teach()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finds the table as the others do, and goes."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenTeach(spec.loader)
        return spec


class _ThenTeach(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = self.loader  # nobody need know
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        teach()
