"""A text as tokens: a byte-level BPE trained on it once, and kept beside the results."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from whence.analysis.json_result import Result
from whence.checks import at_least, require
from whence.experiments.folder import load_result
from whence.experiments.lm.hub import is_dataset, split_texts, validation_text

END, MASK = "<|end|>", "<|mask|>"
FEWEST = 256 + 2  # every byte, and the two
VALID_SHARE = 10  # the last tenth of a text is for validation where no other text is given
PIECE = 1 << 16  # characters that are encoded as one; larger ones use one core


@dataclass(frozen=True, eq=False)
class StoredTokenizer(Result):
    """A tokenizer in a file, with the text that it was trained on."""

    data_sha256: str
    vocab_size: int  # asked for
    tokenizer: str  # the JSON of the tokenizers library


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and validation tokens."""

    train: Integer[np.ndarray, " n"]
    valid: Integer[np.ndarray, " m"]
    vocab_size: int
    mask: int | None  # None where the tokenizer has no such token
    characters: int  # of the training text
    sha256: str  # of both texts


@dataclass(frozen=True)
class Texts:
    """Training and validation text."""

    train: str
    valid: str
    sha256: str


def read_texts(data: str, valid: str | None, *, column: str = "text") -> Texts:
    """Both texts, of files or data sets; the last tenth of the first where there is no second.

    A data set's own split for validation is used unless `valid` is given.
    """
    whole, test = split_texts(data, column) if is_dataset(data) else (_read(data), None)
    if valid is not None:
        test = validation_text(valid, column) if is_dataset(valid) else _read(valid)
    train = whole
    if test is None:
        cut = len(whole) - len(whole) // VALID_SHARE
        train, test = whole[:cut], whole[cut:]
    for name, text in (("training", train), ("validation", test)):
        require(text != "", f"{data} is too short: it leaves no text for {name}.")
    digest = hashlib.sha256(train.encode())
    digest.update(b"\0")
    digest.update(test.encode())
    return Texts(train, test, digest.hexdigest())


def _read(name: str) -> str:
    path = Path(name)
    require(path.is_file(), f"there is no text file {path}. A data set of the hub is hub:NAME.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8.") from None
    require(text.strip() != "", f"the data file {path} is empty.")
    return text


def tokenizer_for(
    texts: Texts, *, cache: Path | None, given: Path | None, vocab_size: int
) -> StoredTokenizer:
    """The one given, the one in the file `cache` if that is there, or one trained now."""
    cached = _stored(cache, texts, vocab_size) if cache is not None and cache.is_file() else None
    if given is not None:
        stored = _stored(given, texts, vocab_size)
        require(
            cached is None or cached.tokenizer == stored.tokenizer,
            f"{cache} is another tokenizer than {given}, and jobs there may have used it. "
            "Leave --tokenizer out, or give another --out.",
        )
    else:
        stored = cached or _trained(texts, vocab_size)
    return stored


def keep_tokenizer(corpus: Corpus, tokenizer: str, cache: Path, *, named: str) -> None:
    """Put the tokenizer of a corpus that is read from the file `named` into `cache`."""
    if cache.is_file():
        require(
            load_result(StoredTokenizer, cache, way_out="Delete it.").tokenizer == tokenizer,
            f"{cache} is another tokenizer than that of {named}, and jobs there may have used it. "
            "Give another --out.",
        )
    else:
        StoredTokenizer(corpus.sha256, corpus.vocab_size, tokenizer).save(cache)


def encoded(texts: Texts, stored: StoredTokenizer) -> Corpus:
    """The texts in tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(stored.tokenizer)
    mask = tokenizer.token_to_id(MASK)
    assert mask is not None
    return Corpus(
        _encoded(tokenizer, texts.train),
        _encoded(tokenizer, texts.valid),
        tokenizer.get_vocab_size(),
        mask,
        len(texts.train),
        texts.sha256,
    )


def _stored(path: Path, texts: Texts, vocab_size: int) -> StoredTokenizer:
    require(path.is_file(), f"there is no tokenizer {path}.")
    stored = load_result(StoredTokenizer, path, way_out="Delete it, and one is trained anew.")
    require(
        stored.data_sha256 == texts.sha256,
        f"the tokenizer {path} was trained on other data (SHA-256 {stored.data_sha256[:12]}, this "
        f"data has {texts.sha256[:12]}). Leave --tokenizer out to train one on this data.",
    )
    require(
        stored.vocab_size == vocab_size,
        f"the tokenizer {path} was trained for {stored.vocab_size} tokens, not for {vocab_size}.",
    )
    return stored


def _trained(texts: Texts, vocab_size: int) -> StoredTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    at_least(FEWEST, vocab_size=vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(texts.train), trainer=trainer)
    return StoredTokenizer(texts.sha256, vocab_size, tokenizer.to_str())


def _encoded(tokenizer: Any, text: str) -> Integer[np.ndarray, " n"]:
    parts = tokenizer.encode_batch_fast(_pieces(text), add_special_tokens=False)
    return np.concatenate([np.asarray(part.ids, np.int32) for part in parts])


def _pieces(text: str) -> list[str]:
    """The text cut at ends of lines, so that no word is cut where lines are of any usual length."""
    pieces, start = [], 0
    while start < len(text):
        stop = text.find("\n", start + PIECE) + 1
        stop = stop if stop > 0 else len(text)
        pieces.append(text[start:stop])
        start = stop
    return pieces
