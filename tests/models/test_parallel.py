"""Native models on two processes: data-parallel, sharded, and cut by heads, equal one process."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from models import SIZES, VOCAB, causal, seq2seq
from processes import run_two
from whence.models import (
    WhenceConfig,
    WhenceForCausalLM,
    WhenceForMaskedLM,
    WhenceForSequenceClassification,
)

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)
SCRIPT = Path(__file__).with_name("parallel.py")


def equal(cases: list[str], folder: Path) -> list[str]:
    """Both processes of a run; each meets the other over a file, so that no port is taken."""
    meeting = f"file://{folder / 'meeting'}"
    ends = run_two(str(SCRIPT), meeting, *cases, folder=folder)
    for end in ends:
        assert end.returncode == 0, end.stderr[-4000:]
    return ends[0].stdout.splitlines()


@pytest.mark.parametrize(
    "cases",
    [
        ("ddp;t5+tisa", "fsdp2+checkpointing;shaw+learned"),
        pytest.param(("fsdp1;t5+tisa", "fsdp2;t5+tisa"), marks=pytest.mark.slow),
        pytest.param(("fsdp2;floater",), marks=pytest.mark.slow),  # solves an equation each time
    ],
)
def test_data_parallel_and_sharded_training_equal_one_process(
    tmp_path: Path, cases: tuple[str, ...]
) -> None:
    """With accelerate's policy of what is wrapped: `_no_split_modules`, so the layers."""
    found = equal([f"{case};" for case in cases], tmp_path)
    assert len(found) == len(cases)


@pytest.mark.parametrize(
    "names",
    [
        ("tisa:kernels=3+rope", "shaw", "forget"),
        pytest.param(("t5", "fire", "learned", "floater"), marks=pytest.mark.slow),
    ],
)
def test_models_cut_by_heads_equal_one_process(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Logits, decoding and accumulated gradients; positions per head, shared, or of the content."""
    for name in names:
        causal(name, vocab_size=VOCAB + 1).save_pretrained(tmp_path / name)  # cut in two as well
    seq2seq("tisa+t5", vocab_size=VOCAB + 1).save_pretrained(tmp_path / "both")
    cases = [f"tp;{name};{tmp_path / name}" for name in names]
    cases.append(f"tp-seq2seq;tisa+t5;{tmp_path / 'both'}")
    assert len(equal(cases, tmp_path)) == len(cases)


def test_the_plan_names_every_matrix_that_is_cut() -> None:
    model = causal("tisa")
    plan = model.tp_plan
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        assert f"model.stack.layers.*.{part}" in plan
    assert plan["lm_head"] == "colwise_gather_output"
    assert not any("position" in key for key in plan)
    assert "WhenceLayer" in WhenceForCausalLM._no_split_modules


@pytest.mark.parametrize(
    "model",
    [
        lambda: causal("tisa", gated_mlp=False),
        lambda: causal("tisa", gated_mlp=True),
        lambda: seq2seq("tisa"),
        lambda: seq2seq("tisa", gated_mlp=False).model,
        lambda: WhenceForMaskedLM(WhenceConfig(**SIZES, head_transform=True)),
        lambda: WhenceForSequenceClassification(WhenceConfig(**SIZES, shared_layers=True)),
    ],
)
def test_the_plan_names_only_modules_that_are_there_and_every_matrix_of_a_layer(
    model: Callable[[], nn.Module],
) -> None:
    built = model()
    patterns = {x: re.compile(re.escape(x).replace(r"\*", r"\d+")) for x in built.tp_plan}
    modules = dict(built.named_modules())
    for text, pattern in patterns.items():
        assert any(pattern.fullmatch(name) for name in modules), text
    matrices = [name for name, x in modules.items() if ".layers." in name and type(x) is nn.Linear]
    assert matrices
    for name in matrices:
        assert any(pattern.fullmatch(name) for pattern in patterns.values()), name
