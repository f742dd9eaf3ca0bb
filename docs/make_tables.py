"""Writes the generated tables into the Markdown files, between their markers.

    python docs/make_tables.py           write them
    python docs/make_tables.py --check   exit with 1 if a file is out of date

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; NAME is the function in
docs/tables that makes it of what is stored in `results`. On the page of a method, or of a package
of the API, it is `<!-- table: NAME of PAGE -->`. One whose results are not there says so, or is
left out with its heading.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from tables import (
    api,
    choosing,
    commands,
    cpu,
    criteria,
    first_screen,
    glue,
    gpu,
    lm,
    lm_cost,
    methods,
    minilm,
    model_cost,
    shaw_algorithms,
    translation,
)
from tables.results_folder import ResultsFolder

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- table: (\w+)(?: of (\w+))? -->\n).*?(<!-- end of table -->)", re.DOTALL)
TABLES: dict[str, Callable[[ResultsFolder], str]] = {
    table.__name__: table
    for table in (
        first_screen.first_numbers,
        commands.commands,
        choosing.choosing,
        methods.method_index,
        minilm.minilm,
        minilm.minilm_windows,
        minilm.minilm_fits,
        minilm.distilled,
        minilm.distilled_long,
        cpu.cpu_tisa,
        cpu.cpu_shaw,
        cpu.cpu_bars,
        shaw_algorithms.shaw_cpu,
        shaw_algorithms.shaw_gpu,
        gpu.gpu,
        gpu.gpu_short,
        gpu.gpu_findings,
        lm.lm_losses,
        lm.lm_paired,
        lm.lm_far,
        lm.lm_long,
        lm.lm_ablation,
        lm.lm_rates,
        lm.lm_toeplitz,
        lm.lm_setting,
        glue.glue_kept,
        glue.glue_dropped,
        glue.glue_won_back,
        glue.glue_setting,
        translation.translation_bleu,
        translation.translation_sure,
        translation.translation_pairs,
        translation.translation_clip,
        translation.translation_parts,
        translation.translation_lengths,
        translation.translation_rates,
        translation.translation_setting,
        glue.glue_search,
        glue.glue_chances,
        glue.glue_fitted,
        glue.glue_slides,
        model_cost.model_cost,
        model_cost.cost_findings,
        model_cost.first_call,
        model_cost.translation_cost,
        lm_cost.lm_bars,
        lm_cost.lm_alone,
        lm_cost.units_cost,
        criteria.criteria,
        criteria.criteria_findings,
        criteria.rules,
        criteria.differences,
        criteria.notes,
    )
}
OF_A_PAGE: dict[str, Callable[[ResultsFolder, str], str]] = {
    table.__name__: table
    for table in (
        api.api,
        methods.method_facts,
        methods.method_measured,
        methods.method_definition,
    )
}


def filled(text: str, stored: ResultsFolder) -> str:
    """The text with every table made anew."""

    def made(name: str, page: str | None) -> str:
        return TABLES[name](stored) if page is None else OF_A_PAGE[name](stored, page)

    return BLOCK.sub(lambda block: block[1] + made(block[2], block[3]) + block[4], text)


def main() -> int:
    """Write, or check, every Markdown file that has a table."""
    out_of_date = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]:
        text = path.read_text(encoding="utf-8")
        new = filled(text, ResultsFolder(ROOT))
        if new != text:
            out_of_date.append(path.relative_to(ROOT))
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if out_of_date and "--check" in sys.argv:
        names = ", ".join(map(str, out_of_date))
        print(f"out of date: {names}. Run python docs/make_tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
