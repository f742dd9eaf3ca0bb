"""Layers with a positional method."""

from whence.nn.positioned import positioned_attention

__all__ = ["positioned_attention"]
