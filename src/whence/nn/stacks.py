"""Stacks of layers: one method for the whole, its input term and what layers share done once."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from whence.checks import at_least
from whence.method import PositionMethod
from whence.methods import build_layers
from whence.nn.attention import MultiheadAttention, head_size
from whence.nn.bottom import begin, begun
from whence.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer


class TransformerEncoder(nn.Module):
    """`num_layers` TransformerEncoderLayers, then `norm` if one is given; names as torch.nn's.

    Each layer has position parameters of its own, or shares them where the method does (T5). A
    method given as such, not as a text, is shared by all layers. Where layers see parts of a whole
    (FLOATER), the whole is `shared`. Unlike torch's, the layers are built from arguments and do not
    start as copies of one another.

        >>> encoder = TransformerEncoder(64, 4, 2, batch_first=True, position="t5")
        >>> encoder(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        num_layers: int,
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
        norm: nn.Module | None = None,
        position: str | PositionMethod = "tisa:kernels=5",
        num_kv_heads: int | None = None,
        max_length: int = 512,
        causal: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.num_layers, self.batch_first = num_layers, batch_first
        whole, positions = _methods(
            position, num_layers, d_model, nhead, max_length, causal, device, dtype
        )
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(
                d_model,
                nhead,
                dim_feedforward,
                dropout,
                activation,
                layer_norm_eps,
                batch_first,
                norm_first,
                bias,
                device,
                dtype,
                position=method,
                num_kv_heads=num_kv_heads,
                causal=causal,
                standalone=False,
                backend=backend,
            )
            for method in positions
        )
        self.norm = norm
        self.shared = None if whole is positions[0] else whole

    def forward(
        self,
        src: Float[Tensor, "*bn d_model"],
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*bn d_model"]:
        """All layers in order. A causal stack needs no mask: is_causal=True, or built causal."""
        x = begun(_whole(self.shared, self.layers[0].self_attn), src, batch_first=self.batch_first)
        for layer in self.layers:
            x = layer(x, mask, src_key_padding_mask, is_causal)
        return x if self.norm is None else self.norm(x)


class TransformerDecoder(nn.Module):
    """`num_layers` TransformerDecoderLayers, then `norm` if one is given; names as torch.nn's.

    Positions are as in `TransformerEncoder`. `cross_position` is for cross-attention, by default
    without position; the methods of both kinds of attention are never shared with each other.

        >>> decoder = TransformerDecoder(32, 4, 2, batch_first=True, position="alibi", causal=True)
        >>> decoder(torch.randn(2, 5, 32), torch.randn(2, 7, 32)).shape  # 7 tokens of memory
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        num_layers: int,
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
        norm: nn.Module | None = None,
        position: str | PositionMethod = "tisa:kernels=5",
        cross_position: str | PositionMethod = "nope",
        num_kv_heads: int | None = None,
        max_length: int = 512,
        causal: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.num_layers, self.batch_first = num_layers, batch_first
        whole, positions = _methods(
            position, num_layers, d_model, nhead, max_length, causal, device, dtype
        )
        cross_whole, cross_positions = _methods(
            cross_position, num_layers, d_model, nhead, max_length, False, device, dtype
        )
        self.layers = nn.ModuleList(
            TransformerDecoderLayer(
                d_model,
                nhead,
                dim_feedforward,
                dropout,
                activation,
                layer_norm_eps,
                batch_first,
                norm_first,
                bias,
                device,
                dtype,
                position=own,
                cross_position=cross,
                num_kv_heads=num_kv_heads,
                causal=causal,
                standalone=False,
                backend=backend,
            )
            for own, cross in zip(positions, cross_positions, strict=True)
        )
        self.norm = norm
        self.shared = None if whole is positions[0] else whole
        self.cross_shared = None if cross_whole is cross_positions[0] else cross_whole

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
        """All layers in order. torch's detects a causal tgt_mask; here, say tgt_is_causal."""
        whole = _whole(self.shared, self.layers[0].self_attn)
        cross = _whole(self.cross_shared, self.layers[0].multihead_attn)
        x = begun(whole, tgt, batch_first=self.batch_first)
        begin(cross, tgt, memory, batch_first=self.batch_first)
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        for layer in self.layers:
            x = layer(x, memory, *masks, tgt_is_causal, memory_is_causal)
        return x if self.norm is None else self.norm(x)


def _whole(shared: nn.Module | None, first: Tensor | nn.Module) -> PositionMethod:
    """The method that owns what all layers share: that of the first one, if it is no view."""
    assert isinstance(first, MultiheadAttention)
    whole = first.position if shared is None else shared
    assert isinstance(whole, PositionMethod)
    return whole


def _methods(
    position: str | PositionMethod,
    n_layers: int,
    d_model: int,
    n_heads: int,
    max_length: int,
    causal: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[PositionMethod, list[PositionMethod]]:
    """The method of the whole stack, and what each layer sees of it."""
    at_least(1, num_layers=n_layers)
    if isinstance(position, PositionMethod):
        return position, [position.layer(index) for index in range(n_layers)]
    whole, layers = build_layers(
        position,
        n_layers,
        n_heads=n_heads,
        d_head=head_size(d_model, n_heads),
        d_model=d_model,
        max_length=max_length,
        causal=causal,
    )
    for method in (whole, *layers):
        method.to(device=device, dtype=dtype)
    return whole, layers
