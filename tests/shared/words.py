"""A small text, and a tokenizer of its whole words to stand beside a model."""

from pathlib import Path

import numpy as np

WORDS = "the name of a function and the value of a list or set that one may call with many words"
TEXT = "\n".join(" ".join(np.roll(WORDS.split(), i)[: 5 + i % 9]) for i in range(40))


def with_tokenizer(folder: Path) -> Path:
    """A tokenizer of whole words with [CLS] and [SEP] around, beside a model."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    special |= {"sep_token": "[SEP]"}
    ids = {word: i for i, word in enumerate([*special.values(), *dict.fromkeys(WORDS.split())])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=24, **special)
    fast.save_pretrained(folder)
    return folder
