"""The tables of `whence translate`, in the layout of Shaw et al.'s, with theirs beside ours."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from whence.analysis.shaw_paper import TABLE_1, TABLE_2, TABLE_3, UNCHECKED
from whence.analysis.translation_results import Cell, Difference, Translation
from whence.methods.registry import named
from whence.report.text_table import NONE, TextTable, minus

SURE = 0.05
OTHER = f"The paper's are of WMT 2014 and its newstest sets, another task ({UNCHECKED})."
HOW = "BLEU is sacrebleu's, cased and detokenized; mean ± standard deviation over seeds."


def tables(results: Translation) -> Iterator[TextTable]:
    """Everything there is to show."""
    clipped, parts = clips(results), part_rows(results)
    swept = {row.position for row in (*clipped, *parts, *placed(results))}
    main = [x for x in results.positions if x not in swept or x == paper_position(results)]
    yield _scores(results, main)
    if results.differences:
        first = results.config["positions"][0]
        yield _certainty(results, [x for x in results.positions if x != first])
    if len(clipped) > 1:
        yield _clip(results, clipped)
    if len(parts) > 1:
        yield _parts(results, parts)
    if len(placed(results)) > 1:
        yield _placed(results)
    if len(results.joined) > 1:
        yield _lengths(results)
        if results.differences:
            yield _lengths_certainty(results)
    if any(len(_rates(results, position)) > 1 for position in results.positions):
        yield _tried(results)


@dataclass(frozen=True)
class Swept:
    """One row of a sweep: a position and what it says of Shaw's options."""

    position: str
    clip: int
    keys: bool
    values: bool


def clips(results: Translation) -> list[Swept]:
    """Shaw's keys and values in encoder and decoder, by clipping distance."""
    found = [row for row in map(_plain_shaw, results.positions) if row is not None]
    return sorted((x for x in found if x.keys and x.values), key=lambda row: row.clip)


def part_rows(results: Translation) -> list[Swept]:
    """Keys and values, keys, values and neither, at the clipping distance that has them all."""
    found = [row for row in map(_plain_shaw, results.positions) if row is not None]
    by_clip: dict[int, list[Swept]] = {}
    for row in found:
        by_clip.setdefault(row.clip, []).append(row)
    most = max(by_clip.values(), key=len, default=[])
    if len(most) < 2:
        return []
    neither = [Swept("nope", most[0].clip, False, False)] if "nope" in results.positions else []
    order = list(TABLE_3)
    return sorted([*most, *neither], key=lambda row: order.index((row.keys, row.values)))


def placed(results: Translation) -> list[Swept]:
    """Relative positions in the encoder alone, in both, and with absolute ones on top."""
    shaw = paper_position(results)
    if shaw is None:
        return []
    wanted = (shaw, f"{shaw}/nope", f"{shaw}/sinusoidal", f"sinusoidal+{shaw}")
    return [Swept(x, 0, True, True) for x in wanted if x in results.positions]


def paper_position(results: Translation) -> str | None:
    """The paper's own, with which the others are compared: the plain Shaw of the table."""
    found = clips(results)
    names = [row.position for row in found]
    return "shaw:clip=16" if "shaw:clip=16" in names else names[0] if names else None


def _plain_shaw(position: str) -> Swept | None:
    """A position that is Shaw's alone, in both encoder and decoder, and has no other options."""
    if "/" in position:
        return None
    found = named(position)
    if len(found) != 1 or found[0].name != "shaw":
        return None
    options = dict(found[0].options)
    clip = int(options.pop("clip", "16"))
    keys, values = (options.pop(name, "true") != "false" for name in ("keys", "values"))
    return None if options else Swept(position, clip, keys, values)


def _scores(results: Translation, positions: list[str]) -> TextTable:
    rows = []
    for position in positions:
        jobs = results.chosen(position)
        speeds = [x.steps_a_second for x in jobs if x.steps_a_second is not None]
        rows.append(
            (
                position,
                *(_cell(results.cell(position, test)) for test in results.tests),
                f"{fmean(speeds):.1f}" if speeds else NONE,
                f"{jobs[0].positional:,}",
                str(len(jobs)),
            )
        )
    numbers = [job.side_by_side for job in results.jobs] or [1]
    fewest, most = min(numbers), max(numbers)
    at_once = f"{most}" if fewest == most else f"{fewest} to {most}"
    speed = "" if most == 1 else f" {at_once} jobs shared the device, so speeds are not its own."
    return TextTable(
        f"{_pair(results)}: BLEU of each position",
        ("position", *results.tests, "steps/s", "parameters", "seeds"),
        tuple(rows),
        _best(results, positions),
        f"{HOW} Parameters are the position's own; the model has {_rest(results)} besides.{speed} "
        f"{_paper(results)}",
        code=True,
    )


def _certainty(results: Translation, positions: list[str]) -> TextTable:
    first = results.config["positions"][0]
    bold = set()
    for place, position in enumerate(positions):
        for column, test in enumerate(results.tests, 1):
            found = results.difference(position, test)
            if found is not None and found.p < SURE:
                bold.add((place, column))
    return TextTable(
        f"{_pair(results)}: how sure, less {first}",
        ("position", *results.tests),
        tuple(
            (position, *(_difference(results.difference(position, x)) for x in results.tests))
            for position in positions
        ),
        frozenset(bold),
        "BLEU less the baseline's, the mean over the seeds that both have, with the 95% interval "
        f"and p of the paired bootstrap over test sentences (bold: below {SURE}). It tells "
        "whether other sentences would give the same sign, not whether other seeds would.",
        code=True,
    )


def _paper(results: Translation) -> str:
    """Table 1 of the paper in a sentence."""
    place = {"de": 0, "fr": 2}.get(str(results.config["target"]))
    if place is None:
        return ""
    told = "; ".join(
        f"{name} {row[place]} sinusoidal and {row[place + 1]} relative"
        for name, row in TABLE_1.items()
    )
    return f"The paper has, on newstest2014 of WMT, another task: {told} ({UNCHECKED})."


def _clip(results: Translation, rows: list[Swept]) -> TextTable:
    return TextTable(
        f"{_pair(results)}: the clipping distance k (the paper's Table 2)",
        ("k", *results.tests, "the paper"),
        tuple(
            (
                str(row.clip),
                *(_cell(results.cell(row.position, test)) for test in results.tests),
                _known(TABLE_2.get(row.clip)),
            )
            for row in rows
        ),
        _best(results, [row.position for row in rows]),
        f"{HOW} Shaw's keys and values in encoder and decoder, no other positions. {OTHER}",
    )


def _parts(results: Translation, rows: list[Swept]) -> TextTable:
    names = {True: "yes", False: "no"}
    return TextTable(
        f"{_pair(results)}: keys and values (the paper's Table 3), k = {rows[0].clip}",
        ("keys", "values", *results.tests, "the paper"),
        tuple(
            (
                names[row.keys],
                names[row.values],
                *(_cell(results.cell(row.position, test)) for test in results.tests),
                _known(TABLE_3[row.keys, row.values]),
            )
            for row in rows
        ),
        _best(results, [row.position for row in rows], first=2),
        f"{HOW} Neither is no position at all (nope). {OTHER}",
    )


def _placed(results: Translation) -> TextTable:
    rows, shaw = placed(results), paper_position(results)
    told = {
        shaw: "in encoder and decoder",
        f"{shaw}/nope": "in the encoder, none in the decoder",
        f"{shaw}/sinusoidal": "in the encoder, sinusoids in the decoder",
        f"sinusoidal+{shaw}": "in both, with sinusoids on top",
    }
    return TextTable(
        f"{_pair(results)}: where relative positions stand",
        (f"{shaw}", *results.tests),
        tuple(
            (
                told[row.position],
                *(_cell(results.cell(row.position, test)) for test in results.tests),
            )
            for row in rows
        ),
        _best(results, [row.position for row in rows]),
        f"{HOW} The paper found no gain from absolute positions on top of relative ones.",
    )


def _lengths(results: Translation) -> TextTable:
    test = results.tests[0]
    rows, bold = [], set()
    for column, joined in enumerate(results.joined, 1):
        known = {x: results.cell(x, test, joined) for x in results.positions}
        best = max((c.mean for c in known.values() if c is not None), default=None)
        for place, position in enumerate(results.positions):
            cell = known[position]
            if cell is not None and cell.mean == best:
                bold.add((place, column))
    last = results.joined[-1]
    measured = any(_mean(results, x, test, last, "loss") is not None for x in results.positions)
    for position in results.positions:
        cells = [_cell(results.cell(position, test, joined)) for joined in results.joined]
        cells.append(_known(_mean(results, position, test, last, "ratio"), ".2f"))
        if measured:
            cells.append(_known(_mean(results, position, test, last, "loss"), ".2f"))
        rows.append((position, *cells))
    heads = [f"{n} ({results.source_tokens(test, n):.0f} tokens)" for n in results.joined]
    return TextTable(
        f"{_pair(results)}: {test}, several sentences in a row of the input",
        ("position", *heads, f"length at {last}", *([f"loss at {last}"] if measured else [])),
        tuple(rows),
        frozenset(bold),
        f"{HOW} Rows in training had at most {results.data['longest_row']} tokens. Length: of the "
        "translations over that of the references."
        + (" Loss: nats a token of the references, wherever a translation ends." * measured),
        code=True,
    )


def _lengths_certainty(results: Translation) -> TextTable:
    test, first = results.tests[0], results.config["positions"][0]
    rows, bold = [], set()
    positions = [x for x in results.positions if x != first]
    for place, position in enumerate(positions):
        cells = []
        for column, joined in enumerate(results.joined, 1):
            found = results.difference(position, test, joined)
            if found is not None and found.p < SURE:
                bold.add((place, column))
            cells.append(_difference(found, p=False))
        rows.append((position, *cells))
    return TextTable(
        f"{_pair(results)}: {test}, several sentences in a row, less {first}",
        ("position", *map(str, results.joined)),
        tuple(rows),
        frozenset(bold),
        "BLEU less the baseline's with the 95% interval of the paired bootstrap over rows (bold: p "
        f"below {SURE}).",
        code=True,
    )


def _tried(results: Translation) -> TextTable:
    rates = sorted({job.learning_rate for job in results.jobs})
    rows, bold = [], set()
    for place, position in enumerate(results.positions):
        known = _rates(results, position)
        bold.add((place, rates.index(results.rate(position)) + 1))
        rows.append((position, *(_known(known.get(rate)) for rate in rates)))
    return TextTable(
        f"{_pair(results)}: BLEU of the validation text at each learning rate",
        ("position", *(f"{rate:g}" for rate in rates)),
        tuple(rows),
        frozenset(bold),
        "Mean over seeds; a position's rate is the one in bold.",
        code=True,
    )


def _rates(results: Translation, position: str) -> dict[float, float]:
    """The mean BLEU of the validation text at each rate."""
    found: dict[float, list[float]] = {}
    for job in results.jobs:
        bleu = job.bleu("valid")
        if job.position == position and bleu is not None:
            found.setdefault(job.learning_rate, []).append(bleu)
    return {rate: fmean(values) for rate, values in found.items()}


def reasons(results: Translation) -> list[str]:
    """Why a job has no score, a line each."""
    return [
        f"{job.position}, rate {job.learning_rate:g}, seed {job.seed}: {job.stopped}"
        for job in results.jobs
        if job.stopped
    ]


def _best(
    results: Translation, positions: list[str], *, first: int = 1
) -> frozenset[tuple[int, int]]:
    """The place of the best mean of each test, whose columns begin at `first`."""
    bold = set()
    for column, test in enumerate(results.tests, first):
        known = {place: results.cell(x, test) for place, x in enumerate(positions)}
        means = {place: cell.mean for place, cell in known.items() if cell is not None}
        if len(means) > 1:
            bold.add((max(means, key=lambda place: means[place]), column))
    return frozenset(bold)


def _pair(results: Translation) -> str:
    return f"{results.config['source']}-{results.config['target']}"


def _mean(results: Translation, position: str, test: str, joined: int, name: str) -> float | None:
    """The mean over seeds of a number of the scores."""
    found = [
        getattr(part, name)
        for job in results.chosen(position)
        for part in job.scores
        if (part.test, part.joined) == (test, joined)
    ]
    known = [value for value in found if value is not None]
    return fmean(known) if known else None


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return NONE
    return f"{cell.mean:.1f}" + ("" if cell.spread is None else f" ± {cell.spread:.1f}")


def _known(number: float | None, form: str = ".1f") -> str:
    return NONE if number is None else format(number, form)


def _difference(found: Difference | None, *, p: bool = True) -> str:
    if found is None:
        return NONE
    chance = f" p = {found.p:.2g}" if p else ""
    return minus(f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]{chance}")


def _rest(results: Translation) -> str:
    """The number of parameters that are not the position's."""
    return f"{max(job.parameters - job.positional for job in results.jobs):,}"
