"""Toeplitzness: how much of a matrix its diagonals explain, and what a random table would give."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from whence.analysis.results import Component, TableReport, Toeplitzness
from whence.checks import at_least, require

Doubles = np.ndarray[Any, np.dtype[np.float64]]
FEWEST_ROWS = 4  # below, a diagonal off the main one has a single number or two


@dataclass(frozen=True, eq=False)
class Diagonals:
    """Each diagonal of a square matrix in three numbers, from lag = key - query = 1 - n upwards."""

    lag: Doubles
    count: Doubles
    mean: Doubles
    squares: Doubles  # sum of squared deviations from the diagonal's mean

    def r2(self, *, main: bool = True) -> float:
        """1 - SS(P - fit) / SS(P - mean P); `main` False leaves the main diagonal out of both.

        The best Toeplitz fit in least squares puts its mean on each diagonal. A matrix without any
        variance is Toeplitz: 1.
        """
        left, between = self._sums(main)
        total = left + between
        return 1.0 if total <= 0 else float(between / total)

    def strength(self) -> float:
        """Standard deviation of the fit over all cells: what lag alone does to a number."""
        between = self._sums(main=True)[1]
        return float(np.sqrt(between / self.count.sum()))

    def spread(self) -> Doubles:
        """Standard deviation along each diagonal."""
        return np.sqrt(self.squares / self.count)

    def _sums(self, main: bool) -> tuple[float, float]:
        """Sums of squares: within the diagonals, and of their means about the mean of all."""
        kept = self.count * (main | (self.lag != 0))
        if not kept.any():
            return 0.0, 0.0
        middle = (kept * self.mean).sum() / kept.sum()
        left = (self.squares * (kept > 0)).sum()
        between = (kept * (self.mean - middle) ** 2).sum()
        # What float64 leaves of a constant matrix is no variance.
        noise = kept.sum() * (np.finfo(np.float64).eps * np.abs(self.mean).max()) ** 2
        return (float(left), float(between)) if left + between > 64 * noise else (0.0, 0.0)


def diagonals(matrix: Float[np.ndarray, "n n"], *, causal: bool = False) -> Diagonals:
    """The diagonals in one pass; `causal` keeps the lags <= 0, all that such a model sees."""
    n = len(matrix)
    lag = np.arange(1 - n, 1 if causal else n).astype(np.float64)
    count = n - np.abs(lag)
    by_lag = skewed(matrix)[:, : len(lag)]
    mean = by_lag.sum(axis=0) / count
    # A second pass about the mean: the difference of two large sums would lose what is left.
    inside = skewed(np.ones((n, n)))[:, : len(lag)]
    squares = ((by_lag - mean) ** 2 * inside).sum(axis=0)
    return Diagonals(lag, count, mean, squares)


def skewed(matrix: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n lags"]:
    """out[i, lag + n - 1] = matrix[i, i + lag], and 0 where that is outside.

    Rows written 2n - 2 apart and read 2n - 1 apart shift by one more each: no loop, no index.
    """
    n = len(matrix)
    flat = np.zeros(n * (2 * n - 1))
    if n == 1:
        flat[:] = matrix[0]
    else:
        flat[n - 1 : n - 1 + n * (2 * n - 2)].reshape(n, 2 * n - 2)[:, :n] = matrix
    return flat.reshape(n, 2 * n - 1)


def monotonicity(gram: Float[np.ndarray, "n n"]) -> float:
    """Does the inner product fall with distance? (Wang et al. 2021, position embeddings in BERT.)

    Minus Spearman's rank correlation of P[i, j] and |i - j| in each row i without its diagonal
    cell, averaged over the rows: 1 where every step away lowers it, about 0 for a random table.
    """
    from scipy.stats import rankdata

    n = len(gram)
    off = ~np.eye(n, dtype=bool)
    distance = np.abs(np.arange(n)[None] - np.arange(n)[:, None]).astype(np.float64)
    a = rankdata(gram[off].reshape(n, n - 1), axis=1)
    b = rankdata(distance[off].reshape(n, n - 1), axis=1)
    a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    size = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    rows = np.divide((a * b).sum(axis=1), size, out=np.zeros(n), where=size > 0)
    return float(-rows[size > 0].mean()) if (size > 0).any() else 0.0


def symmetry(gram: Float[np.ndarray, "n n"]) -> float:
    """Is a position as close to the one k behind as to the one k ahead? (Wang et al. 2021.)

    P = E E^T always equals its transpose, which says nothing about a model, so the two sides of
    each row are compared: x = P[i, i - k], y = P[i, i + k], for all i and k with both inside.
    The number is Lin's concordance 2 cov(x, y) / (var x + var y + (mean x - mean y)^2), 1 only for
    x = y everywhere, with 0 for anything below.
    """
    n = len(gram)
    by_lag = skewed(gram)
    inside = skewed(np.ones((n, n))) > 0
    both = inside[:, n - 2 :: -1] & inside[:, n:]
    x, y = by_lag[:, n - 2 :: -1][both], by_lag[:, n:][both]
    size = x.var() + y.var() + (x.mean() - y.mean()) ** 2
    if size <= 0:
        return 1.0
    return float(max(0.0, 2 * ((x - x.mean()) * (y - y.mean())).mean() / size))


def table_report(
    table: Float[np.ndarray, "n d"],
    *,
    space: str,
    rows: str,
    draws: int = 4,
    seed: int = 0,
    leading: int = 8,
) -> TableReport:
    """Every measure of a table of position vectors, row 0 being the first position.

    The null of each R^2 is its mean over `draws` of Gaussian tables with the same row norms: the
    bright diagonal alone gives one of 512 x 384 an R^2 of 0.43.

        >>> random = np.random.default_rng(0).normal(size=(64, 16))
        >>> found = table_report(random, space="16 dimensions", rows="all")
        >>> round(found.whole.r2, 2), round(found.whole.r2_off_diagonal, 2)
        (0.22, 0.03)
    """
    n = len(table)
    at_least(1, draws=draws, leading=leading)
    require(
        n >= FEWEST_ROWS,
        f"the position table has {n} positions; its diagonals say something from {FEWEST_ROWS} on.",
    )
    gram = table @ table.T
    random = np.random.default_rng(seed)
    nulls = [null @ null.T for null in (random_table(table, random) for _ in range(draws))]
    share, scores = principal_components(gram, min(table.shape))
    return TableReport(
        space=space,
        rows=rows,
        gram=gram.astype(np.float32),
        whole=toeplitzness(gram, nulls, 0, n),
        windows=tuple(toeplitzness(gram, nulls, 1, stop) for stop in window_stops(n)),
        monotonicity=monotonicity(gram),
        symmetry=symmetry(gram),
        effective_dimensions=float(1 / (share**2).sum()) if share.any() else 0.0,
        null_effective_dimensions=float(np.mean([_participation(null) for null in nulls])),
        components_for_90=int(np.searchsorted(share.cumsum(), 0.9) + 1) if share.any() else 0,
        explained=share.astype(np.float32),
        components=tuple(
            component(float(part), values)
            for part, values in zip(share[:leading], scores.T[:leading], strict=True)
        ),
    )


def random_table(
    table: Float[np.ndarray, "n d"], random: np.random.Generator
) -> Float[np.ndarray, "n d"]:
    """Gaussian vectors with the norms of the table's: what a table without any order looks like."""
    null: Float[np.ndarray, "n d"] = random.standard_normal(table.shape)
    null /= np.linalg.norm(null, axis=1, keepdims=True)
    null *= np.linalg.norm(table, axis=1, keepdims=True)
    return null


def window_stops(n: int) -> tuple[int, ...]:
    """Windows 1..15, 1..31, 1..63, ... and 1..n - 1: without row 0, where [CLS] stands."""
    powers = (1 << k for k in range(4, n.bit_length()))
    return tuple(
        sorted({stop for stop in powers if stop < n} | ({n} if n > FEWEST_ROWS else set()))
    )


def toeplitzness(
    gram: Float[np.ndarray, "n n"], nulls: Sequence[Float[np.ndarray, "n n"]], start: int, stop: int
) -> Toeplitzness:
    """R^2 of the positions start..stop - 1, whole and without the main diagonal, with its nulls."""
    cut = slice(start, stop)
    found = diagonals(gram[cut, cut])
    null = [diagonals(other[cut, cut]) for other in nulls]
    return Toeplitzness(
        start,
        stop,
        found.r2(),
        found.r2(main=False),
        float(np.mean([one.r2() for one in null])) if null else None,
        float(np.mean([one.r2(main=False) for one in null])) if null else None,
    )


def principal_components(
    gram: Float[np.ndarray, "n n"], most: int
) -> tuple[Float[np.ndarray, " c"], Float[np.ndarray, "n c"]]:
    """Share of the variance and score at each position of every component, largest first.

    From the Gram matrix of the centred rows alone. Signs are free: the largest score is positive.
    """
    centred = _centred(gram)
    size, direction = np.linalg.eigh(centred)
    size, direction = size[::-1][:most].clip(min=0), direction[:, ::-1][:, :most]
    peak = np.take_along_axis(direction, np.abs(direction).argmax(axis=0)[None], axis=0)
    scores = direction * np.sign(peak) * np.sqrt(size)
    total = size.sum()
    noise = len(gram) * np.finfo(np.float64).eps * np.trace(gram)
    share = size / total if total > noise else np.zeros_like(size)
    return share, scores


def _centred(gram: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """The Gram matrix of the rows less their mean."""
    centred: Float[np.ndarray, "n n"] = (
        gram - gram.mean(axis=0) - gram.mean(axis=1, keepdims=True) + gram.mean()
    )
    return centred


def _participation(gram: Float[np.ndarray, "n n"]) -> float:
    """Effective dimensions without the components: trace^2 / sum of squares."""
    centred = _centred(gram)
    squares = (centred**2).sum()
    return float(np.trace(centred) ** 2 / squares) if squares > 0 else 0.0


def component(explained: float, values: Float[np.ndarray, " n"]) -> Component:
    """A component with the spectrum of its scores along the positions."""
    power = np.abs(np.fft.rfft(values)) ** 2
    total = power.sum()
    return Component(
        explained=explained,
        values=values.astype(np.float32),
        frequency=np.fft.rfftfreq(len(values)).astype(np.float32),
        power=(power / total if total > 0 else power).astype(np.float32),
    )
