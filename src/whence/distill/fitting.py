"""TISA fitted to a model layer by layer: each to what is lacking once those below are in place."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from whence.analysis.fit import fit_curve
from whence.analysis.results import Fit, HeadFits
from whence.checks import require
from whence.distill.curves import missing_curves
from whence.distill.results import HeadCurve
from whence.distill.sequences import Sequences
from whence.hf.attaching import Attached
from whence.methods.registry import named
from whence.methods.spec import instantiate
from whence.methods.tisa import Tisa


def kernels_of(position: str) -> int:
    """The kernels of "tisa:kernels=S"; every other method is refused."""
    parts = named(position)
    name, _, options = parts[0]
    require(
        len(parts) == 1 and name == "tisa" and set(options) <= {"kernels"},
        f"distill fits tisa with any number of kernels, such as 'tisa:kernels=5', got "
        f"{position!r}. Attach another method with whence.hf.attach and train it.",
    )
    with torch.device("meta"):  # only its size is wanted, and no random numbers drawn
        method = instantiate(*parts[0], {"n_heads": 1})
    assert isinstance(method, Tisa)
    return method.kernels


def fit_layers(
    original: PreTrainedModel,
    student: Attached,
    text: Sequences,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[tuple[HeadCurve, ...], tuple[HeadFits, ...]]:
    """Fit the kernels of every layer of a student whose amplitudes are all 0, and put them in.

    In the first layer the curve is what the table's own product gives, as the text has it: behind
    LayerNorm, and with words on the other side. Deeper ones have what came up through the layers
    below.
    """
    curves: list[HeadCurve] = []
    fits: list[HeadFits] = []
    base = student.model.base_model
    for layer, method in enumerate(student.methods):
        assert isinstance(method, Tisa)
        found = missing_curves(
            original.base_model, base, text.fit, layer=layer, special=text.special
        )
        fitted = [_fitted(curve, method.kernels) for curve in found]
        _put(method, fitted)
        curves += found
        fits += [HeadFits(layer, head, (fit,), method.kernels) for head, fit in enumerate(fitted)]
        if progress is not None:
            progress(layer + 1, len(student.methods))
    return tuple(curves), tuple(fits)


def put_fits(student: Attached, fits: tuple[HeadFits, ...]) -> None:
    """The kernels of fits that were made on another copy."""
    for layer, method in enumerate(student.methods):
        assert isinstance(method, Tisa)
        _put(method, [entry.fits[0] for entry in fits if entry.layer == layer])


def silence(student: Attached) -> None:
    """All amplitudes 0."""
    for method in student.methods:
        assert isinstance(method, Tisa)
        method.amplitude = 0.0


def _fitted(curve: HeadCurve, kernels: int) -> Fit:
    return fit_curve(curve.lag, curve.curve, kernels=kernels, weights=curve.weight)


def _put(method: Tisa, fits: list[Fit]) -> None:
    for name in ("amplitude", "sharpness", "offset"):
        setattr(method, name, torch.tensor([getattr(fit, name) for fit in fits]))
