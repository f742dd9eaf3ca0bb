"""Sums of Gaussians by least squares: variable projection from many starts, for many curves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares

from whence.checks import require

Floats = np.ndarray[Any, np.dtype[np.float64]]

SHARPEST = 8.0  # at one lag from its centre such a kernel is 3e-4: sharper ones look the same
TALLEST = 2.0  # an amplitude is at most so many times the range of the curve
RIDGE = 1e-4  # of a kernel's own square, while descending: keeps opposite pairs from growing
BEAM, STARTS = 3, 6
GLANCE, STEPS, POLISH = 8, 40, 50
FAR = 300.0  # a long step of the polish, which has no bounds, may not overflow the exponential


@dataclass(frozen=True, eq=False)
class Problem:
    """Curves over the same lags, each brought to mean 0 and deviation 1; lags to -1..1."""

    lag: Floats  # [l]
    root: Floats  # [l] of each weight; the weights sum to 1
    curve: Floats  # [p, l] times the root
    mean: Floats  # [p]
    deviation: Floats  # [p]; 0 for a constant curve
    tallest: Floats  # [p] the largest amplitude, in deviations
    middle: float
    half: float  # half the range of lags: the unit of width

    @property
    def reach(self) -> float:
        """The largest |lag|."""
        return abs(self.middle) + self.half

    @property
    def bounds(self) -> Floats:
        """The box of a kernel, [low or high, (log sharpness, centre)].

        From four times as wide as the lags to narrower than one lag, a little beyond the ends.
        """
        return np.array([[np.log(1 / 16), -1.5], [np.log(SHARPEST * self.half**2), 1.5]])


def problem_of(lag: ArrayLike, curves: ArrayLike, weights: ArrayLike | None, most: int) -> Problem:
    """The curves [p, l] over these lags, refused where `most` kernels cannot be fitted to them."""
    x, y = np.asarray(lag, dtype=float), np.asarray(curves, dtype=float)
    w = np.ones_like(x) if weights is None else np.asarray(weights, dtype=float)
    require(
        x.ndim == 1 and x.shape == y.shape[1:] == w.shape,
        "lag, curve and weights must be vectors of one length, "
        f"got {x.shape}, {y.shape[1:]} and {w.shape}.",
    )
    bad = int((~np.isfinite(np.stack([x, w, *y]))).any(axis=0).sum())
    require(bad == 0, f"{bad} of {len(x)} lags have a value that is not finite. Leave them out.")
    require(bool((w > 0).all()), "weights must be above 0. Leave out the lags that do not count.")
    n = len(np.unique(x))
    require(
        n > 3 * most,
        f"{most} Gaussians and a level are {3 * most + 1} parameters, more than the {n} lags "
        "of the curve. Fit fewer kernels or a longer curve.",
    )
    w = w / w.sum()
    mean = y @ w
    deviation = np.sqrt((y - mean[:, None]) ** 2 @ w)
    deviation[deviation <= 1e-7 * np.abs(y).max(axis=1)] = 0  # rounding of a float32 constant
    middle, half = float(x.max() + x.min()) / 2, float(x.max() - x.min()) / 2
    scaled = (y - mean[:, None]) / np.where(deviation > 0, deviation, np.inf)[:, None]
    root, tallest = np.sqrt(w), TALLEST * np.ptp(scaled, axis=1)
    return Problem((x - middle) / half, root, scaled * root, mean, deviation, tallest, middle, half)


@dataclass(frozen=True, eq=False)
class Solution:
    """S kernels of one curve, in the units of its problem, and the sum of squares they leave."""

    shape: Floats  # [2, s] log sharpnesses and centres
    amplitude: Floats  # [s]
    level: float
    left: float

    def with_idle_kernel(self) -> "Solution":
        """The same curve, of one kernel more."""
        shape = np.concatenate([self.shape, self.shape[:, -1:]], axis=1)
        return Solution(shape, np.append(self.amplitude, 0.0), self.level, self.left)


def solve(problem: Problem, most: int) -> Iterator[list[Solution]]:
    """For S = 1..most in turn, the best solution of each curve, polished by scipy.

    A beam of the best shapes with S - 1 kernels grows by the atoms that help each the most, for
    all curves at once. No amplitude is beyond `tallest`: two wide kernels almost in one place,
    large and opposite, make the derivative of one, which fits a little better and means nothing.
    """
    atoms = _atoms(problem)
    columns = _gaussians(problem, atoms.T[:, :, None])[0][:, 0] * problem.root
    beam = np.empty((len(problem.curve), 1, 2, 0))  # [p, beam, 2, s]
    before: list[Solution] = []
    for _ in range(most):
        starts = _grown(problem, beam, atoms, columns)
        hopeful = _best(*_descend(problem, starts, GLANCE), 2 * BEAM)
        beam = _best(*_descend(problem, hopeful, STEPS), BEAM)
        new = [_polished(problem, p, shapes[0]) for p, shapes in enumerate(beam)]
        if before:  # a kernel more is never worse
            pairs = zip(before, new, strict=True)
            new = [one if one.left <= old.left else old.with_idle_kernel() for old, one in pairs]
        before = new
        yield new


def _atoms(problem: Problem) -> Floats:
    """Single kernels [2, m] to start from: widths in steps of two, centres one width apart."""
    (low, _), (high, _) = problem.bounds
    grid = []
    for level in np.arange(high - 1.5, low, -2 * np.log(2)):
        count = 1 + int(2 * np.exp(level / 2))
        centre = np.linspace(-1, 1, int(np.clip(count, 5, len(problem.lag))))
        grid.append(np.stack([np.full_like(centre, level), centre]))
    return np.concatenate(grid, axis=1)


def _grown(problem: Problem, beam: Floats, atoms: Floats, columns: Floats) -> Floats:
    """Each solution of a beam plus each of the few atoms that lower its residual the most."""
    p, k, _, s = beam.shape
    solved = [_project(problem, i, shape) for i in range(p) for shape in beam[i]]
    n = len(problem.lag)
    sides = np.stack([np.column_stack([basis, left]) for basis, left, *_ in solved], axis=1)
    along = (columns @ sides.reshape(n, -1)).reshape(-1, p * k, s + 2) ** 2
    norm = (columns**2).sum(axis=1)[:, None] - along[..., :-1].sum(axis=2)
    gain = along[..., -1] / np.maximum(norm, 1e-9)
    chosen = np.array([_unlike(atoms, column) for column in gain.T])  # [p k, start, 2]
    old = np.repeat(beam.reshape(p * k, 1, 2, s), STARTS, axis=1)
    return np.concatenate([old, chosen[..., None]], axis=3).reshape(p, k * STARTS, 2, s + 1)


def _unlike(atoms: Floats, gain: Floats) -> list[Floats]:
    """The atoms of the largest gain, no two alike."""
    gain, found = gain.copy(), []
    for _ in range(STARTS):
        atom = atoms[:, gain.argmax()]
        found.append(atom)
        alike = np.abs(atoms[0] - atom[0]) < 1.5
        gain[alike & (np.abs(atoms[1] - atom[1]) < 2 * np.exp(-atom[0] / 2))] = -1
    return found


def _best(cost: Floats, shape: Floats, count: int) -> Floats:
    """The best solutions of each curve [p, count, 2, s]; those of one cost are one solution."""
    beams = []
    for costs, shapes in zip(cost, shape, strict=True):
        order = np.argsort(costs, kind="stable")
        new = np.diff(costs[order], prepend=-1) > 1e-4 * costs[order]
        kept = np.concatenate([order[new], order[~new]])[:count]
        beams.append(shapes[kept])
    return np.array(beams)


def _gaussians(problem: Problem, shape: Floats) -> tuple[Floats, Floats, Floats]:
    """The kernels [..., s, l] of a shape [..., 2, s], and their derivatives in its two rows."""
    sharpness = np.exp(shape[..., 0, :, None])
    distance = problem.lag - shape[..., 1, :, None]
    pull = sharpness * distance
    exponent = pull * distance
    kernel = np.exp(-exponent)
    return kernel, -exponent * kernel, 2 * pull * kernel


def _descend(problem: Problem, start: Floats, steps: int) -> tuple[Floats, Floats]:
    """Levenberg and Marquardt's descent from all starts at once: their costs and shapes.

    It squares the condition of the problem, so what it finds is good to some six digits.
    """
    p, k, _, s = start.shape
    shape = start.reshape(p * k, 2, s).copy()
    curve = np.repeat(problem.curve, k, axis=0)
    low, high = problem.bounds[:, :, None]
    cost, slope, bend = _normal(problem, shape, curve)
    damping = np.full(p * k, 1e-2)
    going = np.arange(p * k)
    for _ in range(steps):
        diagonal = np.einsum("bii->bi", bend[going])
        ridge = damping[going, None] * diagonal + 1e-12
        system = bend[going] + ridge[:, :, None] * np.eye(2 * s)
        step = np.linalg.solve(system, slope[going, :, None]).reshape(-1, 2, s)
        trial = np.clip(shape[going] + step, low, high)
        new_cost, new_slope, new_bend = _normal(problem, trial, curve[going])
        better = new_cost < cost[going]
        gain = cost[going] - new_cost
        done = np.where(better, gain <= 1e-7 * cost[going], damping[going] > 1e4)
        taken = going[better]
        shape[taken], cost[taken] = trial[better], new_cost[better]
        slope[taken], bend[taken] = new_slope[better], new_bend[better]
        damping[going] *= np.where(better, 0.2, 5.0)
        going = going[~done]
        if not going.size:
            break
    return cost.reshape(p, k), shape.reshape(p, k, 2, s)


def _normal(problem: Problem, shape: Floats, curve: Floats) -> tuple[Floats, Floats, Floats]:
    """The cost [b] with the amplitudes solved for, its slope [b, 2s] and its bend [b, 2s, 2s].

    The bend is Kaufman's: the change of the kernels, less its part that amplitudes can undo.
    """
    s = shape.shape[-1]
    parts = np.empty((len(shape), 3 * s + 1, len(problem.lag)))
    kernel, by_sharpness, by_centre = _gaussians(problem, shape)
    parts[:, :s], parts[:, s] = kernel, 1
    parts[:, s + 1 : 2 * s + 1], parts[:, 2 * s + 1 :] = by_sharpness, by_centre
    parts *= problem.root
    gram = parts @ parts.transpose(0, 2, 1)
    onto = (parts @ curve[:, :, None])[:, :, 0]
    fixed, cross = gram[:, : s + 1, : s + 1].copy(), gram[:, : s + 1, s + 1 :]
    own = fixed[:, range(s), range(s)]
    fixed[:, range(s), range(s)] += RIDGE * own + 1e-10  # one between two lags is all 0
    solved = np.linalg.solve(fixed, np.concatenate([onto[:, : s + 1, None], cross], axis=2))
    linear, undone = solved[:, :, 0], solved[:, :, 1:]
    amplitude = np.tile(linear[:, :s], 2)
    slope = amplitude * (onto[:, s + 1 :] - np.einsum("bij,bi->bj", cross, linear))
    bend = gram[:, s + 1 :, s + 1 :] - cross.transpose(0, 2, 1) @ undone
    cost = (curve**2).sum(axis=1) - (linear * onto[:, : s + 1]).sum(axis=1)
    return np.maximum(cost, 0), slope, bend * amplitude[:, :, None] * amplitude[:, None, :]


def _project(
    problem: Problem, p: int, shape: Floats
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """One curve's amplitudes and level solved for by QR: basis, residual, solution, derivatives."""
    s = shape.shape[-1]
    kernel, by_sharpness, by_centre = _gaussians(problem, shape)
    design = np.empty((len(problem.lag), s + 1))
    design[:, :s] = (kernel * problem.root).T
    design[:, s] = problem.root
    basis, upper = np.linalg.qr(design)
    along = basis.T @ problem.curve[p]
    linear = np.linalg.lstsq(upper, along, rcond=1e-12)[0]  # two kernels may be the same one
    return basis, problem.curve[p] - design @ linear, linear, by_sharpness, by_centre


def _polished(problem: Problem, p: int, shape: Floats) -> Solution:
    """The minimum next to this shape, to the last digits, within the bounds."""
    s = shape.shape[-1]

    def residual(flat: Floats) -> Floats:
        return _project(problem, p, flat.clip(-FAR, FAR).reshape(2, s))[1]

    def jacobian(flat: Floats) -> Floats:
        basis, _, linear, *by = _project(problem, p, flat.clip(-FAR, FAR).reshape(2, s))
        change = np.concatenate([d * linear[:s, None] * problem.root for d in by]).T
        less: Floats = basis @ (basis.T @ change) - change
        return less

    found = least_squares(residual, shape.ravel(), jacobian, method="lm", max_nfev=POLISH)
    low, high = problem.bounds[:, :, None]
    polished: Floats = found.x.reshape(2, s)
    _, left, linear, *_ = _project(problem, p, polished)
    inside = bool(((low <= polished) & (polished <= high)).all())
    if inside and np.abs(linear[:s]).max() <= problem.tallest[p]:
        return Solution(polished, linear[:s], float(linear[s]), float(left @ left))
    return _bounded(problem, p, shape)


def _bounded(problem: Problem, p: int, shape: Floats) -> Solution:
    """The minimum next to this shape where the bounds hold it: in all parameters at once."""
    s, tallest = shape.shape[-1], problem.tallest[p]

    def sides(flat: Floats) -> tuple[Floats, Floats]:
        kernel, by_sharpness, by_centre = _gaussians(problem, flat[: 2 * s].reshape(2, s))
        amplitude = flat[2 * s : 3 * s, None]
        rows = (by_sharpness * amplitude, by_centre * amplitude, kernel, np.ones_like(kernel[:1]))
        made = (amplitude * kernel).sum(axis=0) + flat[3 * s]
        return made * problem.root - problem.curve[p], (np.concatenate(rows) * problem.root).T

    low, high = np.repeat(problem.bounds, s, axis=1)
    low = np.concatenate([low, np.full(s, -tallest), [-np.inf]])
    high = np.concatenate([high, np.full(s, tallest), [np.inf]])
    linear = _project(problem, p, shape)[2]
    start = np.clip(np.concatenate([shape.ravel(), linear]), low, high)
    found = least_squares(
        lambda flat: sides(flat)[0],
        start,
        lambda flat: sides(flat)[1],
        bounds=(low, high),
        x_scale="jac",
        max_nfev=POLISH,
    )
    flat: Floats = found.x
    shape, amplitude = flat[: 2 * s].reshape(2, s), flat[2 * s : 3 * s]
    return Solution(shape, amplitude, float(flat[3 * s]), float(found.fun @ found.fun))
