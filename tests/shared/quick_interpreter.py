"""Triton's interpreter without two things that take most of its time and change no result."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def speed_up_interpreter() -> None:
    """Speed up Triton's interpreter in this process."""
    # It checks every operation for overflow, and uses the result only in debug mode.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = once_a_launch(interpreter._patch_lang)


def once_a_launch(patch: Callable[[FunctionType], Any]) -> Callable[[FunctionType], Any]:
    """`patch`, which replaces the functions of triton.language, called only where it is needed.

    A launch patches triton.language and restores it at its end. The interpreter also patches it at
    every call of a device function, which changes nothing where it is patched already.
    """
    seen: dict[FunctionType, list[ModuleType]] = {}

    def patch_if_needed(fn: FunctionType) -> Any:
        if fn not in seen:
            modules = filter(inspect.ismodule, fn.__globals__.values())
            seen[fn] = [module for module in modules if module in (tl, tl.core)]
        if any(tl.core.is_builtin(module.load) for module in seen[fn]):
            return patch(fn)
        return interpreter._LangPatchScope()

    return patch_if_needed
