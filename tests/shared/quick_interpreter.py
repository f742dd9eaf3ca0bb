"""Triton's interpreter without two things that take most of its time and change no result."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def leave_out_what_costs_and_changes_nothing() -> None:
    """Changes the interpreter of this process."""
    # Of its check for overflow it makes nothing but in debug.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = once_a_launch(interpreter._patch_lang)


def once_a_launch(patch: Callable[[FunctionType], Any]) -> Callable[[FunctionType], Any]:
    """Triton's language is patched for each call of a device function: here if it is not already.

    A launch patches triton.language and restores it at its end. Its device functions patch what
    they see of it once more, and do not restore it.
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
