"""What position costs a whole model: milliseconds a training step, against the model without any.

    python benchmarks/model_cost.py --apart [--lengths 128,512,2048] [--modes called,compiled]

12 layers of 768, 12 heads, a vocabulary of 32,000, 16,384 tokens a step; forward, backward and
fused AdamW under bfloat16 autocast. How it is measured: benchmarks/training_turns.py.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import training_turns
from training_turns import CALLED, Study, Trained
from whence.models import WhenceConfig, WhenceForCausalLM


@dataclass(frozen=True)
class Size:
    """A model, and the tokens of a step."""

    layers: int = 12
    width: int = 768
    hidden: int = 2048  # of the feed-forward layers
    heads: int = 12
    vocabulary: int = 32_000
    tokens: int = 16_384


def language_model(method: str, n: int, size: Size, device: str) -> Trained:
    """A causal language model, with its batch of sequences of n tokens."""
    torch.manual_seed(0)
    config = WhenceConfig(
        position=method,
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device(device):
        model = WhenceForCausalLM(config)
    ids = torch.randint(size.vocabulary, (max(1, size.tokens // n), n), device=device)
    return Trained(model, {"input_ids": ids, "labels": ids, "use_cache": False}, device)


def limit_of(method: str, n: int, mode: str) -> float | None:
    """The most that a method may cost over NoPE, or None."""
    name = method.partition(":")[0]
    if name == "rope":
        return 0.05 if mode == CALLED else None
    if name == "shaw":
        return 0.09 if n <= 512 else 0.07
    return {"tisa": 0.03, "t5": 0.04, "alibi": 0.04}.get(name)


STUDY = Study(
    "model_cost",
    language_model,
    Size(),
    lengths="128,512,2048",
    methods="nope,rope,tisa:kernels=5,t5,alibi,shaw:clip=16",
    baseline="nope",
    limit_of=limit_of,
)


def main(arguments: Sequence[str] | None = None) -> int:
    return training_turns.main(STUDY, __doc__.splitlines()[0], arguments)


if __name__ == "__main__":
    sys.exit(main())
