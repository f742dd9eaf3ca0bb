"""Random calls of every backend, in odd layouts, against an oracle of the formulas alone."""

import os

import pytest

from random_calls import Call, judged


def beyond(seeds: range, backend: str) -> dict[str, dict[str, float]]:
    """The calls of which a tensor's error is more than twice PyTorch's."""
    found = {}
    for seed in seeds:
        call = Call.random(seed, backend)
        bad = {name: ratio for name, ratio in judged(call, backend).items() if not ratio <= 2}
        if bad:
            found[call.text()] = bad
    return found


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 60), marks=pytest.mark.slow)])
def test_calls_on_sdpa_are_as_exact_as_pytorch(seeds: range) -> None:
    assert not beyond(seeds, "sdpa")


@pytest.mark.triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_calls_in_the_interpreter_are_as_exact_as_pytorch() -> None:
    pytest.importorskip("triton", reason="Triton is a Linux package")
    assert not beyond(range(4), "fused")
