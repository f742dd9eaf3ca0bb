"""Small files of GLUE in the official layout, and small models with a tokenizer of their words."""

import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_models import tiny

WORDS = ("the", "a", "cat", "dog", "name", "of", "function", "and", "value", "list", "no", "old")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
ENTAILMENT = ("entailment", "not_entailment")

# Of each task: folder, splits, header (None: has none), and a row from two texts and a number.
LAYOUT: dict[str, Any] = {
    "sst2": ("SST-2", ("train", "dev"), "sentence\tlabel", lambda a, b, n: f"{a}\t{n % 2}"),
    "cola": ("CoLA", ("train", "dev"), None, lambda a, b, n: f"gj04\t{n % 2}\t*\t{a}"),
    "mrpc": (
        "MRPC",
        ("train", "dev"),
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        lambda a, b, n: f"{n % 2}\t1\t2\t{a}\t{b}",
    ),
    "qqp": (
        "QQP",
        ("train", "dev"),
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        lambda a, b, n: f"{n}\t1\t2\t{a}\t{b}\t{n % 2}",
    ),
    "stsb": (
        "STS-B",
        ("train", "dev"),
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        lambda a, b, n: f"{n}\tg\tf\t2012\t0\tnone\tnone\t{a}\t{b}\t{n % 11 / 2:.3f}",
    ),
    "mnli": (
        "MNLI",
        ("train", "dev_matched", "dev_mismatched"),
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
        "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        lambda a, b, n: (
            f"{n}\t1\t2\tg\tp\tp\tp\tp\t{a}\t{b}\tneutral\t"
            f"{('entailment', 'neutral', 'contradiction')[n % 3]}"
        ),
    ),
    "qnli": (
        "QNLI",
        ("train", "dev"),
        "index\tquestion\tsentence\tlabel",
        lambda a, b, n: f"{n}\t{a}\t{b}\t{ENTAILMENT[n % 2]}",
    ),
    "rte": (
        "RTE",
        ("train", "dev"),
        "index\tsentence1\tsentence2\tlabel",
        lambda a, b, n: f"{n}\t{a}\t{b}\t{ENTAILMENT[n % 2]}",
    ),
}


def write_glue(folder: Path, *tasks: str, train: int = 12, dev: int = 6) -> Path:
    """The files of these tasks, with random sentences."""
    draw = random.Random(0)

    def sentence() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(2, 7)))

    for task in tasks:
        home, splits, header, row = LAYOUT[task]
        (folder / home).mkdir(parents=True, exist_ok=True)
        for split in splits:
            rows = [
                row(sentence(), sentence(), n) for n in range(train if split == "train" else dev)
            ]
            text = "\n".join([*([] if header is None else [header]), *rows]) + "\n"
            (folder / home / f"{split}.tsv").write_text(text, encoding="utf-8")
    return folder


def write_model(folder: Path, family: str = "bert", **changes: Any) -> Path:
    """A random model of a family in its real architecture, with a tokenizer of WORDS."""
    vocabulary = {word: place for place, word in enumerate((*SPECIAL, *WORDS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(folder)
    tiny(family, pad_token_id=0, **changes).save_pretrained(folder)
    return folder
