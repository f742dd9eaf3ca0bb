"""One encoder layer and one decoder layer with positions: drop-ins for torch.nn's."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from whence.checks import require, unknown
from whence.method import PositionMethod
from whence.nn.attention import MultiheadAttention
from whence.nn.bottom import begin, begun

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class TransformerEncoderLayer(nn.Module):
    """torch.nn.TransformerEncoderLayer, its arguments and state dict, with a position.

    What is added is as in `MultiheadAttention`. A `standalone` layer adds the method's input term
    to its input, before the residual branches off; in a stack that happens once, at the bottom.

        >>> layer = TransformerEncoderLayer(32, 4, batch_first=True, position="rope")
        >>> layer(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
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

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)

        self.self_attn = MultiheadAttention(
            d_model,
            nhead,
            dropout=dropout,
            bias=bias,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
            position=position,
            num_kv_heads=num_kv_heads,
            max_length=max_length,
            causal=causal,
            standalone=False,
            backend=backend,
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, device=device, dtype=dtype)
        self.norm1, self.norm2 = norm(), norm()
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.activation = activation_of(activation)
        self.norm_first, self.standalone = norm_first, standalone

    def forward(
        self,
        src: Float[Tensor, "*bn d_model"],
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*bn d_model"]:
        """The layer's output, in the shape of its input."""
        attention, x = self.self_attn, src
        if self.standalone:
            x = begun(attention.position, x, batch_first=attention.batch_first)

        def look(x: Tensor) -> Tensor:
            seen, _ = attention(x, x, x, src_key_padding_mask, False, src_mask, is_causal=is_causal)
            out: Tensor = self.dropout1(seen)
            return out

        def feed(x: Tensor) -> Tensor:
            inner = self.dropout(self.activation(self.linear1(x)))
            out: Tensor = self.dropout2(self.linear2(inner))
            return out

        if self.norm_first:
            x = x + look(self.norm1(x))
            return x + feed(self.norm2(x))
        x = self.norm1(x + look(x))
        out: Tensor = self.norm2(x + feed(x))
        return out


class TransformerDecoderLayer(nn.Module):
    """torch.nn.TransformerDecoderLayer, its arguments and state dict, with positions.

    Cross-attention has none unless `cross_position` says so (T5's rule); there query i and key j of
    the memory stand at positions i and j of their own sequences. `causal` is about self-attention.

        >>> layer = TransformerDecoderLayer(32, 4, batch_first=True, position="tisa", causal=True)
        >>> layer(torch.randn(2, 5, 32), torch.randn(2, 7, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        position: str | PositionMethod = "nope",
        cross_position: str | PositionMethod = "nope",
        num_kv_heads: int | None = None,
        max_length: int = 512,
        causal: bool = False,
        standalone: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()

        def attention(method: str | PositionMethod, causal: bool) -> MultiheadAttention:
            return MultiheadAttention(
                d_model,
                nhead,
                dropout=dropout,
                bias=bias,
                batch_first=batch_first,
                device=device,
                dtype=dtype,
                position=method,
                num_kv_heads=num_kv_heads,
                max_length=max_length,
                causal=causal,
                standalone=False,
                backend=backend,
            )

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)

        self.self_attn = attention(position, causal)
        self.multihead_attn = attention(cross_position, False)
        cross = self.multihead_attn.position
        require(
            "input" not in cross.sites(),
            f"cross_position {type(cross).__name__} adds to the input, and cross-attention has "
            "none of its own. Give it as the position of the encoder or of the decoder.",
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, device=device, dtype=dtype)
        self.norm1, self.norm2, self.norm3 = norm(), norm(), norm()
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.dropout3 = nn.Dropout(dropout)
        self.activation = activation_of(activation)
        self.norm_first, self.standalone = norm_first, standalone

    def forward(
        self,
        tgt: Float[Tensor, "*bn d_model"],
        memory: Float[Tensor, "*bm d_model"],
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Float[Tensor, "*bn d_model"]:
        """The layer's output, in the shape of `tgt`."""
        own, cross, x = self.self_attn, self.multihead_attn, tgt
        if self.standalone:
            x = begun(own.position, x, batch_first=own.batch_first)
            begin(cross.position, tgt, memory, batch_first=own.batch_first)

        def look(x: Tensor) -> Tensor:
            seen, _ = own(x, x, x, tgt_key_padding_mask, False, tgt_mask, is_causal=tgt_is_causal)
            out: Tensor = self.dropout1(seen)
            return out

        def look_over(x: Tensor) -> Tensor:
            padding, mask = memory_key_padding_mask, memory_mask
            seen, _ = cross(x, memory, memory, padding, False, mask, is_causal=memory_is_causal)
            out: Tensor = self.dropout2(seen)
            return out

        def feed(x: Tensor) -> Tensor:
            inner = self.dropout(self.activation(self.linear1(x)))
            out: Tensor = self.dropout3(self.linear2(inner))
            return out

        if self.norm_first:
            x = x + look(self.norm1(x))
            x = x + look_over(self.norm2(x))
            return x + feed(self.norm3(x))
        x = self.norm1(x + look(x))
        x = self.norm2(x + look_over(x))
        out: Tensor = self.norm3(x + feed(x))
        return out


def activation_of(activation: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function that a text names, or the function given."""
    if not isinstance(activation, str):
        return activation
    require(activation in ACTIVATIONS, unknown("activation", activation, ACTIVATIONS))
    return ACTIVATIONS[activation]
