"""Writes figures as PNG, SVG or PDF, such that equal figures give equal files."""

from io import BytesIO
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from whence.checks import one_of
from whence.files import write_bytes

FORMATS = ("png", "svg", "pdf")


def save_figure(figure: Figure, path: Path, *, dpi: int = 130) -> Path:
    """Write a figure as PNG, SVG or PDF, by the ending of the path; equal figures make equal files.

    >>> from pathlib import Path
    >>> from matplotlib.figure import Figure
    >>> save_figure(Figure(figsize=(2, 1)), Path("figure.svg")).name
    'figure.svg'
    """
    kind = path.suffix.removeprefix(".").lower()
    one_of("format of a figure", kind, FORMATS)
    if kind == "png":
        return save_png(figure, path, dpi=dpi)
    drawn = BytesIO()
    no_date = {"Date": None} if kind == "svg" else {"CreationDate": None}
    with matplotlib.rc_context({"svg.hashsalt": "whence", "svg.fonttype": "none"}):
        figure.savefig(drawn, format=kind, dpi=dpi, metadata=no_date)
    return write_bytes(path, drawn.getvalue())


def save_png(figure: Figure, path: Path, *, dpi: int = 130) -> Path:
    """Write a figure as PNG with 256 colours, which makes the file a third as large.

    The file names no software version, so that equal figures make equal files.

    >>> from pathlib import Path
    >>> from matplotlib.figure import Figure
    >>> save_png(Figure(figsize=(2, 1)), Path("figure.png"), dpi=50).name
    'figure.png'
    """
    drawn, packed = BytesIO(), BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi, metadata={"Software": None})
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(packed, format="PNG", optimize=True)
    return write_bytes(path, packed.getvalue())
