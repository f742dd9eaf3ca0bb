"""What counting pairs gives on the text of the comparison: the loss of a bigram model.

    python benchmarks/lm_bigram.py --data train.txt --valid valid.txt --tokenizer tokenizer.json

p(w | u) = (max(c(u, w) - D, 0) + D N(u) p(w)) / c(u) with D = 0.75, counted on the training tokens;
N(u) is how many tokens follow u there, p(w) how frequent w is. It is tested on the tokens on which
the models were tested, and, with one tenth of the training tokens left out, on that tenth: whether
the validation text is easier than the training text.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from whence.bench.machine import machine
from whence.bench.saved import save
from whence.experiments import LMConfig
from whence.experiments.folder import prepared

DISCOUNT = 0.75
SELDOM = 0.1  # added to each token's count, so that none has probability 0


class Bigrams:
    """Counts of pairs; `loss` is nats a token."""

    def __init__(self, tokens: Any, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        counts = np.bincount(tokens, minlength=vocabulary) + SELDOM
        self.single = counts / counts.sum()
        self.pairs, self.counts = np.unique(self._pairs(tokens), return_counts=True)
        self.before = np.bincount(tokens[:-1], minlength=vocabulary)
        self.followers = np.bincount(self.pairs // vocabulary, minlength=vocabulary)

    def _pairs(self, tokens: Any) -> Any:
        return tokens[:-1] * self.vocabulary + tokens[1:]

    def loss(self, tokens: Any) -> float:
        """Of every token but the first, given the one before it."""
        pairs, last, own = self._pairs(tokens), tokens[:-1], self.single[tokens[1:]]
        place = np.minimum(np.searchsorted(self.pairs, pairs), len(self.pairs) - 1)
        seen = np.where(self.pairs[place] == pairs, self.counts[place], 0)
        rest = DISCOUNT * self.followers[last] * own
        total = np.maximum(self.before[last], 1)
        p = np.where(self.before[last] > 0, (np.maximum(seen - DISCOUNT, 0) + rest) / total, own)
        return float(-np.log(p).mean())

    def single_loss(self, tokens: Any) -> float:
        """Of the frequencies alone."""
        return float(-np.log(self.single[tokens]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/lm/bigram.json"))
    options = parser.parse_args()
    config = LMConfig(
        methods=("nope",),
        data=str(options.data),
        valid=str(options.valid),
        tokenizer=str(options.tokenizer),
        vocab_size=16_384,
        device="cpu",
    )
    tested = 131_072
    with tempfile.TemporaryDirectory() as folder:
        source: Any = prepared(config, Path(folder))
    train, valid = (np.asarray(x).astype(np.int64) for x in (source.train, source.valid))
    cut = len(train) * 9 // 10
    whole, part = (Bigrams(x, source.vocab_size) for x in (train, train[:cut]))
    text = {
        name: path.read_text(encoding="utf-8")
        for name, path in vars(options).items()
        if name in ("data", "valid")
    }
    found = {
        "bigram": whole.loss(valid[:tested]),
        "unigram": whole.single_loss(valid[:tested]),
        "nine_tenths": {
            "validation": part.loss(valid[:tested]),
            "the other tenth": part.loss(train[cut:]),
        },
        "unknown_words_per_1000_characters": {
            name: 1000 * x.count("<unk>") / len(x) for name, x in text.items()
        },
    }
    facts = {key: str(value) for key, value in source.facts().items()}
    setting = {
        "data": options.data.name,
        "valid": options.valid.name,
        "discount": DISCOUNT,
        "eval_tokens": tested,
    }
    save({"config": setting, "data": facts, "machine": machine(), "losses": found}, options.out)
    print(found)


if __name__ == "__main__":
    main()
