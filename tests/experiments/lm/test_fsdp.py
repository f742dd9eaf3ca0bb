"""`whence lm --fsdp`: weights cut up over processes give the loss curve of one, also after a kill."""

import os
from pathlib import Path

import pytest
import torch

from lm_settings import flags, text_file, tiny
from processes import free_port, run_two
from whence.analysis.lm_results import Language
from whence.experiments import run_lm
from whence.experiments.lm.training import check_fsdp

SCRIPT = Path(__file__).resolve().with_name("fsdp.py")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes would take one GPU")
def test_two_processes_under_fsdp_have_the_loss_curve_of_one_though_they_were_killed(
    tmp_path: Path,
) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    config = tiny(text_file(tmp_path), ("tisa+learned",))
    one = run_lm(config, tmp_path / "one").jobs[0]
    command = [str(SCRIPT), ",".join((free_port(), free_port())), "lm"]
    command += [*flags(config), "--fsdp", "--keep-models", "--out", str(tmp_path / "two")]
    ends = run_two(*command, folder=tmp_path, MASTER_ADDR="127.0.0.1")
    for end in ends:
        assert end.returncode == 0, end.stderr[-3000:]
        assert "killed at step 6, went on from 4, sharded" in end.stdout
    two = Language.load(tmp_path / "two" / "lm.json").jobs[0]
    near = {"rtol": 0.0, "atol": 1e-4}
    torch.testing.assert_close(two.train_loss.tolist(), one.train_loss.tolist(), **near)
    assert two.steps.tolist() == one.steps.tolist()
    assert two.parameters == one.parameters
    for a, b in zip(two.losses, one.losses, strict=True):
        torch.testing.assert_close(a.loss, b.loss, **near)
    for x, y in zip(two.toeplitz, one.toeplitz, strict=True):
        torch.testing.assert_close((x.step, x.table.r2), (y.step, y.table.r2), **near)
    folder = tmp_path / "two" / "jobs" / "tisa-learned.seed-0"
    assert {path.name for path in folder.iterdir()} == {".lock", "model", "result.json"}


def test_fsdp_is_refused_where_it_would_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate takes it for GPUs alone, and elsewhere runs on without a word."""
    with pytest.raises(ValueError, match="on CPUs accelerate keeps all weights in every process"):
        check_fsdp(torch.device("cpu"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ValueError, match="start with torchrun"):
        check_fsdp(torch.device("cuda"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_fsdp(torch.device("cuda"))


@pytest.mark.parametrize("sharded", [True, False])
def test_a_checkpoint_is_gone_on_from_as_it_was_written(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whence.experiments.lm.training.check_fsdp", lambda device: None)
    checkpoint = tmp_path / "out" / "jobs" / "tisa.seed-0" / "checkpoints" / "checkpoint-4"
    config = tiny(text_file(tmp_path), fsdp=not sharded)
    from whence.experiments.lm.data import prepared

    prepared(config, tmp_path / "out")
    checkpoint.mkdir(parents=True)
    for name in ("whole", *(["pytorch_model_fsdp.bin"] if sharded else [])):
        (checkpoint / name).touch()
    was = "written with --fsdp" if sharded else "written without --fsdp"
    with pytest.raises(ValueError, match=f"checkpoint-4 was {was}"):
        run_lm(config, tmp_path / "out")
    assert sorted(os.listdir(checkpoint))[-1] == "whole"
