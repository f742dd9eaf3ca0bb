"""The methods of the plan of the comparison, those that only benchmarks/lm_variants.py has too."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import lm_plan
from shaking import shake
from whence.experiments.lm.training import new_model
from whence.methods import METHODS, build

PLAN = lm_plan.read_plan(Path(lm_plan.__file__).with_suffix(".toml"))
TINY = {"train_length": 16, "eval_lengths": (16,), "n_layers": 2, "n_heads": 2, "d_model": 32}
SMALL = {name: replace(config, **TINY, dropout=0.0) for name, config in PLAN.experiments.items()}
EVERY = {
    (config.objective, method): config for config in SMALL.values() for method in config.methods
}
# The numbers of a method's formula, and the parameters of its variant that hold them.
HELD = {
    "tisa": {"amplitude": "amplitude", "sharpness": "sharpness", "offset": "offset"},
    "t5": {"table": "raw_table"},
    "shaw": {"key_table": "raw_key_table", "value_table": "raw_value_table"},
    "kerple": {"raw_p": "held_p", "raw_a": "held_a"},
}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """The variants are methods in these tests alone: others take every method that there is."""
    before = dict(METHODS)
    import lm_variants

    METHODS.update(lm_variants.VARIANTS)
    yield
    for name in set(METHODS) - set(before) | set(lm_variants.VARIANTS):
        del METHODS[name]


@pytest.mark.parametrize(("objective", "method"), EVERY)
def test_every_method_of_the_plan_trains_all_its_parameters(objective: str, method: str) -> None:
    """At the second step, as a start at zero lets some of them wait for the first."""
    model = new_model(EVERY[objective, method], method, 0, vocab_size=40)
    assert model.config.causal == (objective == "causal")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3)
    ids = torch.randint(40, (3, 16))
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
    without = [name for name, p in trained.items() if p.grad is None or not p.grad.any()]
    assert without == []
    assert all(p.grad.isfinite().all() for p in trained.values())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("ours", "variant", "gain"),
    [
        ("tisa:start=local", "tisa_paper:start=local,gain=1", 1.0),
        ("tisa:start=released", "tisa_paper:start=released,gain=30", 30.0),
        ("t5:start=normal", "t5_paper:start=normal,gain=1", 1.0),
        ("t5:start=local", "t5_paper:start=local,gain=30", 30.0),
        ("shaw:clip=4,start=xavier", "shaw_paper:clip=4,start=xavier", 1.0),
        ("shaw:clip=4,start=wide", "shaw_paper:clip=4,start=wide", 1.0),
        ("kerple", "kerple_paper", 1.0),
    ],
)
def test_a_variant_is_the_same_function_of_the_same_numbers_and_starts_at_the_same(
    ours: str, variant: str, gain: float, causal: bool
) -> None:
    methods = []
    for spec in (ours, variant):
        torch.manual_seed(1)
        methods.append(build(spec, n_heads=3, d_head=8, max_length=64, causal=causal))
    method, other = methods
    assert_same_function(method, other)
    before = dense(method)
    shake(method, 0.1)
    with torch.no_grad():
        for name, held in HELD[ours.partition(":")[0]].items():
            other.get_parameter(held).copy_(getattr(method, name) / gain)
    assert_same_function(method, other)
    assert (dense(method) - before).abs().max() > 1e-2
    trained = {name for name, p in other.named_parameters() if p.requires_grad}
    assert trained == set(HELD[ours.partition(":")[0]].values())


def dense(method) -> torch.Tensor:
    q = torch.randn(2, 3, 64, 8, generator=torch.Generator().manual_seed(2))
    pos = torch.arange(64)
    return method.score_term(q, pos, pos).to_dense(pos, pos)


def assert_same_function(method, other) -> None:
    assert_close(dense(other), dense(method), rtol=1e-5, atol=1e-5)
    pos = torch.arange(64)
    values, others = method.value_term(pos, pos), other.value_term(pos, pos)
    assert (values is None) == (others is None)
    if values is not None:
        assert_close(others.table, values.table)
