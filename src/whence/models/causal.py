"""The causal language model, with the library's `generate`."""

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from whence.models.config import WhenceConfig
from whence.models.model import WhenceModel
from whence.models.pretrained import Decoding, WhencePreTrainedModel, only
from whence.models.stack import WhenceStack


class WhenceForCausalLM(Decoding, WhencePreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Next-token logits. `labels` are the input ids, -100 where no loss is wanted; shifted here.

    >>> config = WhenceConfig(position="tisa+rope", hidden_size=64, num_attention_heads=4)
    >>> WhenceForCausalLM(config).config.causal
    True
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: WhenceConfig) -> None:
        config = only(config, True, "a causal language model")
        super().__init__(config)
        self.model = WhenceModel(config, pooler=False)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.post_init()

    def get_decoder_stack(self) -> WhenceStack:
        """The only stack."""
        return self.model.stack

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Int[Tensor, "b n"] | None = None,
        position_ids: Int[Tensor, "#b n"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "b n d"] | None = None,
        labels: Int[Tensor, "b n"] | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits of the last `logits_to_keep` tokens (0: of all), and the loss if labels come."""
        if use_cache is None and labels is not None:
            use_cache = False  # a loss is of whole sequences
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=found.past_key_values,
            hidden_states=found.hidden_states,
            attentions=found.attentions,
        )
