"""Attention of a native model: projections, the cache, and `positioned_attention` for the rest."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache

from whence.kernels import Mask
from whence.kernels.attend import execute
from whence.kernels.reference import weighted, weights_of
from whence.method import PositionMethod
from whence.methods.nope import Nope
from whence.models.config import WhenceConfig
from whence.models.local_heads import LocalHeads
from whence.models.token_layout import TokenLayout
from whence.nn import positioned_attention, positioned_attention_with_weights
from whence.nn.positioned import positioned_call

Output = tuple[Tensor, Tensor | None]  # hidden states, and weights if they were asked for


class Projections(nn.Module):
    """q, k, v and the way back, with fewer key and value heads if the config says so."""

    def __init__(self, config: WhenceConfig) -> None:
        super().__init__()
        d, bias = config.hidden_size, config.attention_bias
        d_head, kv_heads = config.head_dim, config.num_key_value_heads
        assert d_head is not None  # the config has filled both in
        assert kv_heads is not None
        heads = config.num_attention_heads
        self.d_head, self.d_model = d_head, d
        self.n_heads, self.n_kv_heads = heads, kv_heads
        self.scale = None if config.scale_attention else 1.0
        self.dropout, self.backend = config.attention_dropout, config.backend
        self.q_proj = nn.Linear(d, heads * d_head, bias=bias)
        self.k_proj = nn.Linear(d, kv_heads * d_head, bias=bias)
        self.v_proj = nn.Linear(d, kv_heads * d_head, bias=bias)
        self.o_proj = nn.Linear(heads * d_head, d, bias=bias)
        self.o_proj._whence_residual = True  # type: ignore[assignment]
        self.group: Any = None  # of processes that share the heads, once a pass has seen them

    def _heads(self, x: Float[Tensor, "b n width"]) -> Float[Tensor, "b h n d"]:
        return x.view(*x.shape[:2], -1, self.d_head).transpose(1, 2)

    def _joined(self, heads: Float[Tensor, "b h n d"]) -> Float[Tensor, "b n d_model"]:
        out: Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out

    def _local(self, position: PositionMethod, h: int) -> PositionMethod:
        """The method for the h heads that are here: all of them, or those of one process."""
        if h == self.n_heads:
            return position
        # In a pass only tensor parallelism leaves a DTensor; sharded data parallelism gathers it.
        mesh: Any = self.q_proj.weight.device_mesh  # type: ignore[attr-defined]
        self.group = mesh.get_group()
        return LocalHeads(position, rank=mesh.get_local_rank(), size=mesh.size(), group=self.group)

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def _attend(
        self,
        method: PositionMethod,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        arguments: dict[str, Any],
        need_weights: bool,
    ) -> Output:
        """The output, joined, and the weights that it was computed from if they are asked for."""
        arguments = arguments | {"dropout": self._dropout}
        if need_weights:
            out, weights = positioned_attention_with_weights(method, q, k, v, **arguments)
            return self._joined(out), weights
        return self._joined(
            positioned_attention(method, q, k, v, **arguments, backend=self.backend)
        ), None


class SelfAttention(Projections):
    """Attention of a sequence to itself, and to what a cache holds of it.

    Keys are cached as they were projected; the method's `key_heads` see all of them in each pass.
    Where a method reads the layer's inputs at the keys (`forget`), these are cached as more columns
    of the values, so that every kind of cache, beam search and cropping just work.
    """

    def __init__(self, config: WhenceConfig, *, causal: bool) -> None:
        super().__init__(config)
        self.causal = causal
        window = config.sliding_window
        self.window = None if window is None else (window - 1, 0 if causal else window - 1)

    def forward(
        self,
        x: Float[Tensor, "b n d_model"],
        *,
        position: PositionMethod,
        layout: TokenLayout,
        cache: Cache | None,
        layer: int,
        need_weights: bool,
    ) -> Output:
        """(output, weights or None)."""
        q, k, v = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        x_k: Tensor | None = x
        held = k.shape[2]
        if cache is not None:
            if isinstance(cache, EncoderDecoderCache):
                cache = cache.self_attention_cache
            k, v, x_k = self._cached(cache, layer, k, v, x if position.reads_key_inputs else None)
            # A static cache is longer than what it holds; one of a window has dropped the first.
            held = k.shape[2]  # more than there are tokens in a cache of fixed length
            if not isinstance(layout.total, Tensor):
                n_k = min(held, layout.total)
                k, v = k[:, :, :n_k], v[:, :, :n_k]
                x_k = None if x_k is None else x_k[:, :n_k]
        method = self._local(position, q.shape[1])
        if layout.groups:
            out, weights = self._by_group(method, q, k, v, x, x_k, layout, need_weights)
        else:
            start = 0 if isinstance(layout.total, Tensor) else layout.total - k.shape[2]
            arguments = self._arguments(x, x_k, layout.mask(start), start, layout.seen - start)
            out, weights = self._attend(method, q, k, v, arguments, need_weights)
        if weights is not None and k.shape[2] < held:  # a weight for each place, as the library has
            weights = F.pad(weights, (0, held - k.shape[2]))
        return out, weights

    def _cached(
        self, cache: Cache, layer: int, k: Tensor, v: Tensor, x: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if x is None:
            k, v = cache.update(k, v, layer)
            return k, v, None
        h, width = v.shape[1], -(-self.d_model // v.shape[1])
        columns = F.pad(x, (0, h * width - self.d_model)).to(v.dtype)
        columns = columns.view(*x.shape[:2], h, width).transpose(1, 2)
        k, both = cache.update(k, torch.cat([v, columns], dim=-1), layer)
        v, columns = both.split_with_sizes([self.d_head, width], dim=-1)
        return k, v, columns.transpose(1, 2).flatten(2)[..., : self.d_model].to(x.dtype)

    def _arguments(
        self, x: Tensor, x_k: Tensor | None, mask: Mask | None, k_start: int, q_start: int | Tensor
    ) -> dict[str, Any]:
        return {
            "x_q": x,
            "x_k": x_k,
            "mask": mask,
            "causal": self.causal,
            "window": self.window,
            "scale": self.scale,
            "k_start": k_start,
            "q_start": q_start,
        }

    # Every batch has other groups, and PyTorch's inductor stops at rows of sizes held open.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _by_group(
        self,
        method: PositionMethod,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        x_k: Tensor | None,
        layout: TokenLayout,
        need_weights: bool,
    ) -> Output:
        """Rows that begin at one place at a time, without their padding: it begins at position 0.

        For methods whose attention depends on where a sequence begins. A padded query gets zeros.
        """
        assert layout.keys is not None
        assert not isinstance(layout.seen, Tensor)
        assert not isinstance(layout.total, Tensor)
        start = layout.total - k.shape[2]
        places, calls = [], []
        for first, rows in layout.groups:
            cut_k, cut_q = max(0, first - start), max(0, first - layout.seen)
            mask = Mask(keys=layout.keys[rows, start + cut_k :])
            place = start + cut_k - first  # of the first key, counted from the sequence's own
            arguments = self._arguments(
                x[rows, cut_q:],
                None if x_k is None else x_k[rows, cut_k:],
                mask,
                place,
                layout.seen + cut_q - first - place,
            )
            parts = (q[rows, :, cut_q:], k[rows, :, cut_k:], v[rows, :, cut_k:])
            places.append((rows, cut_q, cut_k))
            calls.append(positioned_call(method, *parts, **arguments, dropout=self._dropout))
        whole = None
        if need_weights:  # all of them first, as one tensor from which the output is computed
            calls = [call.with_kv_heads_expanded() for call in calls]
            whole = q.new_zeros(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
            for (rows, cut_q, cut_k), call in zip(places, calls, strict=True):
                weights = weights_of(call, slice(0, call.sight.n_q))
                whole[rows, :, cut_q:, cut_k:] = weights.to(whole.dtype)
        out = x.new_zeros(x.shape)
        for (rows, cut_q, cut_k), call in zip(places, calls, strict=True):
            if whole is None:
                heads = execute(call, backend=self.backend)
            else:
                seen = whole[rows, :, cut_q:, cut_k:]
                heads = weighted(call, slice(0, call.sight.n_q), seen)
            out[rows, cut_q:] = self._joined(heads).to(out.dtype)
        return out, whole


class CrossAttention(Projections):
    """Attention of a decoder to an encoder's output, without a position, as in T5."""

    def __init__(self, config: WhenceConfig) -> None:
        super().__init__(config)
        self._position = (Nope(),)  # in a tuple, which nn.Module does not look into

    def forward(
        self,
        x: Float[Tensor, "b n d_model"],
        memory: Float[Tensor, "b m d_model"],
        *,
        mask: Mask | None,
        cache: EncoderDecoderCache | None,
        layer: int,
        need_weights: bool,
    ) -> Output:
        """(output, weights or None). Keys and values are made once for a cache."""
        q = self._heads(self.q_proj(x))
        if cache is not None and cache.is_updated.get(layer):
            held = cache.cross_attention_cache.layers[layer]
            k, v = held.keys, held.values
        else:
            k, v = self._heads(self.k_proj(memory)), self._heads(self.v_proj(memory))
            if cache is not None:
                k, v = cache.cross_attention_cache.update(k, v, layer)
                cache.is_updated[layer] = True
        arguments: dict[str, Any] = {"mask": mask, "scale": self.scale, "q_start": 0}
        return self._attend(self._position[0], q, k, v, arguments, need_weights)
