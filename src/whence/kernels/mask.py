"""Which keys a query may look at: padding, packed sequences, or any boolean matrix."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from whence.checks import require


@dataclass(frozen=True, eq=False)
class Mask:
    """The pairs of query and key that may attend: True is "may be looked at".

    Any of the parts may be given, and all that are given must allow a pair.

    keys      boolean [b, k]: keys that exist; padding is False
    segments  integer [b|1, q] and [b|1, k]: packed sequences; only pairs of equal segment attend
    pairs     boolean [b|1, h|1, q, k]: any other rule. The only part that takes n x n memory

        >>> import torch
        >>> from whence import Mask, attend
        >>> q = k = v = torch.randn(2, 4, 3, 8)
        >>> second_is_shorter = Mask(keys=torch.tensor([[True, True, True], [True, True, False]]))
        >>> attend(q, k, v, mask=second_is_shorter).shape
        torch.Size([2, 4, 3, 8])
    """

    # Types of the shape alone: the dtype is refused below, with a message that says what to do.
    keys: Shaped[Tensor, "#b k"] | None = None
    segments: tuple[Shaped[Tensor, "#b q"], Shaped[Tensor, "#b k"]] | None = None
    pairs: Shaped[Tensor, "#b #h q k"] | None = None

    def __post_init__(self) -> None:
        for name, part in (("mask keys", self.keys), ("mask pairs", self.pairs)):
            if part is not None:
                _require_boolean(name, part)
        for part in self.segments or ():
            whole = not (part.is_floating_point() or part.is_complex() or part.dtype == torch.bool)
            require(
                whole,
                f"mask segments must be integers that number the sequences, got {part.dtype}.",
            )

    @staticmethod
    def padding(lengths: Int[Tensor, " b"], n_keys: int) -> "Mask":
        """A mask under which sequence b has lengths[b] keys, and padding up to n_keys.

        >>> Mask.padding(torch.tensor([3, 1]), 3).keys
        tensor([[ True,  True,  True],
                [ True, False, False]])
        """
        return Mask(keys=torch.arange(n_keys, device=lengths.device) < lengths[:, None])

    @staticmethod
    def packed(cu_seqlens: Int[Tensor, " s"], n: int) -> "Mask":
        """A mask for one row of n tokens that holds several sequences.

        cu_seqlens are the cumulative lengths 0, l1, l1 + l2, ..., at which the row is cut.

        >>> Mask.packed(torch.tensor([0, 2, 5]), 5).segments[0]
        tensor([[1, 1, 2, 2, 2]])
        """
        place = torch.arange(n, device=cu_seqlens.device)
        segment = torch.bucketize(place, cu_seqlens.to(place.dtype), right=True)[None]
        return Mask(segments=(segment, segment))

    def tile(self, rows: slice, keys: slice) -> Bool[Tensor, "b h q k"] | None:
        """The allowed pairs among these query rows and keys, or None if all are allowed."""
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


def as_mask(mask: Mask | Tensor, b: int, h: int, n_q: int, n_k: int) -> Mask:
    """The mask of a call, its shapes checked; a boolean tensor becomes a Mask."""
    if isinstance(mask, Tensor):
        _require_boolean("mask", mask)
        mask = Mask(pairs=mask) if mask.ndim == 4 else Mask(keys=mask)
    wanted = {
        "keys": (mask.keys, ((b, 1), (n_k,))),
        "pairs": (mask.pairs, ((b, 1), (h, 1), (n_q,), (n_k,))),
        "segments (queries)": (mask.segments and mask.segments[0], ((b, 1), (n_q,))),
        "segments (keys)": (mask.segments and mask.segments[1], ((b, 1), (n_k,))),
    }
    for name, (tensor, sizes) in wanted.items():
        if tensor is not None:
            _require_shape(name, tuple(tensor.shape), sizes)
    return mask


def _require_boolean(name: str, part: Tensor) -> None:
    require(
        part.dtype == torch.bool,
        lambda: (
            f"{name} must be boolean with True = may be looked at, got {part.dtype}. For an "
            "additive mask use mask=(additive == 0), or pass it as a bias."
        ),
    )


def _require_shape(name: str, shape: tuple[int, ...], sizes: tuple[tuple[int, ...], ...]) -> None:
    fits = len(shape) == len(sizes) and all(
        any(n == size for size in allowed)  # `in` is False where a compiler holds a size open
        for n, allowed in zip(shape, sizes, strict=True)
    )
    require(
        fits,
        lambda: f"mask {name} must have shape [{_as_text(sizes)}] for this call, got {shape}.",
    )


def _as_text(sizes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join("|".join(map(str, allowed)) for allowed in sizes)
