"""The learning rate of learned biases."""

from pathlib import Path

import pytest
import torch

from lm_settings import assert_same_numbers, text_file, tiny
from whence.experiments import run_one
from whence.experiments.folder import prepared
from whence.experiments.rates import apart
from whence.experiments.training import OutOfTimeError, new_model, train


def test_parameters_set_apart_learn_at_their_own_rate_and_decay_as_before() -> None:
    a, b, c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.AdamW(
        [{"params": [a, b], "weight_decay": 0.1}, {"params": [c], "weight_decay": 0.0}], lr=0.5
    )
    apart(optimizer, {id(b)}, 4.0)
    found = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(0.5, 0.1), (0.5, 0.0), (2.0, 0.025)]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 1]
    assert optimizer.param_groups[2]["params"][0] is b


def moved(folder: Path, rate: float) -> tuple[float, float]:
    """By how much training moves the offsets of TISA, and a table of vectors, at the most."""
    config = tiny(text_file(folder), steps=4, warmup=0, position_rate=rate, weight_decay=0.0)
    source = prepared(config, folder / f"rate-{rate}")
    first = new_model(config, "tisa+learned", 0, source.vocab_size)
    done = train(
        config, "tisa+learned", 0, source, folder / f"run-{rate}", say=lambda what, share: None
    )
    positions = [model.model.stack.position for model in (first, done.model)]
    offset = [position.layers[0]["tisa"].offset for position in positions]
    table = [next(position.shared["learned"].parameters()) for position in positions]
    return _change(*offset), _change(*table)


def _change(before: torch.Tensor, after: torch.Tensor) -> float:
    return float((after - before).detach().abs().max())


def test_biases_move_so_many_times_as_far_and_tables_of_vectors_as_before(tmp_path: Path) -> None:
    (offset, table), (faster, same) = moved(tmp_path, 1.0), moved(tmp_path, 10.0)
    assert 5 < faster / offset < 15
    assert 0.5 < same / table < 2


def test_a_run_with_rates_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    config = tiny(text_file(tmp_path), position_rate=10.0)
    whole = run_one(config, "tisa", 0, tmp_path / "whole")
    with pytest.raises(OutOfTimeError):
        run_one(config, "tisa", 0, tmp_path / "parts", deadline=0.0)
    assert_same_numbers(run_one(config, "tisa", 0, tmp_path / "parts"), whole)


def test_a_rate_must_be_above_zero(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="position_rate must be above 0"):
        tiny(text_file(tmp_path), position_rate=0.0)
