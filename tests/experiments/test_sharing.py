"""`whence lm` by several processes in one folder: no harm to each other, and no speed shown."""

import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from lm_jobs import job, results
from lm_settings import assert_same_numbers, same, text_file, tiny
from processes import run
from whence.analysis.lm_results import Language, ranked
from whence.experiments import run_lm, run_one
from whence.experiments.lm.results import Run, run_folder
from whence.experiments.progress import OutOfTimeError
from whence.report.lm_page import make_lm_page
from whence.report.lm_report import LM_REPORT

SCRIPT = Path(__file__).resolve().with_name("sharing.py")


def test_processes_that_share_a_folder_run_each_job_once_with_the_numbers_of_one(
    tmp_path: Path,
) -> None:
    text_file(tmp_path)
    done = run(str(SCRIPT), str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split()) == ["rope", "tisa", "tokenizer"]  # each done by one of three
    alone, shared = (Language.load(tmp_path / name / "lm.json") for name in ("alone", "shared"))
    same(shared, alone)
    assert [one.side_by_side for one in alone.jobs] == [1, 1]
    assert [one.side_by_side for one in shared.jobs] == [3, 3]


def test_a_job_that_another_process_is_at_is_waited_for_until_the_time_is_spent(
    tmp_path: Path,
) -> None:
    config, out = tiny(text_file(tmp_path)), tmp_path / "out"
    folder = run_folder(config, out, Run("tisa", 0, 1e-3))
    folder.mkdir(parents=True)
    (out / "jobs").rename(tmp_path / "jobs")
    run_one(config, "rope", 0, out)
    (tmp_path / "jobs" / folder.name).rename(folder)
    said: list[str] = []
    with FileLock(folder / ".lock"), pytest.raises(OutOfTimeError, match="another process works"):
        run_one(
            config,
            "tisa",
            0,
            out,
            say=lambda what, share: said.append(what),
            deadline=time.monotonic() + 0.2,
        )
    assert said == ["waiting for another process that is at it"]
    with FileLock(folder / ".lock"), pytest.raises(OutOfTimeError, match="0 of 1 jobs are done"):
        run_lm(config, out, deadline=time.monotonic() + 0.2)
    assert run_one(config, "tisa", 0, out).method == "tisa"
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        run_one(config, "tisa", -1, out)
    with pytest.raises(ValueError, match="side_by_side must be at least 1, got 0"):
        run_lm(config, out, side_by_side=0)


def test_a_run_that_shared_the_device_for_a_while_has_no_speed_of_its_own(tmp_path: Path) -> None:
    config, out = tiny(text_file(tmp_path)), tmp_path / "out"
    with pytest.raises(OutOfTimeError):
        run_lm(config, out, side_by_side=2, deadline=time.monotonic())
    found = run_lm(config, out)  # alone from here on
    assert found.jobs[0].side_by_side == 2
    assert ranked(found)[0].tokens_a_second is None
    assert_same_numbers(found.jobs[0], run_lm(config, tmp_path / "whole").jobs[0])


@pytest.mark.parametrize("form", ["markdown", "latex", "page"])
def test_tables_leave_out_a_speed_that_is_not_the_methods(form: str) -> None:
    def shown(*sharing: int) -> str:
        jobs = [
            job(
                f"m{place}", 0, {16: 2.0 + place, 32: 3.0}, side_by_side=n, tokens_a_second=98_761.0
            )
            for place, n in enumerate(sharing)
        ]
        found = results(*jobs)
        return make_lm_page(found) if form == "page" else LM_REPORT.formatted(found, form)

    note = "No speed is given of runs that shared the device, up to"
    alone, some, none = shown(1, 1), shown(1, 3), shown(3, 2)
    assert alone.count("98,761") == 2
    assert note not in alone
    assert some.count("98,761") == 1
    assert "tokens/s" in some
    assert f"{note} 3 at a time" in some
    assert "98,761" not in none
    assert "tokens/s" not in none
    assert f"{note} 3 at a time" in none


def test_jobs_that_share_the_cores_of_a_machine_on_ray_are_counted() -> None:
    from whence.experiments.on_ray import _room

    nodes: list[dict[str, Any]] = [
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
        {"Alive": True, "Resources": {}},
    ]
    assert _room(nodes, 2) == 4
    assert _room([], 2) == 1
