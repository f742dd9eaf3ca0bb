"""What `whence glue` leaves to look at: the tables in two forms, and the learned curves."""

from pathlib import Path

from whence.analysis.glue_results import Glue
from whence.checks import require
from whence.files import write_text
from whence.report.glue_table import formatted


def write_glue_report(results: Glue, out: Path) -> Path:
    """table.md and table.tex into a folder, each whole or not at all."""
    require(
        len(results.jobs) > 0,
        f"{out} has no finished job yet: the whence glue that began there goes on with it.",
    )
    write_text(out / "table.tex", f"{formatted(results, 'latex')}\n")
    return write_text(out / "table.md", f"{formatted(results, 'markdown')}\n")
