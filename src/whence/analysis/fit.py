"""TISA fitted to a lag curve: for each head the S Gaussians and the S, in and out of a file."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from whence.analysis.gaussians import Floats, Problem, Solution, problem_of, solve
from whence.analysis.json_result import Array
from whence.analysis.results import Fit, HeadFits, HeadReport
from whence.checks import at_least, require
from whence.files import write_bytes
from whence.methods.tisa import Tisa

REACH = 64  # lags to either side that the fits of heads take: most text in training is that long
FLOOR = 1e-6  # of the curve's deviation: float32 curves have no more digits than this
TOGETHER = 4  # heads at once: more fall out of the cache


def fit_curve(
    lag: ArrayLike, curve: ArrayLike, *, kernels: int, weights: ArrayLike | None = None
) -> Fit:
    """curve(lag) = level + sum_s a_s exp(-b_s (lag - c_s)^2), by least squares.

    The level is a constant that a softmax does not see. `weights` (the entries behind each value;
    equal if None) multiply the squares. Deterministic; kernels come with the largest |a| first. No
    |a| is above twice the range of the curve, which rules out pairs of large kernels that cancel.
    A constant curve has amplitudes 0 and no R^2. The criterion is BIC, n log(residual^2) +
    (3 S + 1) log n over n lags, where a residual below a millionth of the curve's deviation counts
    as that millionth.

        >>> lag = np.arange(-20, 21)
        >>> fit = fit_curve(lag, 2 * np.exp(-0.1 * (lag - 3) ** 2) + 5, kernels=1)
        >>> print(np.round([*fit.amplitude, *fit.sharpness, *fit.offset, fit.level], 4).tolist())
        [2.0, 0.1, 3.0, 5.0]
    """
    at_least(1, kernels=kernels)
    problem = problem_of(lag, np.asarray(curve, dtype=float)[None], weights, kernels)
    return _fits(problem, kernels, n=len(problem.lag), within=np.zeros(1))[0][-1]


def fit_heads(
    heads: Sequence[HeadReport],
    *,
    most: int = 8,
    reach: int = REACH,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[HeadFits, ...]:
    """Fits for S = 1..most of every head's curve at |lag| <= reach, and the S of the smallest BIC.

    A lag counts as often as a text of reach + 1 tokens has it. Far lags are left out because few
    texts have them, so that what a model says there is hardly trained: in all-MiniLM-L6-v2 the
    curves go on as waves to both ends of the table, which only a kernel for each crest could fit.
    A curve too short for `most` kernels is fitted with as many as its lags allow.
    progress(done, all) is called after every few heads.

    The BIC is that of the head's matrix: n log(residual^2 + spread^2) + (3 S + 1) log n, the sum
    being the mean square of the matrix about the fit, spread and all. A curve is the smooth mean
    of dependent entries, so what is left of it is no noise, and a BIC of the curve alone buys
    kernels without end. Against what no function of lag can explain they are soon not worth their
    price. n is the number of positions: each brings one vector, however many entries it is in.
    """
    at_least(1, most=most, reach=reach)
    groups: dict[bytes, list[int]] = {}
    for index, head in enumerate(heads):
        groups.setdefault(np.asarray(head.lag, dtype=float).tobytes(), []).append(index)
    results: dict[int, HeadFits] = {}
    for members in groups.values():  # of the same lags, fitted together
        lag = np.asarray(heads[members[0]].lag, dtype=float)
        n = int(np.abs(lag).max(initial=0)) + 1
        near = np.abs(lag) <= reach
        lag = lag[near]
        entries = np.abs(lag).max(initial=0) + 1 - np.abs(lag)
        kernels = max(1, min(most, (len(lag) - 1) // 3))
        for part in range(0, len(members), TOGETHER):
            together = members[part : part + TOGETHER]
            curves = np.stack([np.asarray(heads[i].curve, dtype=float)[near] for i in together])
            spread = np.stack([np.asarray(heads[i].spread, dtype=float)[near] for i in together])
            within = spread**2 @ entries / entries.sum()
            problem = problem_of(lag, curves, entries, kernels)
            found = _fits(problem, kernels, n=n, within=within)
            for i, fits in zip(together, found, strict=True):
                chosen = min(fits, key=lambda fit: fit.criterion).kernels
                results[i] = HeadFits(heads[i].layer, heads[i].head, fits, chosen)
            if progress is not None:
                progress(len(results), len(heads))
    return tuple(results[i] for i in range(len(heads)))


def fitted(fit: Fit, lag: ArrayLike) -> Array:
    """The fitted sum of Gaussians at each lag, without the level: what TISA adds to the logits."""
    distance = np.asarray(lag, dtype=float)[:, None] - np.asarray(fit.offset)
    gaussian = np.exp(-np.asarray(fit.sharpness) * distance**2)
    curve: Array = (gaussian @ np.asarray(fit.amplitude)).astype(np.float32)
    return curve


def export_tisa(
    fits: Sequence[HeadFits], path: Path, *, kernels: int | None = None, source: str = ""
) -> Path:
    """Write the fits of all heads of one layer as a `tisa` checkpoint (safetensors).

    Each head is stored with the number of kernels that its criterion picked, or with `kernels` of
    them. Heads with fewer than the largest number are padded with kernels of amplitude 0. The file
    appears whole or not at all.

        >>> lag = np.arange(-20, 21)
        >>> fit = fit_curve(lag, np.exp(-0.1 * lag**2), kernels=1)
        >>> path = export_tisa([HeadFits(0, 0, (fit,), 1)], Path("tisa.safetensors"))
        >>> load_tisa(path).n_parameters()
        3
    """
    from safetensors.numpy import save

    require(len(fits) > 0, "there are no fits to export: fit at least one head.")
    layers = sorted({head.layer for head in fits})
    require(
        len(layers) == 1,
        f"a tisa checkpoint is one layer, got fits of layers {layers}. Export them one by one.",
    )
    by_head = {head.head: head for head in fits}
    require(
        len(by_head) == len(fits) and set(by_head) == set(range(len(fits))),
        f"a tisa checkpoint needs every head once, 0..{len(fits) - 1}, "
        f"got {[head.head for head in fits]}.",
    )
    picked = [_picked(by_head[h], kernels) for h in range(len(fits))]
    width = max(fit.kernels for fit in picked)
    tensors = {
        "amplitude": _padded((fit.amplitude for fit in picked), width, 0.0),
        "sharpness": _padded((fit.sharpness for fit in picked), width, 1.0),
        "offset": _padded((fit.offset for fit in picked), width, 0.0),
    }
    metadata = {
        "spec": f"tisa:kernels={width}",
        "n_heads": str(len(picked)),
        "layer": str(layers[0]),
        "source": source,
    }
    return write_bytes(path, save(tensors, metadata))


def load_tisa(path: Path) -> Tisa:
    """The method in a checkpoint that `export_tisa` wrote.

    >>> import torch
    >>> lag = np.arange(-20, 21)
    >>> fit = fit_curve(lag, 2 * np.exp(-0.1 * lag**2), kernels=1)
    >>> path = export_tisa([HeadFits(0, 0, (fit,), 1)], Path("tisa.safetensors"))
    >>> round(load_tisa(path).curve(torch.tensor([0])).item(), 4)
    2.0
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    require(path.is_file(), f"there is no file {path}. `whence inspect MODEL --fit` writes one.")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}.") from error
    names = {"amplitude", "sharpness", "offset"}
    require(
        set(tensors) == names and len({tensor.shape for tensor in tensors.values()}) == 1,
        f"{path} is no tisa checkpoint: it needs {sorted(names)} of one shape, "
        f"got { {name: tuple(tensor.shape) for name, tensor in sorted(tensors.items())} }.",
    )
    n_heads, kernels = tensors["amplitude"].shape
    method = Tisa(n_heads, kernels=kernels)
    method.load_state_dict(tensors)
    return method


def _picked(head: HeadFits, kernels: int | None) -> Fit:
    wanted = head.chosen if kernels is None else kernels
    found = {fit.kernels: fit for fit in head.fits}
    require(
        wanted in found,
        f"head {head.head} has no fit with {wanted} kernels, only with {sorted(found)}.",
    )
    return found[wanted]


def _padded(rows: Iterable[tuple[float, ...]], width: int, fill: float) -> Array:
    return np.array([[*row, *[fill] * (width - len(row))] for row in rows], dtype=np.float32)


def _fits(problem: Problem, most: int, *, n: int, within: Floats) -> list[tuple[Fit, ...]]:
    """For each curve, its fits with 1..most kernels; `within` is the variance about the curve."""
    by_kernels = [
        [_fit(problem, p, solution, n, float(within[p])) for p, solution in enumerate(solutions)]
        for solutions in solve(problem, most)
    ]
    return list(zip(*by_kernels, strict=True))


def _fit(problem: Problem, p: int, solution: Solution, n: int, within: float) -> Fit:
    s, left = len(solution.amplitude), solution.left  # left of a curve with variance 1
    deviation, mean = float(problem.deviation[p]), float(problem.mean[p])
    if deviation == 0:
        none, floor = (0.0,) * s, FLOOR * max(abs(mean), 1.0)
        bic = _bic(floor**2 + within, n, s)
        return Fit(s, none, (1.0,) * s, none, mean, 0.0, None, bic, problem.reach)
    amplitude = solution.amplitude * deviation
    order = np.argsort(-np.abs(amplitude), kind="stable")
    sharpness = np.exp(solution.shape[0]) / problem.half**2
    offset = solution.shape[1] * problem.half + problem.middle
    return Fit(
        kernels=s,
        amplitude=tuple(amplitude[order].tolist()),
        sharpness=tuple(sharpness[order].tolist()),
        offset=tuple(offset[order].tolist()),
        level=solution.level * deviation + mean,
        residual=deviation * left**0.5,
        r2=1 - left,
        criterion=_bic(max(left, FLOOR**2) * deviation**2 + within, n, s),
        reach=problem.reach,
    )


def _bic(variance: float, n: int, kernels: int) -> float:
    return float(n * np.log(variance) + (3 * kernels + 1) * np.log(n))
