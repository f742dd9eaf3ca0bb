"""One thing to measure: who computes which attention, at which size."""

from dataclasses import dataclass, replace

import torch

from whence.checks import at_least, one_of

MODES = {
    "forward": "forward, without gradients",
    "both": "forward and backward",
    "decode": "one query against a cache of n keys, without gradients",
}
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Point:
    """One measurement: a contender, and the attention problem that it is to solve.

    `method` is "nope" for a contender without position.

    >>> point = Point("eager", "tisa", 512, dtype="float32", device="cpu")
    >>> point.n_q, point.pairs
    (512, 3145728)
    """

    contender: str
    method: str
    n: int
    mode: str = "both"
    d_head: int = 64
    n_heads: int = 12
    batch: int = 1
    dtype: str = "bfloat16"
    causal: bool = False
    device: str = "cuda"

    def __post_init__(self) -> None:
        one_of("mode", self.mode, MODES)
        one_of("dtype", self.dtype, DTYPES)
        at_least(1, n=self.n, d_head=self.d_head, n_heads=self.n_heads, batch=self.batch)

    @property
    def problem(self) -> "Point":
        """The same for every contender that solves it."""
        return replace(self, contender="")

    @property
    def n_q(self) -> int:
        """Query rows: all, or the last one when decoding."""
        return 1 if self.mode == "decode" else self.n

    @property
    def pairs(self) -> int:
        """Queries times keys, over all heads and sequences."""
        return self.batch * self.n_heads * self.n_q * self.n

    @property
    def itemsize(self) -> int:
        """Bytes of a number of q, k and v."""
        return DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        causal = ", causal" if self.causal else ""
        return (
            f"{self.contender} {self.method}, {self.mode}{causal}, n={self.n:,}, "
            f"{self.batch} x {self.n_heads} heads of {self.d_head}"
        )
