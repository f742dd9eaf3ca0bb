"""Text cut into pieces of equal length in a model's own tokens, to measure its logits on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from whence.checks import require

SHORTEST = 8  # tokens of text in a piece
CHARACTERS_PER_TOKEN = 12  # more than tokens have, so that text of this size has enough of them


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """Token ids of pieces of text, of which the first `before` and last `after` are special tokens.

    Special tokens are fed to the model, which expects them, and left out of every average.
    """

    ids: Int[Tensor, "piece n"]
    before: int = 0
    after: int = 0


def python_help_text() -> str:
    """English on the Python language: the topics of `help`, which come with every Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def tokenized_text(
    name: str,
    embeddings: torch.nn.Embedding,
    text: str | None,
    *,
    length: int,
    pieces: int,
    note: Callable[[str], None],
) -> TokenizedText:
    """TokenizedText of `length` tokens, spread evenly over the text (None: the sample).

    A model of that name without a tokenizer gets random tokens, and a text is then an error.
    """
    tokenizer = tokenizer_of(name, embeddings.num_embeddings)
    if tokenizer is None:
        require(
            text is None,
            f"{name} has no tokenizer, so it cannot read a text. Add its tokenizer's files, or "
            "leave the text out to measure on random tokens.",
        )
        note(f"{name} has no tokenizer: its logits are those of random tokens, not of text")
        return _random(embeddings, length, pieces)
    if text is None:
        note("logits are measured on a built-in text, the topics of Python's help")
    return _cut(tokenizer, python_help_text() if text is None else text, length, pieces, note)


def tokenizer_of(name: str, n_embeddings: int) -> Any:
    """The model's tokenizer; None if it has none, or one without its vocabulary file."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError, KeyError):
        return None
    try:
        ids = plain_token_ids(tokenizer, "the name of a function and the value of a list")
    except Exception:  # what the tokenizers library raises for a vocabulary without [UNK]
        return None
    known = [i for i in ids if i != tokenizer.unk_token_id and i < n_embeddings]
    return tokenizer if 2 * len(known) > len(ids) else None


def plain_token_ids(tokenizer: Any, text: str) -> list[int]:
    """A text in tokens, none of them special."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _cut(
    tokenizer: Any, text: str, length: int, pieces: int, note: Callable[[str], None]
) -> TokenizedText:
    before, after = special_tokens_around(tokenizer)
    special = len(before) + len(after)
    stretch = len(text) // pieces
    encoded = []
    for piece in range(pieces):
        start = piece * stretch
        part = text[start : start + min(stretch, CHARACTERS_PER_TOKEN * length)]
        if piece > 0:
            part = part.partition(" ")[2]  # a word cut in two is no word
        encoded.append(plain_token_ids(tokenizer, part)[: max(length - special, 0)])
    n = min(len(ids) for ids in encoded)
    require(
        n >= SHORTEST,
        f"the text is too short: cut into {pieces} pieces, the shortest has {n} tokens, and "
        f"{SHORTEST} are the fewest to measure on. Give a longer text: "
        f"{pieces * length} tokens are enough.",
    )
    if n < length - special:
        note(f"the text is short: {pieces} pieces of {n} tokens, not of {length - special}")
    ids = torch.tensor([[*before, *part[:n], *after] for part in encoded])
    return TokenizedText(ids, len(before), len(after))


def special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    inner = plain_token_ids(tokenizer, "a")
    whole = list(tokenizer("a")["input_ids"])
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    return [], []


def _random(embeddings: torch.nn.Embedding, length: int, pieces: int) -> TokenizedText:
    """Equal chances for all tokens but padding, which a model leaves out; always the same draw."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embeddings.num_embeddings, (pieces, length), generator=generator)
    padding = embeddings.padding_idx
    if padding is not None:
        ids[ids == padding] = (padding + 1) % embeddings.num_embeddings
    return TokenizedText(ids)
