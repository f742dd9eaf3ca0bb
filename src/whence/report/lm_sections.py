"""The sections of the page of `whence lm`: each is HTML, or nothing where there is nothing."""

from html import escape

from whence.analysis.lm_results import SCRATCH, SLIDING, Job, Language
from whence.report import lm_plots
from whence.report.lm_table import rank_table, reasons, winners
from whence.report.sections import Page


def summary(results: Language) -> str:
    """The ranking."""
    table = rank_table(results)
    head = "".join(f"<th>{escape(text)}</th>" for text in table.head)
    rows = ""
    for place, row in enumerate(table.rows):
        cells = f"<td><b>{place + 1}</b>&nbsp; {escape(row[0])}</td>"
        for column, text in enumerate(row[1:], 1):
            shown = escape(text).replace(" ", "&nbsp;")
            cells += f"<td>{f'<b>{shown}</b>' if (place, column) in table.best else shown}</td>"
        rows += f"<tr>{cells}</tr>"
    why = "".join(f"<li>{escape(line)}</li>" for line in reasons(results))
    notes = f'<ul class="notes">{why}</ul>' if why else ""
    cards = "".join(
        f"<li><b>{escape(name)}</b><span>{escape(what)}</span>"
        f'<span class="faint">{escape(against)}</span></li>'
        for name, what, against in winners(results)
    )
    return (
        f'<ul class="numbers">{cards}</ul>'
        f'<p class="how">{escape(table.caption)} In bold the smallest of each column; memory is '
        f"the GPU's, or the whole process' on a CPU.</p>"
        f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>{notes}'
    )


def lengths(page: Page, results: Language) -> str:
    """Loss against length, and along the longest sequences."""
    charts = ""
    for how, told in (
        (SCRATCH, "every token scored, with what stands before it in its sequence"),
        (SLIDING, "windows that overlap by half: each token has half a window before it or more"),
    ):
        figure = lm_plots.by_length(results, how)
        if figure["data"]:
            charts += (
                f"<figure><h4>{how}</h4>{page.plot(figure, 'chart', f'loss against length, {how}')}"
                f"<figcaption>{told}</figcaption></figure>"
            )
    longest = max(results.lengths)
    where = page.plot(lm_plots.by_position(results, longest), "chart", "loss by position")
    charts += (
        f"<figure><h4>along sequences of {longest:,}</h4>{where}<figcaption>from scratch; right of "
        "the dotted line are positions that training never had</figcaption></figure>"
    )
    drawn = page.plot(lm_plots.training(results), "chart", "training loss")
    charts += f"<figure><h4>training</h4>{drawn}</figure>"
    how_to = (
        '<p class="how">A method that knows distances and not places should lose nothing on '
        "sequences longer than those of training (dotted line), and gain from the longer context. "
        "One with a table of positions ends at the line.</p>"
    )
    return f'{how_to}<div class="two">{charts}</div>'


def tables(page: Page, results: Language) -> str:
    """Learned tables: heat maps before and after, and Toeplitzness over training."""
    body = ""
    for job in _shown(results):
        if job.gram_after is None or job.gram_before is None:
            continue
        maps = "".join(
            f"<figure><h4>{when}</h4>"
            f"{page.plot(lm_plots.gram_map(gram), 'square', f'P {when} training')}</figure>"
            for when, gram in (("before", job.gram_before), ("after", job.gram_after))
        )
        chart = page.plot(lm_plots.toeplitz(job), "chart", "Toeplitzness over training")
        body += (
            f'<h3>{escape(job.method)}</h3><div class="wide">{maps}<figure>'
            f"<h4>Toeplitzness over training</h4>{chart}</figure></div>"
        )
    how = (
        '<p class="how">P = E Eᵀ holds the inner products of the learned position vectors. Where a '
        "table comes to mean distances, P grows constant along its diagonals (Toeplitz). A random "
        "table has a bright diagonal too: hold each solid line against its dotted one.</p>"
    )
    return how + body if body else ""


def lag_curves(page: Page, results: Language) -> str:
    """What each method adds at each lag, before (dotted) and after, a line a head."""
    body = ""
    for place, job in enumerate(job for job in _shown(results) if job.stated):
        tiles = "".join(
            f"<figure><h4>{f'layer {view.layer}' if len(job.stated) > 1 else 'all layers'}</h4>"
            + page.plot(lm_plots.heads(view), "tile", f"{job.method} layer {view.layer}")
            + "</figure>"
            for view in job.stated
        )
        body += (
            f"<details{' open' if place < 4 else ''}><summary>{escape(job.method)}: "
            f'{escape(job.stated[0].quantity)}</summary><div class="tiles">{tiles}</div></details>'
        )
    how = (
        '<p class="how">What the method itself gives to attention at each lag, a line a head: '
        "dotted before training, solid after it. Where content has a say it is the mean over "
        "random content.</p>"
    )
    return how + body if body else ""


def attention(page: Page, results: Language) -> str:
    """Mean attention weight by head and lag, before and after."""
    body = ""
    for place, job in enumerate(job for job in _shown(results) if job.attention):
        maps = "".join(
            f"<figure><h4>{escape(job.method)}, {when} training</h4>"
            + page.plot(lm_plots.attention_map(job.attention, when), "chart", f"attention {when}")
            + "</figure>"
            for when in ("before", "after")
        )
        body += (
            f"<details{' open' if place < 4 else ''}><summary>{escape(job.method)}</summary>"
            f'<div class="two">{maps}</div></details>'
        )
    how = (
        '<p class="how">Where the heads look: mean attention weight at each lag on validation '
        "data, a row a head, on a logarithmic scale that all maps of a method share.</p>"
    )
    return how + body if body else ""


def setting(results: Language) -> str:
    """Configuration, data and machine."""
    body = ""
    for name, facts in (
        ("configuration", results.config),
        ("data", results.data),
        ("machine", results.machine),
    ):
        rows = "".join(
            f"<tr><td>{escape(str(key))}</td><td>{escape(_text(value))}</td></tr>"
            for key, value in facts.items()
            if value is not None
        )
        if rows:
            body += f"<details><summary>{name}</summary><table class=many>{rows}</table></details>"
    return body


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _shown(results: Language) -> list[Job]:
    """The jobs whose pictures are kept, best method first."""
    with_pictures = {job.method: job for job in results.jobs if job.attention}
    order = [name for name, *_ in lm_plots.looks(results)]
    return [with_pictures[name] for name in order if name in with_pictures]
