"""Layers with a positional method: attention, encoder and decoder, as in torch.nn."""

from whence.nn.attention import MultiheadAttention
from whence.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from whence.nn.positioned import positioned_attention, positioned_attention_with_weights
from whence.nn.stacks import TransformerDecoder, TransformerEncoder

__all__ = [
    "MultiheadAttention",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "positioned_attention",
    "positioned_attention_with_weights",
]
