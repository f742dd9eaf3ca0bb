"""Two text files as one tokenized corpus, which `whence lm --data FILE.safetensors` reads at once.

    python benchmarks/lm_corpus.py --data train.txt --valid valid.txt --vocab-size 16384 \\
        --out corpus.safetensors [--tokenizer tokenizer.json]

The tokenizer is a byte-level BPE that is trained on the training text.
"""

import argparse
from pathlib import Path

from whence.experiments import save_corpus
from whence.experiments.lm.tokens import encoded, read_texts, tokenizer_for


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--valid", type=Path, help="else the last tenth of the text")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of a run on the same data")
    parser.add_argument("--vocab-size", type=int, default=16_384)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    valid = None if options.valid is None else str(options.valid)
    texts = read_texts(str(options.data), valid)
    size = options.vocab_size
    stored = tokenizer_for(texts, cache=None, given=options.tokenizer, vocab_size=size)
    corpus = encoded(texts, stored)
    save_corpus(corpus, stored.tokenizer, options.out)
    print(
        f"{options.out}: {len(corpus.train):,} tokens for training, {len(corpus.valid):,} for "
        f"validation, {options.out.stat().st_size / 1e6:.1f} MB, SHA-256 {corpus.sha256[:12]}"
    )


if __name__ == "__main__":
    main()
