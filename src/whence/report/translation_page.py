"""The page of `whence translate`: its tables, some translations, and the setting."""

from typing import Any

from whence.analysis.translation_results import Translation
from whence.report.html_page import Section, html_page
from whence.report.translation_table import reasons, tables


def make_translation_page(results: Translation) -> str:
    """The page as text."""
    pair = f"{results.config['source']} to {results.config['target']}"
    return html_page(
        f"Translation, {pair}",
        f"Translation from {pair} with {len(results.positions)} positions",
        [_tables(results), _examples(results), _setting(results)],
        footer="Made by whence translate. Translations are of the first seed.",
    )


def _tables(results: Translation) -> Section:
    values = {"tables": list(tables(results)), "reasons": reasons(results)}
    return Section("tables", "BLEU", "translation/tables.html", values)


def _examples(results: Translation) -> Section | None:
    """The first sentences of the first test, as every position translates them."""
    if not results.tests:
        return None
    test, found = results.tests[0], {}
    for position in results.positions:
        parts = [x for x in results.chosen(position)[0].scores if (x.test, x.joined) == (test, 1)]
        if parts and parts[0].translations:
            found[position] = parts[0].translations
    n = min(map(len, found.values()), default=0)
    rows = [[(position, texts[i]) for position, texts in found.items()] for i in range(n)]
    values = {"test": test, "rows": rows}
    return Section("examples", "Translations", "translation/examples.html", values) if n else None


def _setting(results: Translation) -> Section:
    facts = {
        "configuration": _told(results.config),
        "data": _told(results.data),
        "machine": _told(results.machine),
    }
    return Section("setting", "Setting", "lm/setting.html", {"facts": facts})


def _told(facts: dict[str, Any]) -> dict[str, str]:
    return {
        key: ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        for key, value in facts.items()
    }
