"""Native models under `transformers.Trainer`, and the example."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    set_seed,
)

from models import SIZES, VOCAB
from processes import run
from whence.models import (
    WhenceConfig,
    WhenceForCausalLM,
    WhenceForConditionalGeneration,
    WhenceForSequenceClassification,
    WhenceSeq2SeqConfig,
)

ROOT = Path(__file__).resolve().parents[2]


def trainer(model: Any, data: list[Any], folder: Path, **more: Any) -> Trainer:
    options: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    collator = more.pop("data_collator", None)
    arguments = TrainingArguments(output_dir=str(folder), **{**options, **more})
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collator)


def texts(n: int = 8, length: int = 12) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(2, VOCAB, (n, length))
    return [{"input_ids": row, "labels": row} for row in ids]


def losses(run: Trainer) -> list[float]:
    run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def causal_lm(**more: Any) -> WhenceForCausalLM:
    set_seed(0)
    return WhenceForCausalLM(WhenceConfig(**{"position": "tisa:kernels=3+rope", **SIZES, **more}))


def test_it_learns_and_evaluates_and_saves(tmp_path: Path) -> None:
    run = trainer(causal_lm(), texts(), tmp_path, max_steps=30)
    found = losses(run)
    assert found[-1] < found[0] - 0.5
    assert run.evaluate()["eval_loss"] < found[0]
    run.save_model(tmp_path / "saved")
    loaded = WhenceForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.randint(2, VOCAB, (1, 5))
    torch.testing.assert_close(loaded(ids).logits, run.model.eval()(ids).logits)


@pytest.mark.parametrize("uneven", [False, True])
def test_accumulated_batches_give_the_losses_of_whole_ones(uneven: bool, tmp_path: Path) -> None:
    data = texts()
    if uneven:  # a mean of means would not be the mean
        data = [
            {
                "input_ids": d["input_ids"],
                "labels": d["labels"].index_fill(0, torch.arange(i), -100),
            }
            for i, d in enumerate(data)
        ]
    whole = losses(trainer(causal_lm(), data, tmp_path, max_steps=4))
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    parts = losses(trainer(causal_lm(), data, tmp_path, max_steps=4, **options))
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "more", [{"bf16": True}, {"gradient_checkpointing": True}], ids=["bf16", "checkpointing"]
)
def test_half_precision_and_checkpoints_train_alike(more: dict[str, Any], tmp_path: Path) -> None:
    data = texts()
    plain = losses(trainer(causal_lm(), data, tmp_path))
    other = losses(trainer(causal_lm(), data, tmp_path, **more))
    torch.testing.assert_close(other, plain, rtol=2e-2, atol=2e-2)


def test_a_classifier_and_an_encoder_decoder_train(tmp_path: Path) -> None:
    set_seed(0)
    config = WhenceConfig(position="t5", num_labels=2, pad_token_id=0, **SIZES)
    data = [{"input_ids": d["input_ids"], "labels": d["input_ids"][0] % 2} for d in texts()]
    found = losses(trainer(WhenceForSequenceClassification(config), data, tmp_path, max_steps=25))
    assert found[-1] < 0.7 * found[0]

    model = WhenceForConditionalGeneration(WhenceSeq2SeqConfig(position="tisa", **SIZES))

    class Padder:  # the two names of a tokenizer that the collator asks for
        padding_side = "right"

        def pad(self, features: list[Any], **_: Any) -> dict[str, Any]:
            return {k: torch.tensor([f[k] for f in features]) for k in features[0]}

    collator = DataCollatorForSeq2Seq(Padder(), model=model)
    lists = [{key: value.tolist() for key, value in d.items()} for d in texts()]
    run = trainer(model, lists, tmp_path, max_steps=25, data_collator=collator)
    found = losses(run)
    assert found[-1] < found[0] - 0.3


def test_freezing_all_but_position_trains_position_alone(tmp_path: Path) -> None:
    model = causal_lm()
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(".position." in key)
    trainer(model, texts(), tmp_path).train()
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, before[key]) == (".position." not in key)


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    script = ROOT / "examples" / "causal_lm_tisa_rope.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) < 40
    done = run(str(script), folder=tmp_path, refused=FutureWarning)
    assert done.returncode == 0, done.stderr
    assert "Attention counts the lag from the query; the key is where" in done.stdout
