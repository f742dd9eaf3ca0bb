"""A tokenized corpus in one safetensors file: tokens, their tokenizer, and what identifies them."""

from pathlib import Path

import numpy as np
from jaxtyping import Integer, Shaped

from whence.checks import require
from whence.experiments.lm.tokens import MASK, Corpus
from whence.files import write_bytes

VERSION = "whence_corpus"  # whose value is "1"
TENSORS = ("train", "valid")
SMALL = 1 << 16  # a vocabulary up to this size has ids of 16 bits


def save_corpus(corpus: Corpus, tokenizer: str, path: Path) -> Path:
    """Write tokens, and the JSON of their tokenizer, as one safetensors file, whole or not at all.

    Ids take 16 bits where the vocabulary allows it, else 32.

        >>> from tokenizers import Tokenizer, models
        >>> ids = {"a": 0, "b": 1, "[MASK]": 2}
        >>> tokenizer = Tokenizer(models.WordLevel(ids, unk_token="a")).to_str()
        >>> corpus = Corpus(np.array([0, 1, 1]), np.array([1, 0]), 3, 2, characters=5, sha256="...")
        >>> save_corpus(corpus, tokenizer, Path("ab.safetensors")).name
        'ab.safetensors'
    """
    from safetensors.numpy import save

    _check(path, corpus)
    width = np.uint16 if corpus.vocab_size <= SMALL else np.uint32
    tokens = (corpus.train, corpus.valid)
    metadata = {
        VERSION: "1",
        "tokenizer": tokenizer,
        "sha256": corpus.sha256,
        "characters": str(corpus.characters),
        "vocab_size": str(corpus.vocab_size),
    }
    arrays = {name: np.ascontiguousarray(x, width) for name, x in zip(TENSORS, tokens, strict=True)}
    return write_bytes(path, save(arrays, metadata))


def load_corpus(path: Path) -> tuple[Corpus, str]:
    """The tokens of a file that `save_corpus` wrote, and the JSON of their tokenizer.

    >>> from tokenizers import Tokenizer, models
    >>> ids = {"a": 0, "b": 1, "[MASK]": 2}
    >>> tokenizer = Tokenizer(models.WordLevel(ids, unk_token="a")).to_str()
    >>> corpus = Corpus(np.array([0, 1, 1]), np.array([1, 0]), 3, 2, characters=5, sha256="...")
    >>> path = save_corpus(corpus, tokenizer, Path("ab.safetensors"))
    >>> load_corpus(path)[0].train.tolist()
    [0, 1, 1]
    """
    from safetensors import SafetensorError, safe_open
    from tokenizers import Tokenizer

    require(path.is_file(), f"there is no tokenized corpus {path}.")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata, names = file.metadata() or {}, sorted(file.keys())
            known = metadata.get(VERSION) == "1" and names == sorted(TENSORS)
            arrays = [file.get_tensor(name) for name in TENSORS] if known else []
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}.") from None
    wanted = ("tokenizer", "sha256", "characters", "vocab_size")
    missing = [name for name in wanted if name not in metadata]
    require(
        known and not missing,
        f"{path} is not a tokenized corpus of whence lm: it has the tensors "
        f"{', '.join(names) or 'none'} and the metadata {', '.join(sorted(metadata)) or 'none'}. "
        "Write it with whence.experiments.save_corpus.",
    )
    try:
        tokenizer = Tokenizer.from_str(metadata["tokenizer"])
        vocab_size, characters = int(metadata["vocab_size"]), int(metadata["characters"])
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ValueError(f"the metadata of {path} cannot be read: {error}.") from None
    train, valid = (_as_stored(path, x) for x in arrays)
    mask = tokenizer.token_to_id(MASK)
    corpus = Corpus(train, valid, vocab_size, mask, characters, metadata["sha256"])
    _check(path, corpus)
    return corpus, metadata["tokenizer"]


def _as_stored(path: Path, tokens: Shaped[np.ndarray, "..."]) -> Integer[np.ndarray, " n"]:
    """The ids without a copy; those of 32 bits as signed numbers, which torch can compute with."""
    require(
        tokens.ndim == 1 and tokens.dtype in (np.uint16, np.uint32),
        f"the tokens of {path} must be one axis of unsigned 16- or 32-bit ids, got "
        f"{tokens.dtype} of shape {tokens.shape}.",
    )
    return tokens if tokens.dtype == np.uint16 else tokens.view(np.int32)


def _check(path: Path, corpus: Corpus) -> None:
    for name, tokens in zip(TENSORS, (corpus.train, corpus.valid), strict=True):
        require(len(tokens) > 0, f"the tokenized corpus {path} has no tokens in {name!r}.")
        low, high = int(tokens.min()), int(tokens.max())
        require(
            low >= 0 and high < corpus.vocab_size,
            f"the tokenized corpus {path} has ids up to {high if low >= 0 else low} in {name!r}, "
            f"beyond its vocabulary of {corpus.vocab_size}.",
        )
