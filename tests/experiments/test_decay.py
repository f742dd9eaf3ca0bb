"""Weight decay: it falls on weights and tables of vectors, not on numbers of a logit's size."""

from pathlib import Path

import torch

from lm_settings import text_file, tiny
from whence.experiments.lm.data import prepared
from whence.experiments.lm.training import new_model, train
from whence.experiments.trainer import PositionTrainer
from whence.method import PositionMethod

METHOD = "tisa+t5+shaw"


def positions(folder: Path, weight_decay: float, rate: float) -> dict[str, torch.Tensor]:
    """The parameters of the position after training, by name."""
    config = tiny(text_file(folder), steps=2, warmup=0, weight_decay=weight_decay)
    source = prepared(config, folder / f"out-{weight_decay}")
    where = folder / f"run-{weight_decay}"
    done = train(config, METHOD, 0, source, where, learning_rate=rate, say=lambda what, share: None)
    named = done.model.model.stack.position.named_parameters()
    return {name: parameter.detach() for name, parameter in named}


def test_decay_spares_numbers_of_a_logits_size_and_falls_on_tables_of_vectors(
    tmp_path: Path,
) -> None:
    """The rate is so small that gradients move nothing; decay alone is rate x decay = 0.1 a step."""
    rate, huge = 1e-12, 1e11
    without, decayed = positions(tmp_path, 0.0, rate), positions(tmp_path, huge, rate)
    sized = [name for name in without if "tisa" in name or "t5" in name]
    vectors = [name for name in without if "shaw" in name]
    assert sized
    assert vectors
    for name in sized:
        torch.testing.assert_close(decayed[name], without[name], rtol=0, atol=1e-9)
    for name in vectors:
        shrunk = decayed[name].norm() / without[name].norm()
        assert 0.75 < float(shrunk) < 0.95  # twice 0.9, or less under a cosine


def test_what_decays_is_all_that_the_library_lets_decay_but_logit_sized_parameters() -> None:
    from transformers import Trainer

    model = new_model(tiny(None, task="copy"), METHOD, 0, 66)
    theirs = Trainer.get_decay_parameter_names(None, model)
    ours = PositionTrainer.get_decay_parameter_names(
        PositionTrainer.__new__(PositionTrainer), model
    )
    spared = {
        id(p)
        for module in model.modules()
        if isinstance(module, PositionMethod) and module.logit_sized
        for p in module.parameters()
    }
    named = dict(model.named_parameters())
    assert [name for name in theirs if id(named.get(name)) not in spared] == ours
    assert len(ours) < len(theirs)
