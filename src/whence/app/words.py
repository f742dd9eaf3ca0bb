"""The content of a sentence for one attention layer: queries and keys that know no position.

With all-MiniLM-L6-v2 on this machine they are those of its first layer, from the word embeddings
alone, its position embeddings left out. Else every word has a fixed random vector, which is query
and key at once: a word then looks at itself and at its repetitions.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from whence.checks import require

D_HEAD, MOST_HEADS = 32, 12  # of all-MiniLM-L6-v2
MOST_WORDS, MOST_LETTERS = 48, 600


@dataclass(frozen=True, eq=False)
class Sentence:
    """The tokens of a sentence and the layer's input for them."""

    tokens: tuple[str, ...]
    x: Float[Tensor, "1 n d_model"]


class RandomWords:
    """A normal vector for each word, drawn from its letters; queries and keys are the input."""

    about = (
        "Content: a fixed random vector for each word, so a word looks at itself and its "
        "repetitions. With all-MiniLM-L6-v2 installed (make demo does it) it is that model's."
    )

    def __init__(self, n_heads: int) -> None:
        self.n_heads = n_heads

    def read(self, text: str) -> Sentence:
        """Words are told apart by their letters alone, whatever their case."""
        tokens = tuple(re.findall(r"\w+|[^\w\s]", _checked(text)))
        _not_too_many(tokens)
        rows = [self._vector(token.lower()) for token in tokens]
        return Sentence(tokens, torch.stack(rows)[None])

    def heads(
        self, x: Float[Tensor, "1 n d_model"]
    ) -> tuple[Float[Tensor, "1 h n d"], Float[Tensor, "1 h n d"]]:
        """Queries and keys of each head."""
        parts = _split(x, self.n_heads)
        return parts, parts

    def _vector(self, word: str) -> Float[Tensor, " d_model"]:
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") >> 1
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.n_heads * D_HEAD, generator=generator) * 0.6


class MiniLMWords:
    """Words, norm, W_Q and W_K of the first layer of all-MiniLM-L6-v2, without its positions."""

    about = (
        "Content: queries and keys of the first layer of all-MiniLM-L6-v2, from its word "
        "embeddings alone, without its own position embeddings."
    )

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The tensors of the input and of the first layer's queries and keys."""
        from safetensors import safe_open

        names = ["embeddings.token_type_embeddings.weight"]
        names += [f"embeddings.LayerNorm.{part}" for part in ("weight", "bias")]
        names += [
            f"encoder.layer.0.attention.self.{which}.{part}"
            for which in ("query", "key")
            for part in ("weight", "bias")
        ]
        with safe_open(self.folder / "model.safetensors", "pt") as file:
            return {name: file.get_tensor(name).float() for name in names}

    @cached_property
    def tokenizer(self) -> Any:
        """The model's own, from its file."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def read(self, text: str) -> Sentence:
        """Its word pieces, and their embeddings after the model's own LayerNorm."""
        from safetensors import safe_open

        found = self.tokenizer.encode(_checked(text), add_special_tokens=False)
        tokens = tuple(found.tokens)
        _not_too_many(tokens)
        with safe_open(self.folder / "model.safetensors", "pt") as file:
            rows = file.get_slice("embeddings.word_embeddings.weight")
            words = torch.stack([rows[number] for number in found.ids]).float()
        parts, norm = self.weights, "embeddings.LayerNorm"
        words = words + parts["embeddings.token_type_embeddings.weight"][0]
        gain, shift = parts[f"{norm}.weight"], parts[f"{norm}.bias"]
        x = torch.nn.functional.layer_norm(words, words.shape[-1:], gain, shift, 1e-12)
        return Sentence(tokens, x[None])

    def heads(
        self, x: Float[Tensor, "1 n d_model"]
    ) -> tuple[Float[Tensor, "1 h n d"], Float[Tensor, "1 h n d"]]:
        """Queries and keys of each head."""
        own = "encoder.layer.0.attention.self"
        q, k = (
            torch.nn.functional.linear(
                x, self.weights[f"{own}.{which}.weight"], self.weights[f"{own}.{which}.bias"]
            )
            for which in ("query", "key")
        )
        return _split(q, MOST_HEADS), _split(k, MOST_HEADS)


def _split(x: Float[Tensor, "1 n d_model"], n_heads: int) -> Float[Tensor, "1 h n d"]:
    return x.view(1, -1, n_heads, D_HEAD).transpose(1, 2)


def _checked(text: str) -> str:
    require(bool(text.strip()), "there is no sentence: write some words.")
    require(
        len(text) <= MOST_LETTERS,
        f"the sentence has {len(text):,} letters; at most {MOST_LETTERS} can be shown.",
    )
    return text


def _not_too_many(tokens: tuple[str, ...]) -> None:
    require(len(tokens) > 0, "there is no word in this sentence.")
    require(
        len(tokens) <= MOST_WORDS,
        f"the sentence has {len(tokens)} tokens; at most {MOST_WORDS} can be shown.",
    )
