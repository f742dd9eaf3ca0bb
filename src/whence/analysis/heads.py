"""Positional attention of each head: what the position table alone puts into the logits."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from whence.analysis.results import HeadReport, Toeplitzness
from whence.analysis.stack_reader import StackReader
from whence.analysis.toeplitz import FEWEST_ROWS, Diagonals, diagonals, random_table
from whence.checks import require

CORNER = 128  # the largest corner of a matrix that a report keeps
NEAR = 64  # positions that most texts in training have
SENSITIVE = 0.1  # of the strongest head's curve


def head_reports(
    reader: StackReader, *, layer: int = 0, biases: bool = False
) -> tuple[HeadReport, ...]:
    """F_h = (E W_Q)(E W_K)^T * scale for each head h of a layer, with its curve and measures.

    Whether a head is sensitive to position is relative to its layer, see `sensitive`. A causal
    model's measures take the lags <= 0 alone; its matrix is shown whole. The null of R^2 is that of
    one random table with the same row norms, read by the same head.
    """
    causal = reader.causal
    scores = positional_attention(reader, layer, biases=biases)
    nulls = positional_attention(reader, layer, biases=biases, random=np.random.default_rng(0))
    return sensitive(
        [
            dataclasses.replace(
                report(matrix, layer, head, biases, causal=causal),
                null_r2=diagonals(null, causal=causal).r2(),
                near=_near(matrix, causal),
            )
            for head, (matrix, null) in enumerate(zip(scores, nulls, strict=True))
        ]
    )


def _near(matrix: Float[np.ndarray, "n n"], causal: bool) -> Toeplitzness | None:
    """The same over the positions that most texts in training have, without row 0."""
    stop = min(NEAR, len(matrix))
    if stop - 1 < FEWEST_ROWS:
        return None
    found = diagonals(matrix[1:stop, 1:stop], causal=causal)
    return Toeplitzness(1, stop, found.r2(), found.r2(main=False), None, None)


def positional_attention(
    reader: StackReader, layer: int, *, biases: bool, random: np.random.Generator | None = None
) -> Float[np.ndarray, "h n n"]:
    """F of all heads, from the vectors as stored, or from random ones of the same norms.

    With biases, each projection on the way adds its own: ALBERT's from 128 dimensions to the
    model's, W_Q and W_K. The LayerNorm between table and projections is left out, as it depends on
    the content, so F is known up to a factor that the content sets.
    """
    table = reader.table()
    require(table is not None, f"{reader.checkpoint.name} has no position table.")
    assert table is not None
    if random is not None:
        table = random_table(table, random)
    projection, parts = reader.projection(), reader.projections(layer)
    if projection is not None:
        table = table @ projection[0].T + biases * projection[1]
    require(
        table.shape[1] == parts.query.shape[2],
        f"the position vectors of {reader.checkpoint.name} have {table.shape[1]} dimensions, but "
        f"the projections of layer {layer} read {parts.query.shape[2]}.",
    )
    query = np.einsum("nm,hdm->hnd", table, parts.query, optimize=True)
    key = np.einsum("nm,hdm->hnd", table, parts.key, optimize=True)
    if biases:
        query, key = query + parts.query_bias[:, None], key + parts.key_bias[:, None]
    scores: Float[np.ndarray, "h n n"] = query @ key.transpose(0, 2, 1) * reader.scale(layer)
    return scores


def report(
    matrix: Float[np.ndarray, "n n"], layer: int, head: int, biases: bool, *, causal: bool
) -> HeadReport:
    """The report of one matrix; not yet compared with the other heads."""
    found = diagonals(matrix, causal=causal)
    return _filled(layer, head, biases, matrix[:CORNER, :CORNER], found)


def stated(
    curve: Float[np.ndarray, " l"],
    lag: Float[np.ndarray, " l"],
    layer: int,
    head: int,
    biases: bool,
) -> HeadReport:
    """The report of a curve that a model states itself: nothing spreads, so R^2 is 1.

    Lags go in ones from -reach to reach, or to 0 for a causal model; its matrix has 0 above.
    """
    reach = int(-lag[0])
    n = min(CORNER, reach + 1)
    inside = np.arange(n)[None] - np.arange(n)[:, None]
    seen = inside <= lag[-1]
    matrix = np.where(seen, curve[np.where(seen, inside, 0) + reach], 0.0)
    found = Diagonals(lag, reach + 1 - np.abs(lag), curve, np.zeros_like(curve))
    return _filled(layer, head, biases, matrix, found)


def sensitive(reports: Sequence[HeadReport]) -> tuple[HeadReport, ...]:
    """A head is sensitive to position if its curve moves at least a tenth as much as the strongest.

    "Moves" is `strength`, the deviation of the curve over the cells of the matrix. It is compared
    within the layer and not with a number of logits, because the LayerNorm that is left out of F
    scales all heads of a layer alike.
    """
    most = max((one.strength for one in reports), default=0.0)
    return tuple(
        dataclasses.replace(one, sensitive=most > 0 and one.strength >= SENSITIVE * most)
        for one in reports
    )


def _filled(
    layer: int, head: int, biases: bool, corner: Float[np.ndarray, "m m"], found: Diagonals
) -> HeadReport:
    return HeadReport(
        layer=layer,
        head=head,
        with_biases=biases,
        matrix=corner.astype(np.float32),
        lag=found.lag.astype(np.float32),
        curve=found.mean.astype(np.float32),
        spread=found.spread().astype(np.float32),
        r2=found.r2(),
        r2_off_diagonal=found.r2(main=False),
        strength=found.strength(),
        sensitive=False,
    )
