"""Results with known numbers, made without a model: for figures, pages and commands."""

import numpy as np

from whence.analysis.comparison import Comparison, compare
from whence.analysis.results import (
    Component,
    Fit,
    HeadFits,
    HeadReport,
    Inspection,
    LagProfile,
    ModelFacts,
    TableReport,
    Toeplitzness,
)

VERSIONS = {"whence": "0", "numpy": "2"}


def toeplitzness(r2: float, *, start: int = 0, stop: int = 64, null: bool = True) -> Toeplitzness:
    return Toeplitzness(start, stop, r2, r2 - 0.02, 0.4 if null else None, 0.01 if null else None)


def table(n: int = 64, d: int = 16, *, r2: float = 0.7, seed: int = 0) -> TableReport:
    """Gaussians of the distance, a bright start and noise: what a trained table looks like."""
    random = np.random.default_rng(seed)
    position = np.arange(n)
    lag = position[None] - position[:, None]
    gram = np.exp(-((lag / (n / 8)) ** 2)) + 0.3 * np.cos(2 * np.pi * lag / n)
    gram = gram + 0.1 * random.normal(size=(n, n))
    explained = 0.6 ** np.arange(d)
    explained = explained / explained.sum()
    frequency = np.fft.rfftfreq(n)
    components = []
    for place in range(4):
        values = np.cos(2 * np.pi * (place + 1) * position / n + place)
        power = np.abs(np.fft.rfft(values)) ** 2
        components.append(
            Component(
                float(explained[place]),
                values.astype(np.float32),
                frequency.astype(np.float32),
                (power / power.sum()).astype(np.float32),
            )
        )
    sizes = [size for size in (8, 16, 32, 64, 128, 256, 512) if size <= n]
    return TableReport(
        space=f"{d} dimensions",
        rows=f"rows 0..{n - 1}",
        gram=((gram + gram.T) / 2).astype(np.float32),
        whole=toeplitzness(r2, stop=n),
        windows=tuple(
            toeplitzness(r2 + 0.2 / (1 + i), start=1, stop=s) for i, s in enumerate(sizes)
        ),
        monotonicity=0.62,
        symmetry=0.97,
        effective_dimensions=5.5,
        null_effective_dimensions=12.7,
        components_for_90=9,
        explained=explained.astype(np.float32),
        components=tuple(components),
    )


def head(number: int, *, layer: int = 0, n: int = 64, causal: bool = False) -> HeadReport:
    lag = np.arange(-(n - 1), 1 if causal else n)
    curve = (1 + number % 3) * np.exp(-0.02 * (lag - 2 * (number % 5 - 2)) ** 2) - 0.01 * number
    spread = 0.1 + 0.1 * np.abs(lag) / n
    place = np.arange(min(n, 32))
    inside = place[None] - place[:, None]
    matrix = (1 + number % 3) * np.exp(-0.02 * (inside - 2 * (number % 5 - 2)) ** 2)
    return HeadReport(
        layer=layer,
        head=number,
        with_biases=False,
        matrix=matrix.astype(np.float32),
        lag=lag.astype(np.float32),
        curve=curve.astype(np.float32),
        spread=spread.astype(np.float32),
        r2=0.12 + 0.06 * number,
        r2_off_diagonal=0.1 + 0.06 * number,
        strength=0.4 * (number % 3),
        sensitive=number % 3 > 0,
    )


def fits(number: int, *, layer: int = 0) -> HeadFits:
    """The second is the curve of `head` itself."""
    first = Fit(1, (1.0,), (0.05,), (0.0,), 0.1, 0.2, 0.8, -10.0)
    place = float(2 * (number % 5 - 2))
    second = Fit(
        2, (1.0 + number % 3, 0.0), (0.02, 1.0), (place, 0.0), -0.01 * number, 0.01, 0.99, -50.0
    )
    return HeadFits(layer, number, (first, second), 2)


def profile(number: int, *, layer: int = 0, n: int = 64) -> LagProfile:
    lag = np.arange(-(n - 1), 1)
    mean = np.exp(0.05 * (number + 1) * lag) - 0.2
    width = 0.05 + 0.1 * np.abs(lag) / n
    arrays = (part.astype(np.float32) for part in (lag, mean, mean - width, mean + width))
    return LagProfile(layer, number, *arrays, explained=0.05 * (number + 1), n_tokens=4096)


def inspection(
    name: str = "synthetic/base",
    *,
    n: int = 64,
    n_heads: int = 12,
    layers: tuple[int, ...] = (0,),
    r2: float = 0.7,
    seed: int = 0,
) -> Inspection:
    """A model with a table: every part is filled."""
    numbers = [(layer, number) for layer in layers for number in range(n_heads)]
    return Inspection(
        model=ModelFacts(
            name, "bert", "table", len(layers), n_heads, 16 * n_heads, 16, n, "ab" * 32
        ),
        table=table(n, r2=r2, seed=seed),
        heads=tuple(head(number, layer=layer, n=n) for layer, number in numbers),
        relative=(),
        profiles=tuple(profile(number, layer=layer, n=n) for layer, number in numbers),
        fits=tuple(fits(number, layer=layer) for layer, number in numbers),
        notes=("a note about <the> model",),
        versions=VERSIONS,
    )


def without_table(name: str = "synthetic/rope", *, relative: bool = False) -> Inspection:
    """A model whose position is no table: measured profiles, and stated curves on request."""
    return Inspection(
        model=ModelFacts(name, "llama", "rope", 2, 4, 64, 16, None, "cd" * 32),
        table=None,
        heads=(),
        relative=tuple(head(number, causal=True) for number in range(4)) if relative else (),
        profiles=tuple(profile(number) for number in range(4)),
        fits=(),
        notes=(),
        versions=VERSIONS,
    )


def series() -> Comparison:
    """Four checkpoints with scores."""
    models = [
        inspection(f"run/checkpoint-{step}", r2=0.3 + 0.05 * step / 100, n_heads=2)
        for step in (1000, 200, 500, 900)
    ]
    scores = {
        f"checkpoint-{step}": score
        for step, score in ((200, 1.0), (500, 2.0), (900, 2.5), (1000, 5.0))
    }
    return compare(models, scores)
