"""The paired bootstrap of BLEU (Koehn, 2004): would other sentences give the same sign?"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

from whence.analysis.json_result import Array

DRAWS = 1000
SEED = 12345  # sacrebleu's


def bleu_of(sums: Iterable[float]) -> float:
    """BLEU of the summed statistics of sentences, as `scoring.statistics` has them."""
    from sacrebleu.metrics import BLEU

    numbers = [int(x) for x in sums]
    found = BLEU.compute_bleu(
        correct=numbers[2:6],
        total=numbers[6:],
        sys_len=numbers[0],
        ref_len=numbers[1],
        smooth_method="exp",  # as BLEU() has it; it matters where no n-gram of some order is right
        effective_order=False,
    )
    return float(found.score)


def drawn_bleu(statistics: Array, *, draws: int = DRAWS) -> Float[np.ndarray, " draws_and_one"]:
    """BLEU of the sentences as they are, then of as many that are drawn from them, again and again.

    The draws are the same for any two texts of as many sentences, so that they can be paired.
    """
    n = len(statistics)
    draw = np.random.default_rng(SEED)
    whole = statistics.astype(np.float64)
    sums = [whole.sum(axis=0)]
    sums += [whole[draw.integers(n, size=n)].sum(axis=0) for _ in range(draws)]
    return np.asarray([bleu_of(row) for row in sums])


def compared(
    ours: Sequence[Float[np.ndarray, " draws_and_one"]],
    base: Sequence[Float[np.ndarray, " draws_and_one"]],
) -> tuple[float, float, float, float]:
    """Mean, low, high and p of our BLEU less the baseline's; a row of `drawn_bleu` for each seed.

    p is the share of draws whose difference is as far from the mean of the draws as the measured
    one is from 0, as sacrebleu has it.
    """
    differences = np.mean(ours, axis=0) - np.mean(base, axis=0)
    measured, draws = float(differences[0]), differences[1:]
    low, high = np.percentile(draws, [2.5, 97.5])
    far = np.abs(draws - draws.mean()) >= abs(measured)
    return measured, float(low), float(high), float((far.sum() + 1) / (len(draws) + 1))
