"""What position costs a translation model: steps a second, against sinusoidal positions.

    python benchmarks/translation_cost.py --apart [--lengths 32,64] [--modes called,compiled]

The base Transformer of the papers: 6 + 6 layers of 512, 8 heads, feed-forward layers of 2,048,
post-norm, dropout 0.1, a vocabulary of 32,768; about 25,000 source and 25,000 target tokens a step.
A step has sentences of one bucket, from 3/4 of its length to all of it: source padding is masked,
target padding has no loss. Forward, backward and fused AdamW under bfloat16 autocast. How it is
measured: benchmarks/training_turns.py. Shaw et al. lost 7% of the steps a second.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import training_turns
from training_turns import Study, Trained
from whence.models import WhenceForConditionalGeneration, WhenceSeq2SeqConfig


@dataclass(frozen=True)
class Size:
    """A model, and the source and the target tokens of a step, with padding."""

    layers: int = 6  # of the encoder, and of the decoder
    width: int = 512
    hidden: int = 2048  # of the feed-forward layers
    heads: int = 8
    vocabulary: int = 32_768
    tokens: int = 25_000


def translation_model(method: str, n: int, size: Size, device: str) -> Trained:
    """An encoder-decoder, with a batch of the bucket of sentences of up to n tokens."""
    torch.manual_seed(0)
    config = WhenceSeq2SeqConfig(
        position=method,
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        norm="layernorm",
        norm_first=False,
        gated_mlp=False,
        hidden_act="relu",
        mlp_bias=True,
        embedding_dropout=0.1,
        hidden_dropout=0.1,
        use_cache=False,
    )
    with torch.device(device):
        model = WhenceForConditionalGeneration(config)
    return Trained(model, batch(n, size, device), device)


def batch(n: int, size: Size, device: str) -> dict[str, torch.Tensor]:
    """Random sentences, padded at the right, as the collators of transformers give them."""
    shape = (max(1, size.tokens // n), n)

    def there() -> torch.Tensor:
        lengths = torch.randint(max(1, 3 * n // 4), n + 1, (shape[0], 1), device=device)
        return torch.arange(n, device=device) < lengths

    source = there()
    ids, labels = (torch.randint(2, size.vocabulary, shape, device=device) for _ in range(2))
    return {
        "input_ids": ids.masked_fill(~source, 0),
        "attention_mask": source.long(),
        "labels": labels.masked_fill(~there(), -100),
    }


def limit_of(method: str, n: int, mode: str) -> float | None:
    """The most that a method may cost over sinusoids, or None."""
    return 0.07 if method.startswith("shaw") else None


STUDY = Study(
    "translation_cost",
    translation_model,
    Size(),
    lengths="32,64",
    methods="sinusoidal,shaw:clip=16,t5,tisa:kernels=5,rope",
    baseline="sinusoidal",
    limit_of=limit_of,
)


def main(arguments: Sequence[str] | None = None) -> int:
    return training_turns.main(STUDY, __doc__.splitlines()[0], arguments)


if __name__ == "__main__":
    sys.exit(main())
