"""How an experiment's folder is shown: results read, and page, tables and figures written as one.

An experiment declares an `ExperimentReport` with its own tables, figures and page (`lm_report.py`,
`glue_report.py`); reading, checking and writing are here, the same for all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from matplotlib.figure import Figure

from whence.analysis.json_result import Result
from whence.checks import require
from whence.files import add_to_folder, write_text
from whence.report.figure_files import FORMATS, save_figure
from whence.report.folder import PAGE, check_names, file_name, read_result
from whence.report.text_table import TextTable, formatted

Drawing = tuple[str, Callable[[], Figure]]  # the name of a figure, and how to draw it


R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class ExperimentReport(Generic[R]):
    """The results of one command, and what is shown of them."""

    command: str  # "whence lm"
    kind: type[R]  # has `jobs`
    results_file: str  # in the folder of the experiment
    tables: Callable[[R], Iterable[TextTable]]
    figures: Callable[[R], Iterable[Drawing]]
    page: Callable[[R], str]  # HTML
    page_of_several: Callable[[Mapping[str, R]], str] | None = None  # of runs by name

    def is_in(self, folder: Path) -> bool:
        """Whether the folder has results of this experiment."""
        return (folder / self.results_file).is_file()

    def read(self, folder: Path) -> R:
        """The results in a folder; without a finished job it is an error."""
        results: Any = read_result(self.kind, folder / self.results_file)
        require(
            len(results.jobs) > 0,
            f"{folder} has no finished job yet: the {self.command} that began there goes on with "
            "it.",
        )
        found: R = results
        return found

    def formatted(self, results: R, form: str) -> str:
        """All tables as Markdown, or as LaTeX for booktabs."""
        return formatted(self.tables(results), form)

    def write(self, results: R, out: Path, *, formats: Sequence[str] = ("png",)) -> Path:
        """Page, table.md, table.tex and figures into a folder, all of them or none: the page."""
        texts = {
            "table.md": f"{self.formatted(results, 'markdown')}\n",
            "table.tex": f"{self.formatted(results, 'latex')}\n",
            PAGE: self.page(results),
        }
        return _write(out, texts, list(self.figures(results)), formats)

    def write_several(
        self, runs: Mapping[str, R], out: Path, *, formats: Sequence[str] = ("png",)
    ) -> Path:
        """One page of several runs, and the figures of each under its name."""
        require(
            self.page_of_several is not None,
            f"a page shows one folder of {self.command}: give one at a time.",
        )
        assert self.page_of_several is not None
        check_names(runs)
        drawings = [
            (f"{file_name(name)}.{what}", draw)
            for name, results in runs.items()
            for what, draw in self.figures(results)
        ]
        return _write(out, {PAGE: self.page_of_several(runs)}, drawings, formats)


def _write(
    out: Path, texts: Mapping[str, str], drawings: Sequence[Drawing], formats: Sequence[str]
) -> Path:
    """Write all or nothing; a figure that lies there in a format not asked for is old, and goes."""
    with add_to_folder(out) as staged:
        for name, draw in drawings:
            figure = draw()
            for form in formats:
                save_figure(figure, staged / "figures" / f"{name}.{form}", dpi=150)
        for name, text in texts.items():
            write_text(staged / name, text)
    for name, _ in drawings:
        for form in set(FORMATS) - set(formats):
            (out / "figures" / f"{name}.{form}").unlink(missing_ok=True)
    return out / PAGE
