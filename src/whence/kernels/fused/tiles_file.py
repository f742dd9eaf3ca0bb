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
SIDES = (16, 32, 64, 128)  # larger ones would look beyond the edges of a band
WARPS, STAGES = (1, 2, 4, 8, 16), range(1, 9)
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
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    way_out = f"Delete {path}, or write it anew with `whence tune`."
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        raise ValueError(f"{path} is no table of tile sizes: it is not JSON. {way_out}") from None
    try:
        given = _table(data, "it")
        require(given.get("format") == FORMAT, f"its format is not {FORMAT}")
        gpus = _table(given.get("gpus"), "gpus")
        return {gpu: _rows(dtypes, gpu) for gpu, dtypes in gpus.items()}
    except ValueError as error:
        raise ValueError(f"{path} is no table of tile sizes: {error}. {way_out}") from None


def _table(found: Any, where: str) -> dict[str, Any]:
    require(isinstance(found, dict), f"{where} is no JSON object")
    table: dict[str, Any] = found
    return table


def _rows(found: Any, where: str) -> Rows:
    rows: Rows = {}
    for dtype, sizes in _table(found, where).items():
        here = f"{where}, {dtype}"
        rows[dtype] = {
            _size(size, here): _row(row, f"{here}, {size}")
            for size, row in _table(sizes, here).items()
        }
    return rows


def _size(text: str, where: str) -> int:
    size = int(text) if text.isdecimal() and len(text) <= 3 else 0
    require(1 <= size <= 256, f"{where} has the head size {text!r}, which must be 1 to 256")
    return size


def _row(found: Any, where: str) -> Row:
    """The row, checked: ValueError if the kernels could not be compiled with it."""
    row = _table(found, where)
    for part in PARTS:
        tile = row.get(part)
        whole = isinstance(tile, list) and len(tile) == 4 and all(type(x) is int for x in tile)
        require(whole, f"{where} has {part} = {tile!r}, which must be four whole numbers")
        assert isinstance(tile, list)
        rows, keys, warps, stages = tile
        given = f"{where} has {part} = {tile}"
        require(rows in SIDES and keys in SIDES, f"{given}, but rows and keys must be in {SIDES}")
        require(warps in WARPS, f"{given}, but warps must be in {WARPS}")
        require(stages in STAGES, f"{given}, but stages must be 1 to {STAGES[-1]}")
    block = row.get("block")
    fits = type(block) is int and block in SIDES
    require(fits, f"{where} has block = {block!r}, but it must be in {SIDES}")
    return row
