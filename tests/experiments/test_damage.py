"""A checkpoint that was damaged after it was marked as whole: the one before it is used."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lm_settings import same, text_file, tiny
from whence.analysis.lm_results import Language
from whence.experiments import LMConfig, run_lm
from whence.experiments.checkpoints import last_whole, mark_whole
from whence.experiments.progress import DamagedCheckpointWarning, OutOfTimeError

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
    "whole",
)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: tuple[Callable[[Path], None], ...] = (truncate, flip, empty, Path.unlink)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[LMConfig, Path, Language]:
    """A folder whose only job has the checkpoints 2 and 4, and what a whole run gives."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("damage")
    config = tiny(text_file(folder), steps=6, save_every=2, dropout=0.1)
    for _ in range(2):
        with pytest.raises(OutOfTimeError):
            run_lm(config, folder / "out", deadline=time.monotonic())
    return config, folder / "out", run_lm(config, folder / "whole")


def checkpoints(out: Path) -> Path:
    return out / "jobs" / "tisa.seed-0" / "checkpoints"


def test_the_files_of_a_checkpoint_are_those_that_are_damaged_here(
    stopped: tuple[LMConfig, Path, Language],
) -> None:
    found = sorted(checkpoints(stopped[1]).iterdir())
    assert [path.name for path in found] == ["checkpoint-2", "checkpoint-4"]
    assert sorted(path.name for path in found[1].iterdir()) == sorted(FILES)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES)
def test_damage_of_every_kind_to_every_file_is_found(
    stopped: tuple[LMConfig, Path, Language],
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], None],
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(checkpoints(stopped[1]), folder)
    assert last_whole(folder) == (4, folder / "checkpoint-4")
    damage(folder / "checkpoint-4" / name)
    said: list[str] = []
    found = last_whole(folder, damaged=said.append)
    if name == "whole" and damage is empty:  # as early versions marked them: all else is as it was
        assert found == (4, folder / "checkpoint-4")
        return
    assert found == (2, folder / "checkpoint-2")
    if name != "whole":
        assert f"checkpoint-4 is damaged: {name} is " in said[0]


def test_a_run_goes_on_from_the_one_before_with_equal_numbers_and_says_so(
    stopped: tuple[LMConfig, Path, Language], tmp_path: Path
) -> None:
    config, out, whole = stopped
    shutil.copytree(out, tmp_path / "out")
    flip(checkpoints(tmp_path / "out") / "checkpoint-4" / "optimizer.pt")
    with pytest.warns(
        DamagedCheckpointWarning,
        match="checkpoint-4 is damaged: optimizer.pt is not what was written; going on from checkpoint-2",
    ):
        same(run_lm(config, tmp_path / "out"), whole)


def test_a_run_whose_checkpoints_are_all_damaged_begins_anew(
    stopped: tuple[LMConfig, Path, Language], tmp_path: Path
) -> None:
    config, out, whole = stopped
    shutil.copytree(out, tmp_path / "out")
    for path in checkpoints(tmp_path / "out").iterdir():
        (path / "trainer_state.json").unlink()
    with pytest.warns(DamagedCheckpointWarning, match="training begins anew") as said:
        same(run_lm(config, tmp_path / "out"), whole)
    assert len(said) == 2


def test_a_damaged_checkpoint_with_the_mark_of_an_early_version_is_one_sentence(
    stopped: tuple[LMConfig, Path, Language], tmp_path: Path
) -> None:
    config, out, whole = stopped
    shutil.copytree(out, tmp_path / "out")
    last = checkpoints(tmp_path / "out") / "checkpoint-4"
    empty(last / "whole")
    truncate(last / "optimizer.pt")
    with pytest.raises(ValueError, match="checkpoint-4 cannot be read"):
        run_lm(config, tmp_path / "out")
    shutil.rmtree(last)
    same(run_lm(config, tmp_path / "out"), whole)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_checkpoint_is_on_the_disk_before_it_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    fsync, marks = os.fsync, []

    def noted(handle: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def marked(folder: Path, step: int) -> None:
        checkpoint = folder / f"checkpoint-{step}"
        written = {str(path) for path in (checkpoint, *checkpoint.iterdir())}
        marks.append(len(written))
        assert written <= synced, written - synced
        mark_whole(folder, step)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr("whence.experiments.monitor.mark_whole", marked)
    run_lm(tiny(text_file(tmp_path), steps=4), tmp_path / "out")
    assert marks == [len(FILES)]  # the folder itself, and all but the mark


@pytest.mark.parametrize("damage", [truncate, empty, lambda path: path.write_text("[]")])
def test_a_damaged_file_of_a_folder_is_named_with_the_way_out(
    stopped: tuple[LMConfig, Path, Language], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    config, out, whole = stopped
    shutil.copytree(out.parent / "whole", tmp_path / "out")
    out = tmp_path / "out"
    for name, way in [
        ("experiment.json", "Give another --out"),
        ("tokenizer.json", "Delete it, and one is trained anew"),
        ("jobs/tisa.seed-0/result.json", "Delete it to run the job again"),
    ]:
        kept = (out / name).read_bytes()
        damage(out / name)
        with pytest.raises(ValueError, match=f"{name} cannot be read .*{way}"):
            run_lm(config, out)
        (out / name).write_bytes(kept)
    damage(out / "lm.json")
    same(run_lm(config, out), whole)
    same(Language.load(out / "lm.json"), whole)
