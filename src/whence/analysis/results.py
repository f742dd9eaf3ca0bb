"""What the instruments find in a model, as frozen results: the fields say what each number is.

A number that does not exist is None: the share of variance explained where nothing varies.
"""

from dataclasses import dataclass

from whence.analysis.json_result import AGAIN, Array, Result, one_length
from whence.checks import require


@dataclass(frozen=True, eq=False)
class ModelFacts(Result):
    """What was inspected."""

    name: str
    family: str  # "bert", "albert", ... the row of the families table
    position: str  # how position enters: "table", "table + t5 bias", "rope", "alibi", "t5 bias"
    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    n_positions: int | None  # rows of the table that are positions
    sha256: str  # of the weights' file

    @property
    def shape(self) -> str:
        """Its sizes in words; a bare table has no layers."""
        if self.n_layers == 0:
            return f"{self.n_positions} positions, width {self.d_model}"
        return f"{self.n_layers} layers, {self.n_heads} heads of {self.d_head}"


@dataclass(frozen=True, eq=False)
class Toeplitzness(Result):
    """R^2 of the best Toeplitz fit of a matrix, with and without its main diagonal, and the nulls.

    The nulls are the same measures of a random table with the same row norms.
    """

    start: int  # positions start..stop - 1, [CLS] standing at 0
    stop: int
    r2: float | None
    r2_off_diagonal: float | None
    null_r2: float | None
    null_r2_off_diagonal: float | None

    def __post_init__(self) -> None:
        require(
            0 <= self.start < self.stop,
            f"Toeplitzness is of positions start..stop - 1, got {self.start} and {self.stop}.",
        )


@dataclass(frozen=True, eq=False)
class Component(Result):
    """One principal component of the position table along the positions."""

    explained: float  # share of the variance
    values: Array  # [n] its score at each position
    frequency: Array  # [f] cycles a position
    power: Array  # [f] share of its power at each frequency

    def __post_init__(self) -> None:
        one_length("Component", values=self.values)
        one_length("Component", frequency=self.frequency, power=self.power)


@dataclass(frozen=True, eq=False, repr=False)
class TableReport(Result):
    """The position table of a model and its inner products P = E E^T."""

    space: str  # which space the vectors live in: "384 dimensions", "128, before the projection"
    rows: str  # which rows count as positions and why: "rows 2..513; 0 and 1 are not positions"
    gram: Array  # [n, n]
    whole: Toeplitzness
    windows: tuple[Toeplitzness, ...]  # as a function of the window
    monotonicity: float | None  # in [-1, 1]: does the inner product fall with distance?
    symmetry: (
        float | None
    )  # in [0, 1]: is P's lag curve the same to both sides, diagonal by diagonal
    effective_dimensions: float | None  # participation ratio of the principal components
    null_effective_dimensions: float | None  # of a random table with the same row norms
    components_for_90: int | None  # components that explain nine tenths of the variance
    explained: Array  # [d] share of the variance of every component; empty if all rows are one
    components: tuple[Component, ...]  # the leading ones

    def __repr__(self) -> str:
        whole = self.whole
        return (
            f"TableReport({len(self.gram)} positions in {self.space}: R^2 {worded(whole.r2)} "
            f"(random {worded(whole.null_r2)}), off the diagonal {worded(whole.r2_off_diagonal)} "
            f"({worded(whole.null_r2_off_diagonal)}), "
            f"{worded(self.effective_dimensions, '.1f')} effective dimensions)"
        )

    def __post_init__(self) -> None:
        _square("TableReport.gram", self.gram)
        require(self.explained.ndim == 1, f"TableReport.explained must be a vector. {AGAIN}")


@dataclass(frozen=True, eq=False)
class HeadReport(Result):
    """Positional attention of one head: F = (E W_Q)(E W_K)^T / sqrt(d), and its curve over lags."""

    layer: int
    head: int
    with_biases: bool
    matrix: Array  # [m, m] the corner over the first m positions (m <= 128)
    lag: Array  # [l] lag = key - query
    curve: Array  # [l] mean of each diagonal
    spread: Array  # [l] standard deviation along each diagonal
    r2: float | None
    r2_off_diagonal: float | None
    strength: float  # deviation of the curve over lags, in logits
    sensitive: bool  # to position: the rule is in the code's docstring
    null_r2: float | None = None  # of a random table read by the same head; None for a stated curve
    near: Toeplitzness | None = None  # of the first positions alone; None for a stated curve

    def __post_init__(self) -> None:
        _square("HeadReport.matrix", self.matrix)
        one_length("HeadReport", lag=self.lag, curve=self.curve, spread=self.spread)


@dataclass(frozen=True, eq=False)
class LagProfile(Result):
    """Logits of real text averaged over content as a function of lag."""

    layer: int
    head: int
    lag: Array
    mean: Array
    low: Array  # 95% confidence band of the mean, over independent pieces of text
    high: Array
    explained: float | None  # share of the logits' variance that lag explains
    n_tokens: int

    def __post_init__(self) -> None:
        one_length("LagProfile", lag=self.lag, mean=self.mean, low=self.low, high=self.high)


@dataclass(frozen=True, eq=False)
class Fit(Result):
    """A sum of S Gaussians fitted to a lag curve."""

    kernels: int
    amplitude: tuple[float, ...]
    sharpness: tuple[float, ...]
    offset: tuple[float, ...]
    level: float  # a constant, which a softmax does not see, fitted along and left out of TISA
    residual: float  # root mean square of what is left
    r2: float | None  # None for a constant curve
    criterion: float  # BIC, the spread about the curve counted: smaller is better
    reach: float | None = None  # the largest |lag| that was fitted; None in files that do not say

    def __post_init__(self) -> None:
        sizes = [len(part) for part in (self.amplitude, self.sharpness, self.offset)]
        require(
            sizes == [self.kernels] * 3 and self.kernels > 0,
            f"a Fit of {self.kernels} kernels needs as many amplitudes, sharpnesses and offsets, "
            f"got {sizes}.",
        )


@dataclass(frozen=True, eq=False)
class HeadFits(Result):
    """The fits of one head's curve for S = 1..8 and the one that the criterion picks."""

    layer: int
    head: int
    fits: tuple[Fit, ...]
    chosen: int  # the S picked

    def __post_init__(self) -> None:
        known = [fit.kernels for fit in self.fits]
        require(
            self.chosen in known, f"there is no fit with the chosen S = {self.chosen}: {known}."
        )


@dataclass(frozen=True, eq=False)
class Inspection(Result):
    """Everything `whence inspect` found in one model."""

    model: ModelFacts
    table: TableReport | None
    heads: tuple[HeadReport, ...]
    relative: tuple[HeadReport, ...]  # curves that the model states itself: T5 bias, ALiBi
    profiles: tuple[LagProfile, ...]
    fits: tuple[HeadFits, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]


def _square(name: str, matrix: Array) -> None:
    require(
        matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] > 0,
        f"{name} must be a square matrix, got the shape {list(matrix.shape)}. {AGAIN}",
    )


def worded(value: float | None, form: str = ".3f") -> str:
    """A number as text, and a word where there is none."""
    return "undefined" if value is None else format(value, form)
