"""Which keys a query may look at: padding, packed sequences, or any boolean matrix."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from whence.checks import require


@dataclass(frozen=True, eq=False)
class Mask:
    """True is "may be looked at". Any of the parts; all that are given must allow a pair.

    keys      [b, k]           keys that exist (padding is False)
    segments  [b|1, q], [b|1, k]  packed sequences: only pairs of one segment
    pairs     [b|1, h|1, q, k] anything else; the only part that costs n x n memory, and it is yours
    """

    keys: Bool[Tensor, "#b k"] | None = None
    segments: tuple[Int[Tensor, "#b q"], Int[Tensor, "#b k"]] | None = None
    pairs: Bool[Tensor, "#b #h q k"] | None = None

    @staticmethod
    def padding(lengths: Int[Tensor, " b"], n_keys: int) -> "Mask":
        """Keys of sequence b exist up to lengths[b]."""
        return Mask(keys=torch.arange(n_keys, device=lengths.device) < lengths[:, None])

    @staticmethod
    def packed(cu_seqlens: Int[Tensor, " s"], n: int) -> "Mask":
        """One row that holds several sequences, cut at the cumulative lengths 0, l1, ...."""
        place = torch.arange(n, device=cu_seqlens.device)
        segment = torch.bucketize(place, cu_seqlens.to(place.dtype), right=True)[None]
        return Mask(segments=(segment, segment))

    def tile(self, rows: slice, keys: slice) -> Bool[Tensor, "b h q k"] | None:
        """The part for these query rows and keys, or None if every pair is allowed."""
        parts = []
        if self.keys is not None:
            parts.append(self.keys[:, None, None, keys])
        if self.segments is not None:
            q_segment, k_segment = self.segments
            parts.append(q_segment[:, None, rows, None] == k_segment[:, None, None, keys])
        if self.pairs is not None:
            parts.append(self.pairs[:, :, rows, keys])
        if not parts:
            return None
        allowed = parts[0]
        for part in parts[1:]:
            allowed = allowed & part
        return allowed


@dataclass(frozen=True, eq=False)
class Sight:
    """Everything that decides which keys each query row may look at, apart from q and k.

    Query row i stands at key position q_start + i. window is (before, after), None for no limit.
    """

    n_q: int
    n_k: int
    q_start: int
    mask: Mask | None
    causal: bool
    window: tuple[int | None, int | None]
    device: torch.device

    def _window(self) -> tuple[int | None, int | None]:
        before, after = self.window
        return before, 0 if self.causal else after

    def key_range(self, rows: slice) -> slice:
        """The keys that causality and the window leave to these query rows, as one range."""
        before, after = self._window()
        first, last = self.q_start + rows.start, self.q_start + rows.stop - 1
        low = 0 if before is None else min(max(0, first - before), self.n_k)
        high = self.n_k if after is None else min(self.n_k, max(0, last + after + 1))
        return slice(low, max(low, high))

    def allowed(self, rows: slice, keys: slice) -> Bool[Tensor, "b h q k"] | None:
        """The pairs of these rows and keys that may be looked at, or None if all may."""
        allowed = None if self.mask is None else self.mask.tile(rows, keys)
        before, after = self._window()
        first, last = self.q_start + rows.start, self.q_start + rows.stop - 1
        cut_left = before is not None and keys.start < last - before
        cut_right = after is not None and keys.stop - 1 > first + after
        if not (cut_left or cut_right):
            return allowed
        q_place = torch.arange(first, last + 1, device=self.device)
        lag = torch.arange(keys.start, keys.stop, device=self.device) - q_place[:, None]
        near = torch.ones_like(lag, dtype=torch.bool)
        if before is not None:
            near = near & (lag >= -before)
        if after is not None:
            near = near & (lag <= after)
        return near[None, None] if allowed is None else allowed & near


def as_mask(mask: Mask | Tensor | None, b: int, h: int, n_q: int, n_k: int) -> Mask | None:
    """A Mask from what the caller gave: a Mask, or a boolean [b, k] or [b|1, h|1, q, k]."""
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        require(
            mask.dtype == torch.bool,
            f"mask must be boolean with True = may be looked at, got {mask.dtype}. For an additive "
            "mask use mask=(additive == 0), or pass it as a bias.",
        )
        mask = Mask(pairs=mask) if mask.ndim == 4 else Mask(keys=mask)
    wanted = {
        "keys": (mask.keys, ((b, 1), (n_k,))),
        "pairs": (mask.pairs, ((b, 1), (h, 1), (n_q,), (n_k,))),
        "segments (queries)": (mask.segments and mask.segments[0], ((b, 1), (n_q,))),
        "segments (keys)": (mask.segments and mask.segments[1], ((b, 1), (n_k,))),
    }
    for name, (tensor, sizes) in wanted.items():
        if tensor is not None:
            _check(name, tuple(tensor.shape), sizes)
    return mask


def _check(name: str, shape: tuple[int, ...], sizes: tuple[tuple[int, ...], ...]) -> None:
    fits = len(shape) == len(sizes) and all(
        n in allowed for n, allowed in zip(shape, sizes, strict=True)
    )
    require(
        fits,
        lambda: f"mask {name} must have shape [{_form(sizes)}] for this call, got {shape}.",
    )


def _form(sizes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join("|".join(map(str, allowed)) for allowed in sizes)
