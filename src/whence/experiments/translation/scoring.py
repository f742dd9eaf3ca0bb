"""BLEU and chrF of translations, by sacrebleu, with its signatures."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from whence.analysis.json_result import Array
from whence.extras import install


def metrics() -> tuple[Any, Any]:
    """sacrebleu's BLEU and chrF as they are by default: cased, tokenized by 13a."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise ImportError(
            f"scores need sacrebleu: {install('translate')}", name="sacrebleu"
        ) from error
    return BLEU(), CHRF()


def scored(translations: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Both scores, their signatures, and the statistics of each sentence [n, 10].

    The statistics are sacrebleu's: the lengths of translation and reference in words, then the
    n-grams of 1 to 4 words that are right, then those that there are.
    """
    bleu, chrf = metrics()
    return {
        "bleu": bleu.corpus_score(translations, [references]).score,
        "chrf": chrf.corpus_score(translations, [references]).score,
        "signatures": (str(bleu.get_signature()), str(chrf.get_signature())),
        "statistics": statistics(translations, references),
    }


def statistics(translations: Sequence[str], references: Sequence[str]) -> Array:
    """What BLEU sums over sentences, for each of them [n, 10]."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(effective_order=True)  # a sentence may be shorter than four words
    rows = []
    for text, reference in zip(translations, references, strict=True):
        one = metric.sentence_score(text, [reference])
        rows.append([one.sys_len, one.ref_len, *one.counts, *one.totals])
    return np.asarray(rows, np.float32)
