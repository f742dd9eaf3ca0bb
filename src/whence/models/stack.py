"""A stack of layers with the positions of all of them; embedded tokens in, hidden states out."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache, StaticCache

from whence.checks import require
from whence.kernels import Mask
from whence.models.config import WhenceConfig
from whence.models.layer import WhenceLayer, norm
from whence.models.local_heads import sum_gradients
from whence.models.positions import Positions
from whence.models.token_layout import token_layout


@dataclass(frozen=True, eq=False)
class StackOutput:
    """The last hidden states; those of every layer and the weights where they were asked for."""

    last: Float[Tensor, "b n d"]
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None
    cross_attentions: tuple[Tensor, ...] | None


class WhenceStack(nn.Module):
    """The input term and the norm of the embeddings, `n_layers` layers, the last norm."""

    def __init__(
        self,
        config: WhenceConfig,
        *,
        n_layers: int,
        causal: bool,
        cross: bool = False,
        position: str | None = None,
    ) -> None:
        super().__init__()
        assert config.head_dim is not None  # the config has filled it in
        self.n_layers, self.causal = n_layers, causal
        position = config.position if position is None else position
        self.position = Positions(
            position,
            n_layers,
            shared=config.shared_positions,
            n_heads=config.num_attention_heads,
            d_head=config.head_dim,
            d_model=config.hidden_size,
            max_length=config.max_position_embeddings,
            causal=causal,
        )
        require(
            causal or not self.position.whole.causal_only,
            f"position {position!r} is for causal attention alone, and this stack is not "
            "causal. Take a causal language model, or another position.",
        )
        self.embed_norm = norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(
            WhenceLayer(config, causal=causal, cross=cross)
            for _ in range(1 if config.shared_layers else n_layers)
        )
        self.norm = norm(config) if config.final_norm else None

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        *,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "#b n"] | None = None,
        past_key_values: Cache | None = None,
        memory: Float[Tensor, "b m d"] | None = None,
        memory_mask: Mask | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> StackOutput:
        """All layers, over the tokens x and those that the cache holds."""
        whole = self.position.whole
        seen, longest = _cached(past_key_values)
        require(
            not whole.grows or (not isinstance(seen, Tensor) and seen == 0),
            "this position changes what earlier tokens get as the sequence grows, so cached ones "
            "are out of date: pass use_cache=False, and all tokens.",
        )
        layout = token_layout(
            x.shape[0],
            x.shape[1],
            seen=seen,
            longest=longest,
            attention_mask=attention_mask,
            position_ids=position_ids,
            anchored=whole.anchored,
            device=x.device,
        )
        if isinstance(layout.total, Tensor):
            assert longest is not None
            whole.begin(longest)
        else:
            whole.begin(layout.total)
        term = whole.input_term(layout.places)
        x = x if term is None else x + term.to(x.dtype)
        x = self.dropout(x if self.embed_norm is None else self.embed_norm(x))
        states: list[Tensor] = []
        weights: list[Tensor] = []
        cross_weights: list[Tensor] = []
        for index in range(self.n_layers):
            if output_hidden_states:
                states.append(x)
            x, own, cross = self.layers[index % len(self.layers)](
                x,
                memory,
                position=self.position.layer(index),
                layout=layout,
                memory_mask=memory_mask,
                past_key_values=past_key_values,
                layer=index,
                need_weights=output_attentions,
            )
            if own is not None:
                weights.append(own)
            if cross is not None:
                cross_weights.append(cross)
        group = self.layers[0].self_attn.group  # type: ignore[union-attr]
        if group is not None and torch.is_grad_enabled():
            sum_gradients(self.position, group)
        x = x if self.norm is None else self.norm(x)
        return StackOutput(
            x,
            (*states, x) if output_hidden_states else None,
            tuple(weights) if output_attentions else None,
            tuple(cross_weights) if output_attentions else None,
        )


def _cached(cache: Cache | None) -> tuple[int | Tensor, int | None]:
    """The number of cached tokens, and the length of a cache whose length is fixed.

    A compiler must not read the number, which changes with every step, so there it is a tensor.
    """
    if cache is None:
        return 0, None
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    longest = cache.layers[0].max_cache_len if isinstance(cache, StaticCache) else None
    seen = cache.get_seq_length()
    if torch.compiler.is_compiling() and isinstance(seen, Tensor):
        return seen.clone(), longest  # a layer adds to its own
    return int(seen), longest
