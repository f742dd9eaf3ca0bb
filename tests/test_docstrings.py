"""The examples in docstrings of the public functions run and print what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    ["whence.kernels.attend", "whence.kernels.mask", "whence.lag.bias", "whence.lag.values"],
)
def test_the_examples_of_a_module_print_what_they_say(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried
    assert not failed
