"""Native models small enough to test, with parameters moved away from their initial values."""

from typing import Any

import torch
from torch import Tensor

from shaking import shake
from whence.methods import METHODS
from whence.models import (
    WhenceConfig,
    WhenceForCausalLM,
    WhenceForConditionalGeneration,
    WhenceSeq2SeqConfig,
)

VOCAB, LENGTH = 37, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": LENGTH,
}
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


def shaken(model: Any, seed: int = 1, by: float = 0.3) -> Any:
    """The model with every parameter moved, in evaluation: at first many change nothing."""
    torch.manual_seed(seed)
    shake(model, by)
    return model.eval()


def kv_heads(name: str) -> int:
    """Two for four heads, unless the method has a flow for each head."""
    return 4 if "floater" in name else 2


def causal(position: str, **more: Any) -> WhenceForCausalLM:
    """A causal model of this position, with grouped heads where the method can have them."""
    more = {"num_key_value_heads": kv_heads(position), **more}
    return shaken(WhenceForCausalLM(WhenceConfig(position=position, **{**SIZES, **more})))


def seq2seq(position: str, **more: Any) -> WhenceForConditionalGeneration:
    """An encoder-decoder of this position."""
    config = WhenceSeq2SeqConfig(position=position, num_encoder_layers=1, **{**SIZES, **more})
    return shaken(WhenceForConditionalGeneration(config))


def prompts() -> tuple[list[Tensor], Tensor, Tensor]:
    """Three prompts of several lengths; the same padded on the left; their mask."""
    torch.manual_seed(2)
    rows = [torch.randint(2, VOCAB, (n,)) for n in (9, 4, 7)]
    ids = torch.zeros(3, 9, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, 9 - len(row) :], mask[i, 9 - len(row) :] = row, 1
    return rows, ids, mask


BOTH_WAYS = [name for name in METHODS if not METHODS[name].causal_only]
