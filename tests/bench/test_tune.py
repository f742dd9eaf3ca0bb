"""`whence tune` and the table of tiles: built in, a user's own, and how the best is found."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton", reason="Triton is a Linux package")

from whence.bench import timing, tune
from whence.cli.root import app
from whence.kernels.fused import function, tiles, tiles_file
from whence.kernels.fused.plan import Plan
from whence.kernels.fused.tiles import Gpu, Tiles, TileSet, built_in, lookup, shrunk, tuned

HALF = torch.bfloat16
MINE = TileSet(Tiles(32, 64, 4, 3), Tiles(64, 32, 4, 2), Tiles(16, 64, 8, 1), 32)
CUDA = torch.device("cuda", 0)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Act as if there were one, with an empty cache folder; gives a function that names it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lookup.cache_clear()

    def named(name: str, capability: tuple[int, int], shared: int) -> None:
        monkeypatch.setattr(tiles, "gpu_of", lambda device: Gpu(name, capability, shared))

    named("Card", (8, 6), 99 << 10)
    yield named
    lookup.cache_clear()


def test_each_architecture_has_a_row_and_an_unknown_one_the_largest_that_fits() -> None:
    for capability, row in tiles.TABLE.items():
        assert built_in(64, HALF, capability, 0) == row.sizes[64]
        assert built_in(65, HALF, capability, 0) == row.sizes[128]
        assert built_in(256, torch.float32, capability, 0) == shrunk(row.sizes[256], 1)
    by_shared = {shared: built_in(128, HALF, (12, 1), shared) for shared in (228 << 10, 99 << 10)}
    assert by_shared[228 << 10] == tiles.TABLE[9, 0].sizes[128]
    assert by_shared[99 << 10] == tiles.TABLE[8, 6].sizes[128]
    assert built_in(128, HALF, (7, 5), 64 << 10) == tiles.TABLE[8, 6].sizes[128]


@pytest.mark.parametrize("capability", sorted(tiles.TABLE))
@pytest.mark.parametrize("width", [64, 128, 256])
def test_what_a_kernel_keeps_in_shared_memory_fits_the_row_s_gpu(
    capability: tuple[int, int], width: int
) -> None:
    shared, sizes = tiles.TABLE[capability]

    def kept(fixed: int, moving: int, stages: int) -> int:
        return 2 * width * (fixed + moving * stages)  # two bytes a number

    forward, by_rows, by_keys, _ = sizes[width]
    assert kept(forward.rows, 2 * forward.keys, forward.stages) <= shared
    assert kept(2 * by_rows.rows, 2 * by_rows.keys, by_rows.stages) <= shared
    assert kept(2 * by_keys.keys, 2 * by_keys.rows, by_keys.stages) <= shared


def test_a_user_s_file_comes_first_for_its_gpu_its_dtype_and_heads_up_to_its_sizes(
    on_a_gpu: Any, tmp_path: Path
) -> None:
    path = tiles_file.default_path()
    assert path == tmp_path / "whence" / "tiles.json"
    tune.write(path, "Card, sm86", {("bfloat16", 64): MINE})
    table = tiles.TABLE
    assert lookup(64, HALF, CUDA) == lookup(40, HALF, CUDA) == MINE
    assert lookup(80, HALF, CUDA) == table[8, 6].sizes[128]
    assert lookup(64, torch.float16, CUDA) == table[8, 6].sizes[64]
    lookup.cache_clear()
    on_a_gpu("Card", (9, 0), 227 << 10)  # the same name on another architecture
    assert lookup(64, HALF, CUDA) == table[9, 0].sizes[64]


def test_the_file_is_read_when_first_asked_for_and_may_be_named(
    on_a_gpu: Any, tmp_path: Path
) -> None:
    before = lookup(64, HALF, CUDA)
    tune.write(tiles_file.default_path(), "Card, sm86", {("bfloat16", 64): MINE})
    assert lookup(64, HALF, CUDA) == before  # not again in the same process
    other = tune.write(tmp_path / "mine.json", "Card, sm86", {("bfloat16", 64): MINE})
    assert lookup(64, HALF, CUDA, other) == MINE


def test_rows_are_added_to_a_file_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "a" / "tiles.json"
    other = MINE._replace(block=64)
    tune.write(path, "A, sm90", {("bfloat16", 64): MINE, ("float16", 64): MINE})
    tune.write(path, "B, sm80", {("bfloat16", 64): MINE})
    tune.write(path, "A, sm90", {("bfloat16", 64): other, ("bfloat16", 128): MINE})
    rows = tiles_file.read_all(path)
    assert tuned(64, HALF, rows["A, sm90"]) == other
    assert tuned(128, HALF, rows["A, sm90"]) == tuned(64, HALF, rows["B, sm80"]) == MINE
    assert tuned(64, torch.float16, rows["A, sm90"]) == MINE
    assert tuned(200, HALF, rows["A, sm90"]) is None
    assert [p.name for p in path.parent.iterdir()] == ["tiles.json"]


WHOLE = {part: [64, 64, 4, 2] for part in tiles_file.PARTS} | {"block": 64}
ODD_TILES: list[Any] = [
    [],
    [64, 64, 4],
    [64, 64, 4, 2, 1],
    [64.0, 64, 4, 2],
    [64, 64, True, 2],
    [64, 64, 3, 2],
    [64, 64, 4, 99],
    [-64, 64, 4, 2],
    "64",
    {},
    None,
]


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        '{"format": 2, "gpus": {}}',
        '{"format": 1, "gpus": {"A": {"bfloat16": {"64": {"forward": [128, 64, 4, 2]}}}}}',
        '{"format": 1, "gpus": {"A": {"bfloat16": {"64": {"forward": [96, 64, 4, 2], '
        '"by_rows": [64, 64, 4, 2], "by_keys": [64, 64, 4, 2], "block": 64}}}}}',
        *(
            json.dumps({"format": 1, "gpus": {"A": {"bfloat16": {size: row}}}})
            for size, row in [
                *(
                    (size, WHOLE)
                    for size in ("", "0", "-64", "64.0", "1e2", "257", "x", "9" * 5000)
                ),
                *(("64", {**WHOLE, "forward": tile}) for tile in ODD_TILES),
                *(("64", {**WHOLE, "block": side}) for side in (0, 96, 64.0, True, "64", None, [])),
                *(("64", row) for row in (None, 5, [], "x", {})),
            ]
        ),
        '{"format": true, "gpus": 5}',
        '{"format": 1, "gpus": {"A": 5}}',
        '{"format": 1, "gpus": {"A": {"bfloat16": 5}}}',
        "[" * 100_000,
        '{"format": ' + "9" * 5000 + "}",
        "\x00",
        b"\xff\xfe{}",
    ],
    ids=lambda text: f"{len(text)}-characters",
)
def test_a_broken_file_is_named_with_the_way_out(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "tiles.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=r"tiles\.json.* Delete .*tiles\.json, or write it anew"):
        tiles_file.read_all(path)
    assert tiles_file.read_all(tmp_path / "none.json") == {}


def test_a_relative_cache_folder_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert tiles_file.default_path() == Path.home() / ".cache" / "whence" / "tiles.json"


START = TileSet(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), 64)
BEST = TileSet(Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 3), Tiles(32, 64, 4, 2), 32)


def pretended(tiles: TileSet, mode: str) -> float:
    """BEST is the fastest; 128 x 128 would be faster still, but does not fit."""
    if any(part.rows * part.keys == 128 * 128 for part in tiles[:3]):
        raise RuntimeError("out of resource: shared memory\nmore")
    parts = (0,) if mode == "forward" else range(4)
    return 10.0 - sum(tiles[i] == BEST[i] for i in parts)


def test_the_best_tiles_are_found_part_by_part_and_those_that_do_not_fit_are_skipped() -> None:
    said: list[str] = []
    found = tune.fastest(START, pretended, say=said.append)
    assert found.tiles == BEST
    assert (found.ms_before, found.ms) == (10.0, 6.0)
    assert len(found.failed) == 3 * 3
    assert found.failed["forward 128x128x4x2"] == "RuntimeError: out of resource: shared memory"
    assert len(said) == tune.count(START)


def test_without_a_clear_gain_the_tiles_stay() -> None:
    noise = iter(range(10**6))
    found = tune.fastest(START, lambda tiles, mode: 10.0 - (next(noise) % 7) * 0.01)
    assert found.tiles == START

    def worse_together(tiles: TileSet, mode: str) -> float:
        changed = sum(a != b for a, b in zip(tiles, START, strict=True))
        return {0: 10.0, 1: 9.0}.get(changed, 8.0 - 0.1 * changed if mode == "both" else 9.0)

    calls: list[TileSet] = []

    def last_is_worse(tiles: TileSet, mode: str) -> float:
        calls.append(tiles)
        return 12.0 if len(calls) == tune.count(START) + 1 else worse_together(tiles, mode)

    found = tune.fastest(START, last_is_worse)
    assert (found.tiles, found.ms) == (START, 10.0)


def test_while_tiles_are_tried_every_launch_takes_them_and_fails_where_they_do_not_fit() -> None:
    import triton

    launched: list[TileSet] = []
    kind = (64, torch.float32, torch.device("cpu"))

    def refuses(_: TileSet) -> None:
        raise triton.runtime.errors.OutOfResources(300_000, 100_000, "shared memory")

    with function.trying(MINE):
        for purpose in ("forward", "backward"):
            tiles.TILES.fit(purpose, *kind, launched.append)
        with pytest.raises(triton.runtime.errors.OutOfResources):
            tiles.TILES.fit("forward", *kind, refuses)
    tiles.TILES.fit("forward", *kind, launched.append)
    assert launched == [MINE, MINE, tiles.INTERPRETER_TILES]


def test_plans_of_tiles_that_are_tried_are_made_anew_and_forgotten_after_an_error_too() -> None:
    plans, made = function.PLANS, []

    def make() -> Plan:
        made.append(1)
        return Plan(torch.device("cpu"), 0)

    def refused() -> None:
        with function.trying(MINE):
            plans.find("a call", make)
            raise ValueError("not exact")

    plans.find("a call", make)
    with pytest.raises(ValueError, match="not exact"):
        refused()
    plans.find("a call", make)
    assert len(made) == 3
    plans.forget()


def test_the_command_writes_the_file_after_each_size(
    on_a_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "on_this_gpu", lambda *_: pretended)
    monkeypatch.setattr(tune, "candidates", lambda part, start: [BEST[TileSet._fields.index(part)]])
    done = CliRunner().invoke(app, ["tune", "--head-sizes", "64,128", "--dtypes", "float16"])
    assert done.exit_code == 0, done.output
    assert "Card, sm86, float16, heads of 128: " in done.output
    path = tmp_path / "whence" / "tiles.json"
    assert done.output.splitlines()[-1] == f"wrote {path}"
    rows = json.loads(path.read_text())["gpus"]["Card, sm86"]["float16"]
    assert set(rows) == {"64", "128"}
    assert lookup(64, torch.float16, CUDA).forward == BEST.forward


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "tune needs an NVIDIA GPU, and there is none here."),
        (["--dtypes", "int8"], "Unknown dtype 'int8'"),
        (["--head-sizes", "64,300"], "--head-sizes takes whole numbers from 1 to 256"),
        (["--length", "0"], "must be positive"),
    ],
)
def test_without_a_gpu_or_with_bad_options_it_is_one_line(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["tune", *options])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.triton
def test_a_set_is_checked_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("run with TRITON_INTERPRET=1, as `make test` does")
    from whence.bench import exactness

    monkeypatch.setattr(timing, "timed", lambda step, *_, **__: step() and {"median": 1.0})
    timer = tune.on_this_gpu(16, "float32", 24, 24, 1, device="cpu")
    small = TileSet(Tiles(16, 16, 1, 1), Tiles(16, 32, 1, 1), Tiles(32, 16, 1, 1), 16)
    assert timer(small, "both") == timer(small, "forward") == 1.0
    monkeypatch.setattr(exactness, "ALLOWED", 0.0)
    with pytest.raises(ValueError, match="not exact: "):
        timer(small, "both")
