"""However a tensor lies in memory, the fused kernels read the numbers that PyTorch reads."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from layouts import LAYOUTS
from whence import LagBias, LagValues, Line, Mask, attend
from whence.lag import BUCKETS, GAUSSIANS, LINE, CurveBias, QueryBias

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1"),
    # A cell out of sight may have any logit; whatever its exponential is, its weight is made 0.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]
B, H, N, D = 2, 2, 12, 16
FEW = 3


@pytest.fixture(autouse=True)
def _short_caches_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is a Linux package")
    from whence.kernels.fused import backend

    monkeypatch.setattr(backend, "MANY_KEYS", 10)


Tensors = dict[str, Tensor]


def floats(**shapes: tuple[int, ...]) -> Tensors:
    return {name: torch.randn(*shape) for name, shape in shapes.items()}


def line(t: Tensors, side: str) -> Line:
    return Line(t[f"{side}_const"], t[f"{side}_slope"])


def segments() -> Tensors:
    place = torch.arange(N).expand(B, N) // torch.tensor([[5], [7]])
    return {"q_segment": place.clone(), "k_segment": place.clone()}


TAILS = {f"{side}_{part}": (B, H, N) for side in ("left", "right") for part in ("const", "slope")}
# What the bias is made of, and the options of `attend` that it gives.
CASES: dict[str, tuple[Callable[[], Tensors], Callable[[Tensors], dict[str, Any]]]] = {
    "no bias": (dict, lambda t: {}),
    "a band, tails and values": (
        lambda: floats(band=(B, H, N, 7), **TAILS, table=(H, 5, D)),
        lambda t: {
            "bias": LagBias(t["band"], line(t, "left"), line(t, "right")),
            "values": LagValues(t["table"]),
        },
    ),
    "a band for all rows": (
        lambda: floats(band=(B, H, 1, 7)),
        lambda t: {"bias": LagBias(t["band"], Line(), Line())},
    ),
    "a band with an extent": (
        lambda: {"band": torch.randn(1, H, 1, 7), "extent": torch.tensor([3, 3])},
        lambda t: {"bias": LagBias(t["band"], Line(), Line(), t["extent"])},
    ),
    "a clipped band": (
        lambda: floats(band=(1, H, 1, 7)),
        lambda t: {"bias": LagBias.clipped(t["band"])},
    ),
    "a product": (
        lambda: floats(query=(B, H, N, D), factor=(H, 7, D)),
        lambda t: {"bias": QueryBias(t["query"], t["factor"], scale=0.3)},
    ),
    "gaussians": (
        lambda: {n: 0.02 * x for n, x in floats(first=(H, 3), second=(H, 3), third=(H, 3)).items()},
        lambda t: {"bias": CurveBias(GAUSSIANS, N - 1, t["first"], t["second"], t["third"])},
    ),
    "buckets": (
        lambda: {
            "first": 0.1 * torch.randn(4, H),
            "bucket": torch.arange(-5, 6).clamp(-2, 1) + 2,
        },
        lambda t: {"bias": CurveBias(BUCKETS, 5, t["first"], t["bucket"])},
    ),
    "a line": (
        lambda: {"first": torch.rand(H)},
        lambda t: {"bias": CurveBias(LINE, 0, t["first"])},
    ),
    "padding": (lambda: {"keys": torch.rand(B, N) > 0.3}, lambda t: {"mask": Mask(keys=t["keys"])}),
    "packing": (segments, lambda t: {"mask": Mask(segments=(t["q_segment"], t["k_segment"]))}),
}


def results(made: Tensors, leaves: Tensors, options: dict[str, Any], few: bool) -> list[Tensor]:
    """The output and the gradients of every tensor of floats, with a slope as odd as they are."""
    q = made["q"][:, :, -FEW:] if few else made["q"]
    out = attend(q, made["k"], made["v"], causal=True, backend="fused", **options)
    wanted = [x for x in leaves.values() if x.is_floating_point()]
    slope = made["slope"][:, :, -FEW:] if few else made["slope"]
    found = torch.autograd.grad(out, wanted, slope.detach(), allow_unused=True)
    return [out, *(torch.zeros(()) if x is None else x for x in found)]


ONE_ROW_A_QUERY = ("a band, tails and values", "a product", "packing")
QUICK = ("sliced", "negated")  # with gaps and an offset, and a bit that the kernels do not see


def pairs() -> list[Any]:
    """Every case with every layout; what the host does alike for all cases is quick in one."""
    return [
        pytest.param(
            *(case, layout, few),
            id=f"{case}, {layout}{', few queries' if few else ''}",
            marks=[] if layout in QUICK or case in ONE_ROW_A_QUERY else [pytest.mark.slow],
        )
        for case in CASES
        for layout in LAYOUTS
        for few in (False, True)
        if not (few and case in ONE_ROW_A_QUERY)
    ]


@pytest.mark.parametrize(("case", "layout", "few"), pairs())
def test_other_layouts_give_what_contiguous_tensors_give(case: str, layout: str, few: bool) -> None:
    build, options = CASES[case]
    lay = LAYOUTS[layout]
    given = build() | floats(q=(B, H, N, D), k=(B, H, N, D), v=(B, H, N, D), slope=(B, H, N, D))
    found = []
    for change in (lay, lambda x: lay(x).clone(memory_format=torch.contiguous_format)):
        leaves = {
            name: x.clone().requires_grad_(x.is_floating_point()) for name, x in given.items()
        }
        made = {name: change(x) for name, x in leaves.items()}
        found.append(results(made, leaves, options(made), few))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_documents_whose_numbers_differ_by_two_to_the_32_are_different() -> None:
    q, k, v = torch.randn(3, B, H, N, D).unbind()
    near = torch.arange(N)[None] // 5
    far_apart = near << 32
    assert far_apart.int().unique().numel() == 1
    found, wanted = (
        attend(q, k, v, mask=Mask(segments=(x, x)), backend=name)
        for x, name in ((far_apart, "fused"), (near, "reference"))
    )
    torch.testing.assert_close(found, wanted)
