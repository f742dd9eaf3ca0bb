"""One layer: attention, cross-attention if asked for, and the feed-forward network, with norms."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from whence.kernels import Mask
from whence.method import PositionMethod
from whence.models.attention import CrossAttention, SelfAttention
from whence.models.config import WhenceConfig
from whence.models.token_layout import TokenLayout


def norm(config: WhenceConfig) -> nn.Module:
    """The norm that the config names."""
    kinds: dict[str, type[nn.RMSNorm | nn.LayerNorm]] = {
        "rmsnorm": nn.RMSNorm,
        "layernorm": nn.LayerNorm,
    }
    return kinds[config.norm](config.hidden_size, eps=config.norm_eps)


class Mlp(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) if gated."""

    def __init__(self, config: WhenceConfig) -> None:
        super().__init__()
        d, wide, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        assert wide is not None  # the config has filled it in
        self.gate_proj = nn.Linear(d, wide, bias=bias) if config.gated_mlp else None
        self.up_proj = nn.Linear(d, wide, bias=bias)
        self.down_proj = nn.Linear(wide, d, bias=bias)
        self.down_proj._whence_residual = True  # type: ignore[assignment]
        self.act: Callable[[Tensor], Tensor] = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """The network, token by token."""
        up = self.up_proj(x)
        inner = self.act(up) if self.gate_proj is None else self.act(self.gate_proj(x)) * up
        out: Tensor = self.down_proj(self.dropout(inner))
        return out


class WhenceLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """x + f(norm(x)) for each part f, or norm(x + f(x)) if the norm does not come first."""

    def __init__(self, config: WhenceConfig, *, causal: bool, cross: bool) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.attention_norm = norm(config)
        self.self_attn = SelfAttention(config, causal=causal)
        self.cross_norm = norm(config) if cross else None
        self.cross_attn = CrossAttention(config) if cross else None
        self.mlp_norm = norm(config)
        self.mlp = Mlp(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        memory: Float[Tensor, "b m d"] | None = None,
        *,
        position: PositionMethod,
        layout: TokenLayout,
        memory_mask: Mask | None = None,
        past_key_values: Cache | None = None,
        layer: int,
        need_weights: bool = False,
    ) -> tuple[Float[Tensor, "b n d"], Tensor | None, Tensor | None]:
        """(hidden states, attention weights, cross-attention weights), the last two if asked for.

        The states come first and by place, the cache by the name that checkpointing looks for.
        """
        found, weights = self.self_attn(
            self._before(self.attention_norm, x),
            position=position,
            layout=layout,
            cache=past_key_values,
            layer=layer,
            need_weights=need_weights,
        )
        x = self._after(self.attention_norm, x, found)
        cross_weights = None
        if self.cross_attn is not None and self.cross_norm is not None and memory is not None:
            cross_cache = (
                past_key_values if isinstance(past_key_values, EncoderDecoderCache) else None
            )
            found, cross_weights = self.cross_attn(
                self._before(self.cross_norm, x),
                memory,
                mask=memory_mask,
                cache=cross_cache,
                layer=layer,
                need_weights=need_weights,
            )
            x = self._after(self.cross_norm, x, found)
        x = self._after(self.mlp_norm, x, self.mlp(self._before(self.mlp_norm, x)))
        return x, weights, cross_weights

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = norm(x) if self.norm_first else x
        return out

    def _after(self, norm: nn.Module, x: Tensor, found: Tensor) -> Tensor:
        total = x + self.dropout(found)
        out: Tensor = total if self.norm_first else norm(total)
        return out


def residual_std(config: WhenceConfig) -> float:
    """The deviation of what is added to the residual: their sum is not to grow with depth."""
    scale = (2 * config.num_hidden_layers) ** -0.5 if config.residual_scale else 1.0
    return float(config.initializer_range * scale)


def is_residual(module: nn.Module) -> bool:
    """Whether a Linear's output is added to the residual."""
    return isinstance(module, nn.Linear) and getattr(module, "_whence_residual", False) is True
