"""The API reference: which objects the page of each package shows, by the place of their source."""

import importlib
import inspect

from tables.results_folder import ResultsFolder

# Public beside what a package's __all__ names, because the docs import them from their modules.
BESIDE = {
    "whence": ("whence.methods.build_layers",),
    "analysis": (
        "whence.analysis.inspect.inspect",
        "whence.analysis.fit.export_tisa",
        "whence.analysis.fit.load_tisa",
        "whence.analysis.toeplitz.table_report",
    ),
}


def api(stored: ResultsFolder, page: str) -> str:
    """A directive of mkdocstrings for each public class and function of a package."""
    package = importlib.import_module("whence" if page == "whence" else f"whence.{page}")
    found = [getattr(package, name) for name in package.__all__]
    paths = [
        f"{x.__module__}.{x.__qualname__}"
        for x in found
        if inspect.isclass(x) or inspect.isfunction(x)
    ]
    return "\n".join(f"::: {path}\n" for path in (*sorted(paths, key=_last), *BESIDE.get(page, ())))


def _last(path: str) -> tuple[bool, str]:
    """Functions before classes, each by name."""
    name = path.rpartition(".")[2]
    return name[0].isupper(), name
