"""Numbers of every configuration: no option is without a largest value, and none may be NaN."""

import dataclasses
import math
from typing import Any

import pytest

from whence.experiments.config import ExperimentConfig
from whence.experiments.glue.config import GlueConfig
from whence.experiments.lm.config import LMConfig
from whence.experiments.translation.config import TranslationConfig

NEEDED: dict[type[ExperimentConfig], dict[str, Any]] = {
    LMConfig: {"methods": ("tisa",), "data": "text.txt"},
    GlueConfig: {"model": "bert"},
    TranslationConfig: {"data": "folder", "source": "en", "target": "de"},
}


@pytest.mark.parametrize("kind", NEEDED)
def test_every_number_has_a_largest_value_and_is_finite(kind: type[ExperimentConfig]) -> None:
    usual = kind(**NEEDED[kind])
    for field in dataclasses.fields(usual):
        value = getattr(usual, field.name)
        several = isinstance(value, tuple) and len(value) > 0
        one = value[0] if several else value
        wrong: list[Any] = []
        if isinstance(one, int) and not isinstance(one, bool):
            wrong = [10**18, -1]
        elif isinstance(one, float):
            wrong = [math.nan, math.inf, -math.inf, -1.0]
        for each in wrong:
            given = (*value, each) if several else each
            with pytest.raises(ValueError, match=field.name.rstrip("s").replace("_", "[_ ]")):
                kind(**(NEEDED[kind] | {field.name: given}))


def test_what_a_position_or_a_task_has_of_its_own_is_bounded_too() -> None:
    for own in ({"seeds": 1e9}, {"learning_rate": math.inf}):
        with pytest.raises(ValueError, match="must be"):
            TranslationConfig(
                data="folder", source="en", target="de", exceptions={"sinusoidal": own}
            )
    with pytest.raises(ValueError, match="epochs must be at most"):
        GlueConfig(model="bert", exceptions={"rte": {"epochs": 1e300}})


def test_a_model_that_memory_cannot_hold_is_refused_before_it_is_made() -> None:
    with pytest.raises(MemoryError, match="GB are needed"):
        LMConfig(methods=("tisa",), data="text.txt", d_model=2**18, n_layers=2**10)
    with pytest.raises(MemoryError, match="GB are needed"):
        TranslationConfig(**NEEDED[TranslationConfig], d_model=2**18, n_layers=2**10)
