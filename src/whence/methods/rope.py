"""Rotary embeddings (Su et al., 2021): q and k turned by their position, so q.k sees the lag."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.checks import at_least, finite, one_of, require
from whence.methods.frequency import Frequencies, geometric
from whence.rotation import Growth, Rotation

Scaling = Literal["none", "linear", "ntk", "dynamic", "yarn", "llama3"]
SCALINGS: dict[str, tuple[str, ...]] = {  # and the options that each one reads
    "none": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "original_length"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("factor", "original_length", "beta_fast", "beta_slow"),
}


class Rope(Frequencies):
    """Pair i of a head's first d = fraction * d_head columns turns by the angle pos * base^(-2i/d).

    Layout "half" pairs column i with i + d/2 (LLaMA, NeoX), "interleaved" 2i with 2i + 1 (RoFormer,
    GPT-J). They are one up to a permutation of the columns, but a checkpoint needs its own.

    To reach `factor` times the `original_length` of training:
    linear   every frequency / factor (position interpolation)
    ntk      base * factor^(d / (d - 2)): the slowest frequency / factor, the fastest as it was
    dynamic  ntk with a factor that grows with the length, from 1 at original_length. The length is
             each sequence's last position + 1, so the queries must reach the last key, and a cache
             must hold keys from before this hook: a longer sequence turns all of them anew.
    yarn     / factor for pairs that turn less than beta_slow (1) times in original_length, as
             it was above beta_fast (32), linear in the pair's index between; the turned columns of
             q and of k are multiplied by attention_factor, 0.1 ln(factor) + 1 unless given
    llama3   the same with 1 and 4, linear in the number of turns, and no attention_factor

        >>> method, x = Rope(8), torch.ones(1, 1, 2, 8)  # equal vectors, three positions apart
        >>> near, far = (method.query_heads(x, torch.tensor([i, i + 3]))[0, 0] for i in (0, 50))
        >>> torch.allclose(near[0] @ near[1], far[0] @ far[1], atol=1e-4)
        True
    """

    paper = (
        "Su et al. 2021, arXiv:2104.09864; linear: Chen et al. 2023, arXiv:2306.15595; "
        "yarn: Peng et al. 2023, arXiv:2309.00071"
    )
    lengths_only = True  # attention asks for `rotation`, which needs no positions

    def __init__(
        self,
        d_head: int,
        *,
        base: float = 10000.0,
        layout: Literal["half", "interleaved"] = "half",
        fraction: float = 1.0,
        scaling: Scaling = "none",
        factor: float = 1.0,
        original_length: int | None = None,
        beta_fast: float | None = None,
        beta_slow: float | None = None,
        attention_factor: float | None = None,
    ) -> None:
        at_least(2, d_head=d_head)
        finite(base=base, fraction=fraction, factor=factor, attention_factor=attention_factor)
        finite(beta_fast=beta_fast, beta_slow=beta_slow)
        one_of("layout", layout, ("half", "interleaved"))
        one_of("scaling", scaling, SCALINGS)
        d = int(d_head * fraction)
        require(
            0 < fraction <= 1 and d >= 2 and d % 2 == 0,
            "fraction * d_head must be an even number from 2 to d_head, columns turn in pairs, "
            f"got {fraction} * {d_head} = {d_head * fraction:g}. Change one of the two.",
        )
        require(factor >= 1, f"factor must be at least 1, a longer context, got {factor}.")
        require(
            scaling not in ("ntk", "dynamic") or d >= 4,
            f"scaling={scaling!r} slows the slowest of two or more pairs, got {d} turning columns. "
            "Take scaling='linear'.",
        )
        given = {
            "factor": None if factor == 1 else factor,
            "original_length": original_length,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "attention_factor": attention_factor,
        }
        for name, value in given.items():
            require(
                value is None or name in SCALINGS[scaling],
                f"{name}={value} does nothing with scaling={scaling!r}. Leave it out, or take a "
                f"scaling that reads it: {', '.join(s for s in SCALINGS if name in SCALINGS[s])}.",
            )
        if "original_length" in SCALINGS[scaling]:
            require(
                original_length is not None,
                f"scaling={scaling!r} needs original_length, the length the model was trained for.",
            )
            at_least(1, original_length=original_length or 0)
        fast = (32.0 if scaling == "yarn" else 4.0) if beta_fast is None else beta_fast
        slow = 1.0 if beta_slow is None else beta_slow
        require(
            0 < slow < fast,
            f"beta_slow must be in (0, beta_fast), got {slow} and beta_fast {fast}.",
        )
        length = original_length or 1
        frequencies = geometric(d, base)
        if scaling == "linear":
            frequencies = [f / factor for f in frequencies]
        elif scaling == "ntk":
            frequencies = geometric(d, base * factor ** (d / (d - 2)))
        elif scaling == "yarn":
            frequencies = _yarn(frequencies, base, factor, length, fast, slow)
        elif scaling == "llama3":
            frequencies = [_llama3(f, factor, length, fast, slow) for f in frequencies]
        super().__init__(frequencies)
        self.d_head, self.d, self.base, self.layout, self.fraction = (
            d_head,
            d,
            base,
            layout,
            fraction,
        )
        self.scaling, self.factor, self.original_length = scaling, factor, length
        self.anchored = self.grows = scaling == "dynamic"  # the last position sets every angle
        self.growth = Growth(factor, length) if scaling == "dynamic" else None
        if attention_factor is None:
            attention_factor = 0.1 * math.log(factor) + 1.0 if scaling == "yarn" else 1.0
        self.attention_factor = attention_factor

    def query_heads(
        self, q: Float[Tensor, "b h q d"], q_pos: Int[Tensor, "*b q"]
    ) -> Float[Tensor, "b h q d"]:
        """The queries turned."""
        return self.turn(q, q_pos)

    def key_heads(
        self, k: Float[Tensor, "b h k d"], k_pos: Int[Tensor, "*b k"]
    ) -> Float[Tensor, "b h k d"]:
        """The keys turned, in the same way."""
        return self.turn(k, k_pos)

    def rotation(self) -> Rotation | None:
        """The turn of queries and keys, to be executed at once for both."""
        return self._rotation()

    def _rotation(self) -> Rotation:
        """The same for a subclass that has hooks of its own, and so no `rotation`."""
        interleaved = self.layout == "interleaved"
        return Rotation(
            self.frequency, self.d_head, interleaved, self.attention_factor, self.growth
        )

    def angle(self, pos: Int[Tensor, "*b n"], dtype: torch.dtype) -> Float[Tensor, "*b n pairs"]:
        """The angle of each pair, from -pi to pi."""
        return self._rotation().angle(pos, dtype)

    def turn(
        self,
        x: Float[Tensor, "b h n d_head"],
        pos: Int[Tensor, "*b n"],
        stretch: Float[Tensor, "*b n pairs"] | None = None,
    ) -> Float[Tensor, "b h n d_head"]:
        """Heads with their pairs turned, and each pair multiplied by its `stretch`, if given."""
        return self._rotation().turned(x, pos, stretch)


def _yarn(
    frequencies: list[float], base: float, factor: float, length: int, fast: float, slow: float
) -> list[float]:
    """Pairs before the index that turns `fast` times keep theirs, those after `slow` are divided.

    The two ends are rounded outwards to whole indices and kept in 0..d-1 (not d/2), as published.
    """
    d = 2 * len(frequencies)
    first, last = (
        d * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (fast, slow)
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), d - 1)
    width = last - first if last != first else 0.001
    slowed = [min(max((i - first) / width, 0.0), 1.0) for i in range(len(frequencies))]
    return [f * (1 - s) + f / factor * s for f, s in zip(frequencies, slowed, strict=True)]


def _llama3(frequency: float, factor: float, length: int, fast: float, slow: float) -> float:
    turns = length * frequency / (2 * math.pi)
    kept = min(max((turns - slow) / (fast - slow), 0.0), 1.0)
    return frequency * kept + frequency / factor * (1 - kept)
