"""Folders of `whence lm`: results read, and their page, tables and figures written as one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from whence.analysis.lm_results import Language
from whence.checks import require
from whence.files import add_to_folder, write_text
from whence.report.figure_files import FORMATS, save_figure
from whence.report.folder import PAGE, check_names, file_name, read_result
from whence.report.lm_figures import draw_attention, draw_by_length
from whence.report.lm_page import make_lm_page, make_runs_page
from whence.report.lm_table import formatted

LANGUAGE = "lm.json"
Drawing = tuple[str, Callable[[], Figure]]


def read_lm_folder(folder: Path) -> Language:
    """The results that `whence lm` left in a folder; with none of a finished job it is an error."""
    results = read_result(Language, folder / LANGUAGE)
    require(
        len(results.jobs) > 0,
        f"{folder} has no finished job yet: the whence lm that began there goes on with it.",
    )
    return results


def write_lm_report(results: Language, out: Path, *, formats: Sequence[str] = ("png",)) -> Path:
    """Page, table.md, table.tex and figures into a folder, all of them or none: the page."""
    texts = {
        "table.md": f"{formatted(results, 'markdown')}\n",
        "table.tex": f"{formatted(results, 'latex')}\n",
        PAGE: make_lm_page(results),
    }
    return write_report(out, texts, list(_drawings(results)), formats)


def write_runs_report(
    runs: Mapping[str, Language], out: Path, *, formats: Sequence[str] = ("png",)
) -> Path:
    """One page of several runs, and the figures of each under its name."""
    check_names(runs)
    drawings = [
        (f"{file_name(name)}.{what}", draw)
        for name, results in runs.items()
        for what, draw in _drawings(results)
    ]
    return write_report(out, {PAGE: make_runs_page(runs)}, drawings, formats)


def _drawings(results: Language) -> Iterator[Drawing]:
    yield "length", partial(draw_by_length, results)
    if any(job.attention for job in results.jobs):
        yield "attention", partial(draw_attention, results)


def write_report(
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
