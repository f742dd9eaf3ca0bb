"""The joint byte-level BPE of two languages: trained once, kept beside the results."""

from collections.abc import Iterable, Sequence
from typing import Any

from whence.checks import at_least

PAD, END = "<pad>", "</s>"  # the first two tokens; padding also starts a translation
PAD_ID, END_ID = 0, 1
FEWEST = 256 + 2  # every byte, and the two


def trained_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """The JSON of a tokenizer that was trained on these texts; it ends each with END."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    at_least(FEWEST, vocab_size=vocab_size)
    tokenizer = Tokenizer(models.BPE())
    # With a space before it, the first word of a text is the same token as anywhere else.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, END_ID)]
    )
    found: str = tokenizer.to_str()
    return found


class Bpe:
    """Texts to tokens and back, by the JSON that `trained_bpe` gave."""

    def __init__(self, tokenizer: str) -> None:
        from tokenizers import Tokenizer

        self.json = tokenizer
        self.tokenizer: Any = Tokenizer.from_str(tokenizer)
        self.tokenizer.encode_special_tokens = True  # "</s>" in a text is text

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return int(self.tokenizer.get_vocab_size())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, END last."""
        return [found.ids for found in self.tokenizer.encode_batch_fast(list(texts))]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The texts, without PAD and END, and without white space around them."""
        found = self.tokenizer.decode_batch(list(rows), skip_special_tokens=True)
        return [text.strip() for text in found]
