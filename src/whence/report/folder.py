"""A folder of results with its figures and page: read, drawn again, and written as one."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from matplotlib import rc_context
from matplotlib.figure import Figure

from whence.analysis.comparison import Comparison
from whence.analysis.criteria import CriteriaReport
from whence.analysis.json_result import Result, kind_of, read_json
from whence.analysis.results import Inspection
from whence.checks import require
from whence.files import add_to_folder
from whence.files import check_folder as check_folder
from whence.report.checked import check_parts
from whence.report.comparison_figures import draw_scores, draw_steps
from whence.report.components import draw_components
from whence.report.figure_files import save_figure
from whence.report.fits import draw_fits, with_curves
from whence.report.heads import draw_head_curves, draw_head_matrices
from whence.report.heat_maps import draw_heat_maps
from whence.report.page import save_page
from whence.report.profiles import draw_profiles
from whence.report.style import short
from whence.report.windows import draw_windows

R = TypeVar("R", bound=Result)
KINDS = {kind.__name__: kind for kind in (Inspection, Comparison, CriteriaReport)}
PAGE, COMPARISON = "page.html", "comparison.json"
SHARED = ("heat_maps", "windows", "steps", "scores")  # figures of all models of a folder
FIGURE = re.compile(
    rf"({'|'.join(SHARED)}"
    r"|(?P<model>.+)\.(components|(curves|matrices|stated|fits|profiles)-\d+))\.(png|svg|pdf)"
)


@dataclass(frozen=True, eq=False)
class Results:
    """The results in a folder; models are in the order of the comparison, or else of their files.

    >>> found = read_folder(Path("out"))  # of whence inspect tiny-bert --out out
    >>> [entry.model.name for entry in found.inspections]
    ['tiny-bert']
    """

    inspections: tuple[Inspection, ...] = ()
    comparison: Comparison | None = None
    criteria: CriteriaReport | None = None

    def with_earlier(self, earlier: "Results") -> "Results":
        """These results, followed by those of an earlier run that they do not replace."""
        ours = {file_name(entry.model.name) for entry in self.inspections}
        others = (entry for entry in earlier.inspections if file_name(entry.model.name) not in ours)
        return Results(
            (*self.inspections, *others),
            self.comparison or earlier.comparison,
            self.criteria or earlier.criteria,
        )


def read_folder(folder: Path, *, but: Iterable[str] = ()) -> Results:
    """All results in the JSON files of a folder; JSON of another kind is left alone.

    `but` names files that are not read, because they are about to be replaced.

        >>> found = read_folder(Path("out"))  # of whence inspect tiny-bert --out out
        >>> len(found.inspections), found.criteria is None
        (1, True)
    """
    found: dict[str, list[tuple[Path, Any]]] = {name: [] for name in KINDS}
    replaced = set(but)
    for path in sorted(folder.glob("*.json")):
        if path.name in replaced:
            continue
        data = read_json(path)
        kind = kind_of(data)
        if kind in found:
            found[kind].append((path, data))
    comparison = _only(Comparison, found["Comparison"])
    inspections = [_restored(Inspection, *pair) for pair in found["Inspection"]]
    if comparison is not None:
        order = [point.model for point in comparison.points]
        places = {name: place for place, name in enumerate(order)}
        inspections.sort(key=lambda entry: places.get(entry.model.name, len(order)))
    return Results(tuple(inspections), comparison, _only(CriteriaReport, found["CriteriaReport"]))


def write_folder(
    folder: Path,
    new: Results,
    *,
    formats: Sequence[str] = ("png",),
    figures_of: Sequence[Inspection] | None = None,
    keep: Sequence[Inspection] = (),
    progress: Callable[[str, float], None] | None = None,
) -> Path:
    """Write results to keep as JSON, figures and the page, and return the path of the page.

    All files are made in a temporary folder first and moved in at the end.

    `figures_of` are the models that get figures of their own (None: all). Figures of an earlier run
    whose results are gone are removed.

        >>> found = read_folder(Path("out"))  # of whence inspect tiny-bert --out out
        >>> write_folder(Path("again"), Results(found.inspections), figures_of=[]).name
        'page.html'
    """
    say = progress or (lambda what, share: None)
    require(len(new.inspections) > 0, f"there is no result to show in {folder}.")
    check_names(entry.model.name for entry in keep)
    own = new.inspections if figures_of is None else figures_of
    drawings = list(_drawings(new, own))
    with add_to_folder(folder) as staged:
        for entry in keep:
            entry.save(staged / result_name(entry.model.name))
        if keep and new.comparison is not None:
            new.comparison.save(staged / COMPARISON)
        for place, (name, draw) in enumerate(drawings):
            say(f"figure {name}", place / len(drawings))
            with rc_context({"text.parse_math": False}):  # a name may hold a dollar sign
                figure = draw()
            for form in formats:
                save_figure(figure, staged / "figures" / f"{name}.{form}")
        save_page(new.inspections, staged / PAGE, comparison=new.comparison, criteria=new.criteria)
    drawn = {f"{name}.{form}" for name, _ in drawings for form in formats}
    replaced = {file_name(entry.model.name) for entry in (*own, *keep)}
    valid = {file_name(entry.model.name) for entry in new.inspections} - replaced
    for path in (folder / "figures").glob("*"):
        ours = FIGURE.fullmatch(path.name)
        if ours and path.name not in drawn and ours["model"] not in valid:
            path.unlink()
    return folder / PAGE


def file_name(model: str) -> str:
    """A model's name as that of a file: organisation--name, and of a path the last three parts."""
    parts = [part for part in model.split("/") if part.strip(".~")][-3:]
    return re.sub(r"[^\w.-]+", "-", "--".join(parts)) or "model"


def result_name(model: str) -> str:
    """The file of a model's results."""
    return f"{file_name(model)}.json"


def check_names(models: Iterable[str]) -> None:
    """Two models may not go into one file."""
    names: dict[str, str] = {}
    for model in models:
        other = names.setdefault(file_name(model), model)
        require(
            other == model,
            f"{other} and {model} would both be written to {result_name(model)}: "
            "inspect them into two folders.",
        )


def _drawings(
    results: Results, own: Sequence[Inspection]
) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Every figure by name, drawn when called for."""
    with_table = [entry for entry in results.inspections if entry.table is not None]
    if with_table:
        yield "heat_maps", partial(draw_heat_maps, with_table)
        yield "windows", partial(draw_windows, with_table)
    comparison = results.comparison
    if comparison is not None:
        yield "steps", partial(draw_steps, comparison)
        if comparison.correlations:
            yield "scores", partial(draw_scores, comparison)
    for entry in own:
        yield from _of_model(entry)


def _of_model(entry: Inspection) -> Iterator[tuple[str, Callable[[], Figure]]]:
    name, file = short(entry.model.name), file_name(entry.model.name)
    table = entry.table
    if table is not None and table.components:
        yield f"{file}.components", partial(draw_components, table, name=name)
    for layer, group in groupby(entry.heads, key=lambda head: head.layer):
        heads = list(group)
        yield f"{file}.curves-{layer}", partial(draw_head_curves, heads, name=name)
        yield f"{file}.matrices-{layer}", partial(draw_head_matrices, heads, name=name)
    for layer, group in groupby(entry.relative, key=lambda head: head.layer):
        heads = list(group)
        yield f"{file}.stated-{layer}", partial(draw_head_curves, heads, name=name, stated=True)
    for layer, fitted in groupby(entry.fits, key=lambda fit: fit.layer):
        fits, curves = list(fitted), entry.heads or entry.relative
        if with_curves(fits, curves):
            yield f"{file}.fits-{layer}", partial(draw_fits, fits, curves, name=name)
    for layer, measured in groupby(entry.profiles, key=lambda part: part.layer):
        profiles = list(measured)
        yield f"{file}.profiles-{layer}", partial(draw_profiles, profiles, name=name)


def read_result(kind: type[R], path: Path) -> R:
    """The result in a file, of which all parts fit together; the error names the file."""
    return _restored(kind, path, read_json(path))


def _only(kind: type[R], files: list[tuple[Path, Any]]) -> R | None:
    return _restored(kind, *files[-1]) if files else None


def _restored(kind: type[R], path: Path, data: Any) -> R:
    try:
        result = kind.from_data(data)
        check_parts(result)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    return result
