"""What the CPU benchmark measures against each other, and that all of it agrees in float64.

In the group "tisa" all but `plain` compute softmax(q k^T / sqrt(d) + F_P) v with TISA's F_P, in the
group "shaw" both compute the article's attention with keys and values. A step gives the output and
the gradients of q, k, v and of the method's parameters.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.bench import contenders
from whence.bench.point import Point
from whence.bench.problem import Attention, Problem


@dataclass(frozen=True)
class Setting:
    """What all contenders share: one bidirectional layer."""

    batch: int = 1
    n_heads: int = 12
    d_head: int = 64
    kernels: int = 5
    clip: int = 16
    threads: int = 2

    def point(self, group: str, n: int, dtype: str) -> Point:
        """TISA or Shaw, as they start out before training."""
        spec = {"tisa": f"tisa:kernels={self.kernels}", "shaw": f"shaw:clip={self.clip}"}[group]
        return Point(
            "",
            spec,
            n,
            d_head=self.d_head,
            n_heads=self.n_heads,
            batch=self.batch,
            dtype=dtype,
            device="cpu",
        )


whence = contenders.ours("auto")
GROUPS: dict[str, dict[str, Attention]] = {
    "tisa": {
        "whence": whence,
        "eager": contenders.eager,
        "sdpa_dense": contenders.sdpa_dense,
        "plain": contenders.plain(),
    },
    "shaw": {"whence": whence, "article": contenders.article},
}


class Step:
    """One forward and backward of a contender; the inputs stand ready and are not part of it."""

    def __init__(self, setting: Setting, group: str, n: int, *, dtype: str = "float32") -> None:
        self.group, self.problem = group, Problem(setting.point(group, n, dtype))

    def run(self, contender: str) -> dict[str, Tensor]:
        """The output and every gradient by name; parameters without a gradient are left out."""
        return self.problem.run(GROUPS[self.group][contender])


def check_exactness(setting: Setting, lengths: tuple[int, ...] = (256, 1000)) -> dict[str, float]:
    """Every contender against the plainest of its group in float64; raises AssertionError.

    Gives the largest difference as a share of the largest entry. The longer length has keys beyond
    the reach of the bias, which take another path than the near ones.
    """
    worst: dict[str, float] = {}
    for group, compared, yardstick in (
        ("tisa", ("whence", "sdpa_dense"), "eager"),
        ("shaw", ("whence",), "article"),
    ):
        for n in lengths:
            step = Step(setting, group, n, dtype="float64")
            expected = step.run(yardstick)
            for contender in compared:
                found = step.run(contender)
                for name, want in expected.items():
                    close_to(found[name], want, f"{group} {contender}, n={n}, {name}")
                    error = ((found[name] - want).abs().max() / want.abs().max()).item()
                    key = f"{group} {contender}"
                    worst[key] = max(worst.get(key, 0.0), error)
    return worst


def close_to(found: Tensor, want: Tensor, what: str) -> None:
    torch.testing.assert_close(
        found, want, rtol=1e-9, atol=1e-11, msg=lambda text: f"not exact: {what}: {text}"
    )
