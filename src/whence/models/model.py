"""The base model: tokens in, hidden states out, causal or not."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.utils.generic import can_return_tuple

from whence.checks import not_nested, require
from whence.models.config import WhenceConfig
from whence.models.pooling import pooled
from whence.models.pretrained import WhencePreTrainedModel
from whence.models.stack import WhenceStack


class WhenceModel(WhencePreTrainedModel):
    """Embeddings and one stack. `attention_mask` is padding, [b, tokens], on either side.

    Hidden states of `output_hidden_states` are those before each layer and the last. The weights of
    `output_attentions` are before dropout and cost n x n memory.

        >>> sizes = {"vocab_size": 9, "hidden_size": 16, "num_attention_heads": 2}
        >>> model = WhenceModel(WhenceConfig(position="tisa+alibi", **sizes))
        >>> model(torch.ones(1, 5).long()).last_hidden_state.shape
        torch.Size([1, 5, 16])
    """

    def __init__(self, config: WhenceConfig, *, pooler: bool = True) -> None:
        super().__init__(config)
        n_layers = getattr(config, "num_encoder_layers", config.num_hidden_layers)
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        types = config.type_vocab_size
        self.embed_types = nn.Embedding(types, config.hidden_size) if types else None
        self.stack = WhenceStack(config, n_layers=n_layers, causal=bool(config.causal))
        wide = config.hidden_size
        self.pooler = nn.Linear(wide, wide) if pooler and config.pooler else None
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings."""
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Put others in their place."""
        self.embed_tokens = value

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Int[Tensor, "b n"] | None = None,
        position_ids: Int[Tensor, "#b n"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "b n d"] | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """The hidden states, and the pooled one if the config has a pooler."""
        config = self.config
        x = embedded(self.embed_tokens, input_ids, inputs_embeds, config)
        if self.embed_types is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
            x = x + self.embed_types(token_type_ids)
        require(
            token_type_ids is None or self.embed_types is not None,
            "token_type_ids need a model with token types: build it with type_vocab_size above 0.",
        )
        use_cache = caching(use_cache, config, self.stack)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=config)
        found = self.stack(
            x,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            output_hidden_states=either(output_hidden_states, config.output_hidden_states),
            output_attentions=either(output_attentions, config.output_attentions),
        )
        first = None
        if self.pooler is not None:
            exists = None if attention_mask is None else attention_mask[:, -x.shape[1] :]
            first = torch.tanh(self.pooler(pooled(found.last, exists, "first")))
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=found.last,
            pooler_output=first,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=found.hidden_states,
            attentions=found.attentions,
        )


def embedded(
    table: nn.Module,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    config: WhenceConfig,
) -> Float[Tensor, "b n d"]:
    """One of the two as embeddings, scaled where the config says so."""
    require(
        (input_ids is None) != (inputs_embeds is None),
        "give either input_ids or inputs_embeds, not both and not neither.",
    )
    x: Tensor = table(input_ids) if inputs_embeds is None else inputs_embeds
    way_out = "Pad it, with an attention_mask, or pack sequences into one row with position_ids."
    not_nested(way_out, input=x)
    return x * config.hidden_size**0.5 if config.scale_embeddings else x


def caching(use_cache: bool | None, config: WhenceConfig, stack: WhenceStack) -> bool:
    """Whether a pass fills a cache: if asked to, else as the config says and not in training.

    Only a causal stack has use for one, and one that is checkpointed cannot fill it.
    """
    if use_cache is None:
        use_cache = config.use_cache and not stack.training
    checkpointed = stack.training and any(layer.gradient_checkpointing for layer in stack.layers)
    return bool(use_cache) and stack.causal and not checkpointed


def either(given: bool | None, default: bool) -> bool:
    """What the call says, or else the config."""
    return bool(default if given is None else given)
