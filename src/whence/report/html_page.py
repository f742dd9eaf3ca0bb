"""An HTML page from templates that holds its scripts and data, and so works offline from a file.

Nothing in a result file can become markup or script. Jinja2 escapes every value in the templates,
labels of plots are escaped in `_literal`, and should both fail, the page's policy runs no script
but the two whose hashes it names.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from whence.report.plots import Plot
from whence.report.style import number


@dataclass(frozen=True)
class Section:
    """A part of a page: a template and the values that it shows.

    A template draws a plot with `plot(figure, look, label)`, where `look` is a class of page.css.
    """

    key: str  # the anchor that the list of contents links to
    heading: str
    template: str
    values: dict[str, Any]


def html_page(title: str, heading: str, sections: Sequence[Section | None], *, footer: str) -> str:
    """The page of these sections; those that are None are left out."""
    figures: list[Plot] = []

    def plot(figure: Plot, look: str, label: str) -> Markup:
        figures.append(_literal(figure))
        place = '<div class="plot {}" data-figure="{}" role="img" aria-label="{}"></div>'
        return Markup(place).format(look, len(figures) - 1, label)

    templates = _templates()
    templates.globals["plot"] = plot
    drawn = [
        (section, Markup(templates.get_template(section.template).render(section.values)))
        for section in sections
        if section is not None
    ]
    scripts = [get_plotlyjs(), _own(templates, "page.js")]
    return templates.get_template("page.html").render(
        title=title,
        heading=heading,
        policy=_policy(scripts),
        style=Markup(_own(templates, "page.css")),
        drawn=drawn,
        footer=footer,
        figures=Markup(_script_safe(figures)),
        scripts=[Markup(script) for script in scripts],
    )


def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("whence.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["number"] = number
    templates.filters["breakable"] = breakable
    return templates


def breakable(name: str) -> Markup:
    """A name that goes on in the next line after a colon, comma or slash, where it has to."""
    return Markup("<wbr>").join(re.split(r"(?<=[:,/])", name))


def _own(templates: Environment, name: str) -> str:
    """A file of our own, as it is."""
    assert templates.loader is not None
    return templates.loader.get_source(templates, name)[0]


def _policy(scripts: Sequence[str]) -> str:
    """No request leaves the page, and of all scripts only these run.

    Styles are free, because plotly sets them in place.
    """
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )


def _literal(value: Any) -> Any:
    """A plot whose labels show text as it is; what is not finite is a gap.

    Plotly reads tags such as <b> and <a href> in every label, and entities. Only hover templates
    are meant to have tags: they are constants of ours, and names enter them as %{text}.
    """
    if isinstance(value, dict):
        return {
            key: item if key == "hovertemplate" else _literal(item) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_literal(item) for item in value]
    if isinstance(value, str):
        return str(escape(value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _script_safe(data: Any) -> str:
    """JSON in which no text can end the script that holds it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")
