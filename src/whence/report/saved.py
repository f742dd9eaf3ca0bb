"""A figure on disk, whole or not at all."""

import os
import tempfile
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image


def save_png(figure: Figure, path: Path, *, dpi: int = 130) -> Path:
    """Write the figure under a temporary name beside `path`, then rename it: no reader sees half.

    The folder is made if it is missing. A palette of 256 colours makes the file a third as large;
    no software version goes in: equal figures, equal files.
    """
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi, metadata={"Software": None})
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".png", prefix=f".{path.stem}-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            image.save(file, format="PNG", optimize=True)
        temporary.chmod(0o644)  # mkstemp's files are for their owner alone
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
