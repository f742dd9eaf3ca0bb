"""A user's own tile sizes, measured by `whence tune`: where the file lies, and what it must hold.

    {"format": 1, "gpus": {"NVIDIA H200, sm90": {"bfloat16": {"64": {
        "forward": [128, 64, 4, 2], "by_rows": [...], "by_keys": [...], "block": 64}}}}}

The keys are the GPU, the dtype and the largest head size that a row is for. The four numbers are
rows, keys, warps and stages of a tile.
"""

import json
import os
from pathlib import Path
from typing import Any

from whence.checks import require

FORMAT = 1
PARTS = ("forward", "by_rows", "by_keys")
Row = dict[str, Any]
Rows = dict[str, dict[int, Row]]  # by dtype and head size


def default_path() -> Path:
    """tiles.json in the user's cache folder, by the XDG rules: a relative folder does not count."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = given if given.is_absolute() else Path.home() / ".cache"
    return folder / "whence" / "tiles.json"


def gpu_key(name: str, capability: tuple[int, int]) -> str:
    """The key of a GPU: its name and its architecture, which the name alone does not tell."""
    return f"{name}, sm{capability[0]}{capability[1]}"


def read_all(path: Path) -> dict[str, Rows]:
    """The rows of every GPU, none if there is no file; a file of another form is an error."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    way_out = f"Delete {path}, or write it anew with `whence tune`."
    try:
        data = json.loads(text)
        require(data["format"] == FORMAT, f"{path} has another format than {FORMAT}. {way_out}")
        return {
            gpu: {
                dtype: {int(size): row for size, row in sizes.items() if _checked(row)}
                for dtype, sizes in dtypes.items()
            }
            for gpu, dtypes in data["gpus"].items()
        }
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no table of tile sizes. {way_out}") from error


def _checked(row: Row) -> bool:
    """Whether the kernels can be compiled with this row; a missing or wrong field also raises."""
    sides = [row["block"]]
    for part in PARTS:
        rows, keys, warps, stages = row[part]
        sides += [rows, keys]
        if warps not in (1, 2, 4, 8, 16) or stages not in range(1, 9):
            raise TypeError("warps or stages")
    for side in sides:
        if side not in (16, 32, 64, 128):  # larger tiles would read beyond a laid-out band
            raise TypeError("a side is a power of two from 16 to 128")
    return True
