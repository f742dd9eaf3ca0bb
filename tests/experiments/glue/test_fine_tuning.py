"""`whence glue` end to end on small models: both forms, pace of the kernels, killed and gone on."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from glue_files import write_glue, write_model
from processes import free_port, run_two
from whence.analysis.glue_results import Glue
from whence.experiments.glue.config import GlueConfig
from whence.experiments.glue.data import prepared
from whence.experiments.glue.encoded import Padded
from whence.experiments.glue.job import Run, runs
from whence.experiments.glue.model import new_model
from whence.experiments.glue.sweep import GlueSweep, run_glue
from whence.experiments.glue.tasks import TASKS
from whence.experiments.glue.training import FineTuner, _arguments, n_steps
from whence.experiments.progress import OutOfTimeError
from whence.hf.attaching import attached


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of three kinds of task, and a model."""
    folder = tmp_path_factory.mktemp("glue")
    write_glue(folder / "data", "cola", "stsb", "mnli")
    write_model(folder / "bert")
    write_model(folder / "albert", "albert")
    return folder


def tiny(files: Path, **changes: object) -> GlueConfig:
    options = {
        "model": str(files / "bert"),
        "data": str(files / "data"),
        "tasks": ("cola",),
        "kernels": (0, 2),
        "seeds": 1,
        "epochs": 1.0,
        "batch": 4,
        "learning_rate": 1e-3,
        "max_length": 16,
        "device": "cpu",
    }
    return GlueConfig(**(options | changes))  # type: ignore[arg-type]


def same(one: Glue, other: Glue) -> None:
    assert len(one.jobs) == len(other.jobs) > 0
    for a, b in zip(one.jobs, other.jobs, strict=True):
        assert (a.task, a.form, a.kernels, a.seed) == (b.task, b.form, b.kernels, b.seed)
        assert a.score == b.score
        np.testing.assert_array_equal(a.train_loss, b.train_loss)
        for first, second in zip(a.curves, b.curves, strict=True):
            np.testing.assert_array_equal(first.after, second.after)


def test_albert_goes_through_both_forms_of_every_kind_of_task(files: Path, tmp_path: Path) -> None:
    """Shared layers and factorized embeddings: no other code for the model of the slides."""
    tasks = ("stsb", "mnli")
    config = tiny(files, model=str(files / "albert"), tasks=tasks, forms=("a", "b"), batch=6)
    found = run_glue(config, tmp_path / "out")
    assert len(found.jobs) == 8
    assert all(job.score is not None and not job.stopped for job in found.jobs)
    for job in found.jobs:
        n_layers, n_heads = 3, 4
        assert job.positional == (3 * n_layers * n_heads * 2 if job.kernels else 0)
        assert len(job.curves) == (n_layers if job.kernels else 0)
        for view in job.curves:
            assert not view.before.any()  # start=zero
            assert view.after.any()
    (mnli,) = (x for x in found.jobs if (x.task, x.form, x.kernels) == ("mnli", "a", 0))
    assert [part.split for part in mnli.scores] == ["matched", "mismatched"]
    assert mnli.score == pytest.approx(np.mean([p.metrics["accuracy"] for p in mnli.scores]))
    assert Glue.load(tmp_path / "out" / "glue.json").to_json() == found.to_json()


def test_forms_and_kernels_begin_as_they_should(files: Path) -> None:
    config = tiny(files)
    ids = torch.tensor([[2, 4, 5, 6, 7, 3], [2, 7, 6, 5, 4, 3]])  # the same words, turned around

    def said(form: str, kernels: int) -> torch.Tensor:
        model = new_model(config, TASKS["cola"], form=form, kernels=kernels, seed=0)
        with torch.no_grad():
            return model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits

    plain, with_kernels = said("a", 0), said("a", 2)
    torch.testing.assert_close(with_kernels, plain, rtol=0, atol=0)
    bare, bare_with = said("b", 0), said("b", 2)
    torch.testing.assert_close(bare_with, bare)
    torch.testing.assert_close(bare[0], bare[1])  # without positions the order is not seen
    assert (plain[0] - plain[1]).abs().max() > 1e-4


def test_kernels_have_a_learning_rate_of_their_own_and_no_decay(
    files: Path, tmp_path: Path
) -> None:
    config = tiny(files, learning_rate=1e-4, position_rate=3e-2)
    model = new_model(config, TASKS["cola"], form="b", kernels=2, seed=0)
    arguments = _arguments(config, "cola", 12, tmp_path, seed=0, device=torch.device("cpu"))
    trainer = FineTuner(model, arguments, position_rate=config.position_rate)
    groups = trainer.create_optimizer().param_groups
    assert [group["lr"] for group in groups] == [1e-4, 1e-4, 3e-2]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0, 0.0]
    handle = attached(model)
    assert handle is not None
    own = {id(p) for method in handle.methods if method is not None for p in method.parameters()}
    assert {id(p) for p in groups[2]["params"]} == own
    every = [id(p) for group in groups for p in group["params"]]
    assert len(every) == len(set(every)) == sum(p.requires_grad for p in model.parameters())


def test_jobs_come_seed_by_seed_and_the_longest_task_first(files: Path) -> None:
    exceptions = {"mnli": {"seeds": 1.0}}
    config = tiny(files, tasks=("cola", "mnli"), seeds=2, exceptions=exceptions)
    found = runs(config, {"cola": 10, "mnli": 1000})
    assert [(run.task, run.kernels, run.seed) for run in found] == [
        ("mnli", 0, 0),
        ("mnli", 2, 0),
        ("cola", 0, 0),
        ("cola", 2, 0),
        ("cola", 0, 1),
        ("cola", 2, 1),
    ]
    assert n_steps(config, "cola", 13) == 4


def test_a_run_whose_time_is_spent_goes_on_and_ends_with_the_same_numbers(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(files, kernels=(0, 1), epochs=4.0, forms=("b",))
    whole = run_glue(config, tmp_path / "whole")
    out, clock = tmp_path / "out", {"looks": 0}

    def soon() -> float:
        clock["looks"] += 1
        return 0.0 if clock["looks"] < 9 else 1e9

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", soon)
        with pytest.raises(OutOfTimeError, match="0 of 2 jobs are done"):
            run_glue(config, out, deadline=1.0)
    assert list(out.glob("jobs/*/checkpoints/checkpoint-*"))
    same(run_glue(config, out), whole)
    assert not list(out.glob("jobs/*/checkpoints"))


def test_a_job_killed_after_its_last_checkpoint_is_scored_from_it(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(files, forms=("b",), kernels=(0, 2), save_every=1)
    whole = run_glue(config, tmp_path / "whole")
    sweep = GlueSweep(config, tmp_path / "out")
    run = Run("cola", "b", 2, 0)

    def killed(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("whence.experiments.glue.job.scored", killed)
        with pytest.raises(KeyboardInterrupt):
            sweep.run(run, sweep.folder(run), say=lambda *_: None, deadline=None, side_by_side=1)
    assert (sweep.folder(run) / "checkpoints").is_dir()
    same(run_glue(config, tmp_path / "out"), whole)


@pytest.mark.slow  # tests/experiments/test_sweep.py has the workers of every sweep
def test_workers_give_the_numbers_of_one_process(files: Path, tmp_path: Path) -> None:
    config = tiny(files)
    same(run_glue(config, tmp_path / "two", workers=2), run_glue(config, tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("local_ray")
def test_a_sweep_on_ray_gives_the_numbers_of_one_process(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    config = tiny(files, model="bert", data="data", forms=("b",))  # from the folder it began in
    said: list[str] = []
    parallel = run_glue(
        config, tmp_path / "ray", ray="local", say=lambda what, share: said.append(what)
    )
    same(parallel, run_glue(config, tmp_path / "one"))
    assert said[1:] == ["1 of 2 jobs done", "2 of 2 jobs done"]


def test_rows_in_tokens_are_read_again_unless_they_changed(files: Path, tmp_path: Path) -> None:
    data = write_glue(tmp_path / "data", "cola")
    config = tiny(files, data=str(data))
    prepared(config, tmp_path / "out")
    path = tmp_path / "out" / "tokens" / "cola.safetensors"
    first = path.stat().st_mtime_ns
    prepared(config, tmp_path / "out")
    assert path.stat().st_mtime_ns == first
    rows = data / "CoLA" / "train.tsv"
    rows.write_text(rows.read_text() + "gj04\t1\t*\tthe old cat\n")
    found = prepared(config, tmp_path / "out")
    assert path.stat().st_mtime_ns != first
    assert len(found.tasks["cola"].train) == 13


def test_results_of_other_rows_are_refused(files: Path, tmp_path: Path) -> None:
    data = write_glue(tmp_path / "data", "cola")
    config = tiny(files, data=str(data), kernels=(0,))
    run_glue(config, tmp_path / "out")
    rows = data / "CoLA" / "train.tsv"
    rows.write_text(rows.read_text() + "gj04\t1\t*\tthe old cat\n")
    with pytest.raises(ValueError, match="has a result of other rows of cola"):
        run_glue(config, tmp_path / "out")
    with pytest.raises(ValueError, match="holds another experiment: learning_rate is"):
        run_glue(replace(config, learning_rate=2e-3), tmp_path / "out")


def test_results_keep_their_machine_and_a_damaged_file_is_written_anew(
    files: Path, tmp_path: Path
) -> None:
    config, out = tiny(files, kernels=(0,)), tmp_path / "out"
    run_glue(config, out, machine={"gpu": "first"})
    again = run_glue(config, out, machine={"gpu": "second"})  # nothing is trained
    assert again.machine == {"gpu": "first"}
    other = run_glue(replace(config, kernels=(0, 1)), out, machine={"gpu": "second"})
    assert other.machine == {"gpu": "second"}
    (out / "glue.json").write_text("{")
    found = run_glue(replace(config, kernels=(0, 1)), out, machine={"gpu": "third"})
    assert len(found.jobs) == 2
    assert found.machine == {"gpu": "third"}
    assert Glue.load(out / "glue.json").to_json() == found.to_json()


def test_more_seeds_of_a_task_go_into_the_same_folder(files: Path) -> None:
    config = tiny(files, exceptions={"cola": {"epochs": 2.0}})
    more = replace(
        config, exceptions={"cola": {"epochs": 2.0, "seeds": 3.0}, "mnli": {"seeds": 2.0}}
    )
    assert more.fixed() == config.fixed()
    longer = replace(config, exceptions={"cola": {"epochs": 3.0}})
    assert longer.fixed() != config.fixed()


def test_a_batch_is_padded_to_its_longest_row(files: Path, tmp_path: Path) -> None:
    rows = prepared(tiny(files), tmp_path / "out").tasks["cola"].train
    lengths = rows.lengths.tolist()
    batch = Padded(0, regression=False)([rows[0], rows[1]])
    assert batch["input_ids"].shape == (2, 8 if max(lengths[:2]) <= 8 else 16)
    assert batch["attention_mask"].sum(dim=1).tolist() == lengths[:2]
    assert batch["labels"].tolist() == [0, 1]
    assert Padded(0, regression=True)([rows[1]])["labels"].dtype == torch.float32


def test_kernels_may_begin_fitted_to_the_models_own_table(files: Path, tmp_path: Path) -> None:
    config = tiny(files, forms=("a", "b"), start="distilled", position_rate=1e-9)
    found = {(job.form, job.kernels): job for job in run_glue(config, tmp_path / "out").jobs}
    assert not any(view.before.any() for view in found["a", 2].curves)  # silent beside the table
    fitted = found["b", 2].curves
    assert len(fitted) == 2
    for view in fitted:
        assert np.abs(view.before).max() > 0.01
        np.testing.assert_allclose(view.after, view.before, atol=1e-4)  # at so small a rate
    start = tmp_path / "out" / "start"
    assert sorted(path.name for path in start.iterdir()) == ["form-a.kernels-2", "form-b.kernels-2"]
    model = new_model(
        config, TASKS["cola"], form="b", kernels=2, seed=0, start=start / "form-b.kernels-2"
    )
    plain = new_model(config, TASKS["cola"], form="b", kernels=0, seed=0)
    torch.testing.assert_close(model.classifier.weight, plain.classifier.weight)


@pytest.mark.slow  # tests/experiments/test_killed.py has two processes of the same training
def test_two_processes_of_torchrun_train_as_one(files: Path, tmp_path: Path) -> None:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = write_model(tmp_path / "bert", **no_dropout)
    config = tiny(files, model=str(model), forms=("b",))
    one = run_glue(config, tmp_path / "one")
    fixed = "--forms b --tasks cola --kernels 0,2 --seeds 1 --epochs 1 --batch 4 --max-length 16"
    command = ["-m", "whence", "glue", *fixed.split(), "--device", "cpu", "--learning-rate", "1e-3"]
    command += [
        "--model",
        str(model),
        "--data",
        str(files / "data"),
        "--out",
        str(tmp_path / "two"),
    ]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ends = run_two(*command, folder=tmp_path, **meeting)
    for end in ends:
        assert end.returncode == 0, end.stderr[-3000:]
    assert "page.html" in ends[0].stdout
    assert ends[1].stdout == ""  # the first one alone speaks
    two = Glue.load(tmp_path / "two" / "glue.json")
    for a, b in zip(two.jobs, one.jobs, strict=True):
        np.testing.assert_allclose(a.train_loss, b.train_loss, atol=1e-4)
