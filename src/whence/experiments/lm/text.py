"""Packed blocks of a text: for the next token, or with some tokens masked."""

from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from whence.checks import require
from whence.experiments.lm.source import IGNORED, VALIDATION, Scored, Source, generator
from whence.experiments.lm.tokens import MASK, Corpus

MASKED, REPLACED = 0.15, 0.8  # share of tokens to predict; of these become the mask
RANDOM = 0.1  # of these become any token; the rest stay


class Text(Source):
    """Blocks side by side, in a new random order for each time through the text.

    The last `tuning_tokens` of the validation text, in whole blocks, are for choosing a learning
    rate; what is reported comes from the tokens before them. Ids stay as narrow as the corpus has
    them, and are widened block by block.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        train_length: int,
        longest: int,
        masked: bool,
        eval_tokens: int,
        tuning_tokens: int = 0,
    ) -> None:
        self.corpus, self.masked, self.train_length = corpus, masked, train_length
        self.vocab_size, self.sha256 = corpus.vocab_size, corpus.sha256
        self.train, self.valid = torch.from_numpy(corpus.train), torch.from_numpy(corpus.valid)
        self.n_blocks = len(self.train) // train_length
        require(
            self.n_blocks > 0,
            f"the text is shorter than a block: {len(self.train)} tokens for training, a block has "
            f"{train_length}. Give more text, or a smaller --train-length.",
        )
        require(
            len(self.valid) > longest,
            f"the text is shorter than a block: {len(self.valid)} tokens for validation, the "
            f"longest of --eval-lengths needs {longest + 1}. Give more text (--valid), or shorter "
            "--eval-lengths.",
        )
        require(
            not masked or corpus.mask is not None,
            f"the tokenizer of this corpus has no token {MASK}, which the masked objective needs.",
        )
        self.tuning_tokens = tuning_tokens // train_length * train_length
        reported = len(self.valid)  # tokens that may be reported: those before the tuning part
        if self.tuning_tokens:
            reported -= self.tuning_tokens + 1
        require(
            reported > longest,
            f"the validation text has {len(self.valid)} tokens, too few for the longest of "
            f"--eval-lengths, {longest}, and {self.tuning_tokens} others to choose a learning rate "
            "by. Give more text (--valid), a smaller --tuning-tokens, shorter --eval-lengths, or "
            "one --learning-rate.",
        )
        self.reported = reported
        self.scored_tokens = max(min(eval_tokens, reported - 1) // longest, 1) * longest
        self._order: tuple[tuple[int, int], Tensor] | None = None

    def example(self, seed: int, index: int) -> dict[str, Tensor]:
        """Block number `index` of the run."""
        turn, place = divmod(index, self.n_blocks)
        block = int(self._blocks(seed, turn)[place])
        ids = self.train[block * self.train_length : (block + 1) * self.train_length].long()
        if not self.masked:
            return {"input_ids": ids, "labels": ids}
        ids, labels = self._hide(ids, generator(seed, index, 1))
        return {"input_ids": ids, "labels": labels}

    def scored(self, length: int, *, sliding: bool, tokens: int) -> Iterator[Scored] | None:
        """The first tokens of the validation text, the same ones for every length."""
        if sliding and self.masked:
            return None
        stride = max(length // 2, 1) if sliding else length
        starts = range(0, self.scored_tokens - length + 1, stride)
        return self._scored(length, starts, max(tokens // length, 1))

    def tuning(self, *, tokens: int) -> Iterator[Scored]:
        """The last blocks of the validation text, side by side."""
        last = len(self.valid) - 1
        starts = range(last - self.tuning_tokens, last, self.train_length)
        return self._scored(self.train_length, starts, max(tokens // self.train_length, 1))

    def sample(self, rows: int) -> Int[Tensor, "rows n"]:
        """From the beginning of the validation text."""
        rows = min(rows, self.reported // self.train_length)
        return self.valid[: rows * self.train_length].long().view(rows, -1)

    def facts(self) -> dict[str, str | int]:
        """Sizes and what identifies the text."""
        return {
            "sha256": self.sha256,
            "train_tokens": len(self.train),
            "valid_tokens": len(self.valid),
            "vocab_size": self.vocab_size,
            "characters_a_token": f"{self.corpus.characters / len(self.train):.2f}",
        }

    def _scored(self, length: int, starts: range, rows: int) -> Iterator[Scored]:
        """Windows from each start on; where windows overlap, a token is scored once."""
        for first in range(0, len(starts), rows):
            ids, targets = [], []
            for start in starts[first : first + rows]:
                block = self.valid[start : start + length].long()
                if self.masked:
                    block, target = self._hide(block, generator(VALIDATION, start, length))
                else:
                    target = self.valid[start + 1 : start + length + 1].long()
                    if start > starts.start:
                        target[: length - starts.step] = IGNORED
                ids.append(block)
                targets.append(target)
            yield Scored(torch.stack(ids), torch.stack(targets))

    def _blocks(self, seed: int, turn: int) -> Tensor:
        """The order of the blocks in one turn through the text; the last one asked for is kept."""
        if self._order is None or self._order[0] != (seed, turn):
            order = torch.randperm(self.n_blocks, generator=generator(seed, turn, 0))
            self._order = ((seed, turn), order)
        return self._order[1]

    def _hide(
        self, ids: Int[Tensor, " n"], random: torch.Generator
    ) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """BERT's recipe: what the model sees, and the labels. One token is masked at the least."""
        n, mask = len(ids), self.corpus.mask
        assert mask is not None
        chance = torch.rand(n, generator=random)
        chosen = chance < MASKED
        chosen[int(chance.argmin())] = True
        how = torch.rand(n, generator=random)
        other = torch.randint(self.vocab_size, (n,), generator=random)
        seen = torch.where(chosen & (how < REPLACED), mask, ids)
        seen = torch.where(chosen & (how >= REPLACED) & (how < REPLACED + RANDOM), other, seen)
        return seen, torch.where(chosen, ids, IGNORED)
