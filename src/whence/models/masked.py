"""The masked language model."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from whence.models.config import WhenceConfig
from whence.models.layer import norm
from whence.models.model import WhenceModel
from whence.models.pretrained import WhencePreTrainedModel, only


class HeadTransform(nn.Module):
    """norm(act(W x + b)), before BERT's output layer."""

    def __init__(self, config: WhenceConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.act: Callable[[Tensor], Tensor] = ACT2FN[config.hidden_act]
        self.norm = norm(config)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Token by token."""
        out: Tensor = self.norm(self.act(self.dense(x)))
        return out


class WhenceForMaskedLM(WhencePreTrainedModel):
    """Logits of every token; `labels` are the true ids where one was masked and -100 elsewhere.

    >>> import torch
    >>> sizes = {"vocab_size": 9, "hidden_size": 16, "num_attention_heads": 2}
    >>> model = WhenceForMaskedLM(WhenceConfig(position="tisa", **sizes))
    >>> model(torch.ones(1, 5).long()).logits.shape
    torch.Size([1, 5, 9])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: WhenceConfig) -> None:
        config = only(config, False, "a masked language model")
        super().__init__(config)
        self.model = WhenceModel(config, pooler=False)
        self.head = HeadTransform(config) if config.head_transform else None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Int[Tensor, "b n"] | None = None,
        position_ids: Int[Tensor, "#b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n d"] | None = None,
        labels: Int[Tensor, "b n"] | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
    ) -> MaskedLMOutput:
        """Logits, and the loss if there are labels."""
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        x = found.last_hidden_state
        logits = self.lm_head(x if self.head is None else self.head(x))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=found.hidden_states,
            attentions=found.attentions,
        )
