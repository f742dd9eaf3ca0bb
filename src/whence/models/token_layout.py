"""The layout of the tokens of one pass: cache, padding on either side, packed sequences."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from whence.checks import require
from whence.kernels import Mask


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """n new tokens after `seen` cached ones, the same for every layer of the stack.

    seen     a whole number; in a compiled step of decoding a tensor, so that one graph serves all
             steps. The cache has a fixed length then, and no key after the last token counts.
    keys     [b, seen + n]: tokens that exist; None if all do
    places   [b|1, n]: the position of each new token, for the input term
    segments [b|1, n]: which packed sequence a token belongs to; None if a row is one sequence
    groups   (first, rows): rows that share the number of padded tokens at their beginning; only
             where the method is anchored, as else a shift of all positions changes nothing
    """

    n: int
    seen: int | Tensor
    keys: Bool[Tensor, "b k"] | None
    places: Int[Tensor, "#b n"]
    segments: Int[Tensor, "#b n"] | None
    groups: tuple[tuple[int, Int[Tensor, " rows"]], ...]

    @property
    def total(self) -> int | Tensor:
        """Tokens so far, cached and new."""
        return self.seen + self.n

    def mask(self, start: int = 0) -> Mask | None:
        """The mask of the new tokens and of the keys from place `start` on."""
        if self.keys is None and self.segments is None:
            return None
        keys = self.keys
        if keys is not None and start > 0:  # a slice of everything would cost every layer a view
            keys = keys[:, start:]
        segments = None if self.segments is None else (self.segments, self.segments)
        return Mask(keys=keys, segments=segments)


def token_layout(
    b: int,
    n: int,
    *,
    seen: int | Tensor,
    longest: int | None = None,
    attention_mask: Tensor | None,
    position_ids: Int[Tensor, "rows places"] | None,
    anchored: bool,
    device: torch.device,
) -> TokenLayout:
    """The layout of a batch from what `transformers` hands over.

    `attention_mask` is [b, seen + n], 1 where a token exists; over a cache of a fixed length, which
    is `longest`, it may be as long as that. Positions count the tokens that
    exist, unless `position_ids` says otherwise. Without a mask and a cache, position_ids that do
    not go up by one start a new sequence (what DataCollatorWithFlattening makes).
    """
    keys = None if attention_mask is None else _keys(attention_mask, b, n, seen, longest)
    segments = None
    if position_ids is not None:
        require(
            position_ids.ndim == 2
            and position_ids.shape[0] in (1, b)
            and position_ids.shape[1] == n,
            lambda: f"position_ids must be [1 or {b}, {n}], got {tuple(position_ids.shape)}.",
        )
        places = position_ids
        if attention_mask is None and not isinstance(seen, Tensor) and seen == 0:
            segments = _packed(position_ids, anchored)
    elif keys is not None:
        count = (keys.long().cumsum(dim=-1) - 1).clamp(min=0)
        places = count.index_select(1, torch.arange(n, device=device) + seen)
    else:
        places = (torch.arange(n, device=device) + seen)[None]
    if keys is not None and _readable(keys) and bool(keys.all()):
        keys = None
    groups = _groups(keys) if anchored and keys is not None else ()
    return TokenLayout(n, seen, keys, places, segments, groups)


def _keys(
    mask: Tensor, b: int, n: int, seen: int | Tensor, longest: int | None
) -> Bool[Tensor, "b k"]:
    require(
        mask.ndim == 2,
        lambda: (
            f"attention_mask must be [batch, tokens], 1 where a token exists, got shape "
            f"{tuple(mask.shape)}. A mask of pairs would cost n x n memory: pack sequences with "
            "position_ids, or call whence.attend."
        ),
    )
    if longest is not None and tuple(mask.shape) == (b, longest):
        return mask != 0 if isinstance(seen, Tensor) else mask[:, : seen + n] != 0
    require(
        not isinstance(seen, Tensor),
        lambda: (
            "in a compiled step of decoding, attention_mask must be as long as the cache, "
            f"[{b}, {longest}], got {tuple(mask.shape)}."
        ),
    )
    require(
        tuple(mask.shape) == (b, seen + n),
        lambda: (
            f"attention_mask must cover cached and new tokens, [{b}, {seen} + {n}], got "
            f"{tuple(mask.shape)}."
        ),
    )
    return mask != 0


def _packed(position_ids: Tensor, anchored: bool) -> Int[Tensor, "#b n"] | None:
    """The number of the sequence at each token, or None if the rows are seen to hold one each."""
    breaks = torch.zeros_like(position_ids, dtype=torch.long)
    breaks[:, 1:] = (position_ids.diff(dim=-1) != 1).long()
    if (_readable(breaks) or anchored) and not bool(breaks.any()):
        return None
    require(
        not anchored,
        "position_ids start anew within a row (packed sequences), and this position depends on "
        "where its sequence starts. Give each sequence its own row, or take a method of the lag.",
    )
    return breaks.cumsum(dim=-1)


def _groups(keys: Tensor) -> tuple[tuple[int, Tensor], ...]:
    require(
        not torch.compiler.is_exporting(),
        "this position depends on where its sequence begins, and an exported graph cannot "
        "sort rows by their padding: export without attention_mask, or take a method of the lag.",
    )
    first = keys.int().argmax(dim=-1)
    starts = sorted(set(first.tolist()))
    if starts == [0]:
        return ()
    return tuple((start, (first == start).nonzero()[:, 0]) for start in starts)


def _readable(x: Tensor) -> bool:
    """Whether looking at the values costs no wait for a device and no break of a graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
