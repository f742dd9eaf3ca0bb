"""Multi-head attention with a position: a drop-in for torch.nn.MultiheadAttention."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from whence.checks import at_least, not_nested, one_of, require, whole
from whence.kernels import BACKENDS
from whence.method import PositionMethod
from whence.methods import build
from whence.nn.bottom import PAD, with_input_term
from whence.nn.masks import from_torch
from whence.nn.positioned import positioned_attention, positioned_attention_with_weights


class MultiheadAttention(nn.Module):
    """torch.nn.MultiheadAttention, its arguments, shapes and state dict, with a positional method.

    `position` is a text ("tisa:kernels=5", "rope+alibi") or a method; its parameters are under
    `position.` in the state dict. Without any, a state dict of torch's loads as it is.

    Differences from torch's, all of them additions but the first two:
    - a query that may look at no key gets zeros, where torch gives NaN (then `out_proj`, in both);
    - the weights that `need_weights` returns are those before dropout;
    - `is_causal` needs no attn_mask; one given with it is not read, as the hint says what it is;
    - `num_kv_heads` below `num_heads` shares each key and value head between several queries';
    - `causal` makes every call causal, and builds the method for that.

    Key j stands at position j and query i at position q_start + i. `max_length` is for methods that
    need it. A `standalone` layer adds the method's input term to query, key and value; a stack does
    that itself, once, and says standalone=False.

        >>> layer = MultiheadAttention(64, 4, batch_first=True, position="tisa:kernels=5")
        >>> x = torch.randn(2, 10, 64)
        >>> layer(x, x, x, need_weights=False)[0].shape
        torch.Size([2, 10, 64])
    """

    # torch.nn.TransformerEncoderLayer reads this name before it takes a fast path past `forward`,
    # which would leave the position out.
    _qkv_same_embed_dim = False

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        position: str | PositionMethod = "nope",
        num_kv_heads: int | None = None,
        max_length: int = 512,
        causal: bool = False,
        standalone: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = head_size(embed_dim, num_heads)
        at_least(1, num_kv_heads=num_kv_heads)
        require(
            num_heads % num_kv_heads == 0,
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}.",
        )
        one_of("backend", backend, ("auto", *BACKENDS))
        require(0.0 <= dropout < 1.0, f"dropout must be in [0, 1), got {dropout}.")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        at_least(1, kdim=self.kdim, vdim=self.vdim)
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.causal, self.standalone, self.backend = causal, standalone, backend

        kv_dim = num_kv_heads * self.head_dim
        self.widths = (embed_dim, kv_dim, kv_dim)

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        packed = self.kdim == self.vdim == embed_dim
        self.in_proj_weight = empty(sum(self.widths), embed_dim) if packed else None
        self.q_proj_weight = None if packed else empty(embed_dim, embed_dim)
        self.k_proj_weight = None if packed else empty(kv_dim, self.kdim)
        self.v_proj_weight = None if packed else empty(kv_dim, self.vdim)
        self.in_proj_bias = empty(sum(self.widths)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.bias_k = empty(1, 1, kv_dim) if add_bias_kv else None
        self.bias_v = empty(1, 1, kv_dim) if add_bias_kv else None
        self.reset_parameters()

        if isinstance(position, str):
            position = build(
                position,
                n_heads=num_heads,
                d_head=self.head_dim,
                d_model=embed_dim,
                max_length=max_length,
                causal=causal,
            ).to(device=device, dtype=dtype)
        self._check_position(position)
        self.position = position

    def reset_parameters(self) -> None:
        """As torch's, in the same order: the same seed gives the same weights. Not the position."""
        weights = (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        for weight in weights:
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def _check_position(self, position: PositionMethod) -> None:
        wanted = {"n_heads": self.num_heads, "d_head": self.head_dim, "d_model": self.embed_dim}
        for part in position.modules():
            for name, size in wanted.items():
                built = getattr(part, name, size) if isinstance(part, PositionMethod) else size
                require(
                    built == size,
                    f"position {type(part).__name__} was built with {name} = {built}, this "
                    f"attention has {name} = {size}. Build it for this one, or give its text.",
                )
        sites = position.sites()
        require(
            not self._n_extra or set(sites) <= {"input"},
            "add_bias_kv and add_zero_attn add keys that stand nowhere, and the position "
            f"{type(position).__name__} has a term for every key (sites: {', '.join(sites)}). "
            "Leave them out, or take a position that enters at the input only.",
        )
        require(
            not self.standalone or "input" not in sites or self.kdim == self.vdim == self.embed_dim,
            f"position {type(position).__name__} adds to the input, so query, key and value must "
            f"have one size, got embed_dim {self.embed_dim}, kdim {self.kdim}, vdim {self.vdim}.",
        )

    @property
    def _n_extra(self) -> int:
        return int(self.bias_k is not None) + int(self.add_zero_attn)

    def forward(
        self,
        query: Float[Tensor, "*bq embed_dim"],
        key: Float[Tensor, "*bk kdim"],
        value: Float[Tensor, "*bv vdim"],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        q_start: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights or None), as torch's: a mask's True forbids, floats are added.

        need_weights=True, torch's default, costs n x n memory: the output is then computed from the
        weights, by the definition, and is the same but for rounding. Those of every head
        (average_attn_weights=False) are the tensor that the output was computed from, so that
        `retain_grad` works on them. To decode, give the last rows as `query` and their place as
        `q_start`.
        """
        self._check_inputs(query, key, value)
        whole(q_start=q_start)
        causal = self.causal or is_causal
        require(
            causal or not self.position.causal_only,
            f"position {type(self.position).__name__} is for causal attention: build the layer "
            "with causal=True, or call it with is_causal=True.",
        )
        batched = query.ndim == 3
        n_q, n_k = (x.shape[1 if batched and self.batch_first else 0] for x in (query, key))
        if self.standalone:
            self.position.begin(max(q_start + n_q, n_k))
        # One tensor stays one tensor, so that self-attention is one projection.
        x_q = self._bottom(query, q_start)
        x_k = x_q if key is query and q_start == 0 else self._bottom(key, 0)
        x_v = x_k if value is key else self._bottom(value, 0)
        q, k, v = self._heads(x_q, x_k, x_v)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        mask, bias = from_torch(
            key_padding_mask,
            None if is_causal else attn_mask,
            like=q,
            n_k=n_k,
            front=self._n_extra,
        )
        content = self._n_extra == 0
        x_q_seen = x_q if content else None
        x_k_seen = x_k if content and self.kdim == self.embed_dim else None
        k, v = self._with_extra(k, v)
        q_place = q_start + self._n_extra  # keys that stand nowhere come first: all is after them
        arguments: dict[str, Any] = {
            "x_q": x_q_seen,
            "x_k": x_k_seen,
            "bias": bias,
            "mask": mask,
            "causal": causal,
            "dropout": self.dropout if self.training else 0.0,
            "q_start": q_place,
        }
        weights = None
        if need_weights:
            out, weights = positioned_attention_with_weights(self.position, q, k, v, **arguments)
        else:
            out = positioned_attention(self.position, q, k, v, **arguments, backend=self.backend)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        out = self._as_given(out, batched)
        if weights is None:
            return out, None
        if self._n_extra:
            weights = weights.roll(-self._n_extra, dims=-1)  # torch has them last
        if average_attn_weights:
            weights = weights.mean(dim=1)
        return out, weights if batched else weights[0]

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        not_nested(PAD, query=query, key=key, value=value)
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        require(
            query.ndim in (2, 3) and query.ndim == key.ndim == value.ndim,
            f"query, key and value must all be 3-D, or all 2-D for one sequence, got {shapes}.",
        )
        sizes = (self.embed_dim, self.kdim, self.vdim)
        require(
            (query.shape[-1], key.shape[-1], value.shape[-1]) == sizes,
            f"query, key and value must end in {sizes}, got {shapes}.",
        )
        batch = 0 if self.batch_first else 1
        require(
            key.shape[:-1] == value.shape[:-1]
            and (query.ndim == 2 or query.shape[batch] == key.shape[batch]),
            f"key and value must have as many rows, and all as many sequences (axis {batch} of "
            f"three), got {shapes}.",
        )

    def _bottom(self, x: Tensor, start: int) -> Float[Tensor, "b n d"]:
        """An input with batch first and, in a layer that stands alone, with its input term."""
        if x.ndim == 2:
            x = x[None]
        elif not self.batch_first:
            x = x.transpose(0, 1)
        if self.standalone:
            x = with_input_term(self.position, x, batch_first=True, start=start)
        return x

    def _as_given(self, out: Float[Tensor, "b n d"], batched: bool) -> Tensor:
        if not batched:
            return out[0]
        return out if self.batch_first else out.transpose(0, 1)

    def _heads(
        self,
        x_q: Float[Tensor, "b q embed_dim"],
        x_k: Float[Tensor, "b k kdim"],
        x_v: Float[Tensor, "b k vdim"],
    ) -> tuple[
        Float[Tensor, "b h q d"],
        Float[Tensor, "b h_kv k d"],
        Float[Tensor, "b h_kv k d"],
    ]:
        bias = self.in_proj_bias
        if self.in_proj_weight is not None and x_q is x_k and x_k is x_v:
            whole = F.linear(x_q, self.in_proj_weight, bias)
            parts = list(whole.split_with_sizes(self.widths, dim=-1))
        else:
            biases = [None] * 3 if bias is None else bias.split_with_sizes(self.widths)
            each = zip((x_q, x_k, x_v), self._in_weights(), biases, strict=True)
            parts = [F.linear(x, weight, b) for x, weight, b in each]
        q, k, v = (self._split(x) for x in parts)
        return q, k, v

    def _in_weights(self) -> list[Tensor]:
        if self.in_proj_weight is not None:
            return list(self.in_proj_weight.split_with_sizes(self.widths))
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        return [weight for weight in weights if weight is not None]

    def _split(self, x: Float[Tensor, "b n width"]) -> Float[Tensor, "b h n d"]:
        n_heads = x.shape[-1] // self.head_dim
        return x.view(*x.shape[:2], n_heads, self.head_dim).transpose(1, 2)

    def _with_extra(
        self, k: Float[Tensor, "b h k d"], v: Float[Tensor, "b h k d"]
    ) -> tuple[Float[Tensor, "b h more d"], Float[Tensor, "b h more d"]]:
        """Keys and values with those of add_bias_kv and add_zero_attn before them.

        First and not last as in torch, where a causal mask would have to spare them.
        """
        b, h, _, d = k.shape
        if self.add_zero_attn:
            zero = k.new_zeros(b, h, 1, d)
            k, v = torch.cat([zero, k], dim=2), torch.cat([zero, v], dim=2)
        if self.bias_k is not None and self.bias_v is not None:
            first_k, first_v = (
                x.view(1, h, 1, d).expand(b, -1, -1, -1).to(k.dtype)
                for x in (self.bias_k, self.bias_v)
            )
            k, v = torch.cat([first_k, k], dim=2), torch.cat([first_v, v], dim=2)
        return k, v


def head_size(embed_dim: int, num_heads: int) -> int:
    """embed_dim / num_heads, if that is a whole number."""
    at_least(1, embed_dim=embed_dim, num_heads=num_heads)
    require(
        embed_dim % num_heads == 0,
        f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}.",
    )
    return embed_dim // num_heads
