"""What the worker process answers: one object with a method for each thing that the page asks."""

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.analysis.minilm import model_folder
from whence.app.methods_view import (
    Choice,
    drawn,
    form,
    number_controls,
    written,
)
from whence.app.settings import Settings
from whence.app.words import MOST_HEADS, MiniLMWords, RandomWords
from whence.checks import require
from whence.methods import METHODS
from whence.methods.registry import import_modules, plugins

if TYPE_CHECKING:
    from whence.analysis.results import Inspection

KEPT = 4  # models in memory
FIRST_WINDOW = 128  # positions that a heat map begins with, or fewer


class Explorer:
    """Answers as plain data and HTML; it keeps what is costly to read again."""

    def __init__(self, settings: Settings, progress: Callable[[str, float], None]) -> None:
        self.settings, self.progress = settings, progress
        self.inspections: dict[str, Inspection] = {}
        if settings.methods and str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        for spec in settings.methods:
            import_modules(spec)

    @cached_property
    def words(self) -> MiniLMWords | RandomWords:
        """The content of sentences: that of a real model where there is one."""
        try:
            folder = model_folder()
            import tokenizers as _tokenizers  # noqa: F401
        except (ImportError, ValueError):
            folder = None
        return RandomWords(MOST_HEADS) if folder is None else MiniLMWords(folder)

    def warm_up(self) -> None:
        """Draw something once, while the browser still loads the page: the first time is slow."""
        drawn(Choice("tisa", {}), "some words", self.words)

    def method_names(self) -> list[str]:
        """Built in, of installed packages, and those named on the command line."""
        return list(dict.fromkeys((*METHODS, *plugins(), *self.settings.methods)))

    def method(self, *, spec: str, sentence: str, **shown: Any) -> dict[str, Any]:
        """A method newly chosen: what it is, its options, its numbers and its plots."""
        found = form(spec)
        about = (
            f"<p><b>{escape(found.name)}</b> {escape(found.paper)}</p>"
            f"<p class='formula'>{escape(found.formula)}</p>"
        )
        drawn = self.redrawn(spec=spec, sentence=sentence, **shown)
        return {"about": about, "form": asdict(found)} | drawn

    def redrawn(
        self,
        *,
        spec: str,
        sentence: str,
        n_heads: Any,
        head: Any,
        n: Any,
        causal: bool,
        moved: dict[str, Any],
    ) -> dict[str, Any]:
        """The plots, and the numbers of the chosen head. `Choice` checks what the page sent."""
        head = min(head, n_heads)
        choice = Choice(spec, moved, n_heads=n_heads, head=head, n=n, causal=causal)
        why, controls = number_controls(choice)
        return {
            "spec": spec,
            "numbers": {"why": why, "controls": [asdict(each) for each in controls]},
            "plots": drawn(choice, sentence, self.words),
        }

    def with_options(
        self, *, name: str, options: dict[str, Any], defaults: dict[str, str], **shown: Any
    ) -> dict[str, Any]:
        """The same method with other options."""
        return self.redrawn(spec=written(name, options, defaults), **shown)

    def inspected(self, *, model: str, layer: Any, biases: bool, run: bool) -> dict[str, Any]:
        """A model read and drawn; it is kept under its key."""
        from whence.analysis.inspect import inspect
        from whence.app import model_view

        require(
            isinstance(layer, int | float) and float(layer).is_integer() and abs(layer) < 1e6,
            f"the layer must be a whole number, got {layer!r}.",
        )
        name = model_view.allowed_model(model, self.settings.root, self.settings.model)
        found = inspect(
            name,
            layer=int(layer),
            biases=biases,
            profiles=bool(run),
            progress=self.progress,
        )
        found = replace(found, model=replace(found.model, name=model.strip()))
        key = f"{name} {int(layer)} {biases} {run}"
        self.inspections.pop(key, None)
        self.inspections[key] = found
        while len(self.inspections) > KEPT:
            del self.inspections[next(iter(self.inspections))]
        stops = model_view.windows(found)
        place = max((i for i, stop in enumerate(stops) if stop <= FIRST_WINDOW), default=0)
        first = model_view.strongest(found)
        return {
            "key": key,
            "windows": list(stops),
            "place": place,
            "facts": model_view.facts(found),
            "heat": model_view.heat_map(found, place),
            "head": "" if first is None else model_view.one_head(found, first),
            "heads": model_view.head_list(found),
        }

    def window(self, *, key: str, place: int) -> str:
        """The heat map of other first positions."""
        from whence.app.model_view import heat_map

        return heat_map(self._read(key), place)

    def one_head(self, *, key: str, number: int) -> str:
        """One head enlarged."""
        from whence.app.model_view import one_head

        return one_head(self._read(key), number)

    def result_names(self) -> list[str]:
        """The result files that can be shown."""
        from whence.app.results_view import result_names

        return result_names(self.settings.results)

    def result(self, *, name: str) -> str:
        """One result file as tables and plots."""
        from whence.app.results_view import shown

        return shown(self.settings.results, name)

    def _read(self, key: str) -> "Inspection":
        require(key in self.inspections, "this model is no longer in memory: inspect it again.")
        return self.inspections[key]
