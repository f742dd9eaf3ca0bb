"""The sequence classifier: one label, several, or a number, for a whole text."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from whence.models.config import WhenceConfig
from whence.models.model import WhenceModel
from whence.models.pooling import pooled
from whence.models.pretrained import WhencePreTrainedModel, resolved


class WhenceForSequenceClassification(WhencePreTrainedModel):
    """Logits of the first token, the last one, or the mean of all (`classifier_pooling`).

    Unless given it is the last one in a causal model and the first in others, through the pooler if
    the config has one. Padding, on either side, is no token. The number and kind of labels are
    `num_labels` and `problem_type`, as in all models of the library.

        >>> sizes = {"vocab_size": 9, "hidden_size": 16, "num_attention_heads": 2, "num_labels": 3}
        >>> model = WhenceForSequenceClassification(WhenceConfig(position="tisa", **sizes))
        >>> model(torch.ones(1, 5).long()).logits.shape
        torch.Size([1, 3])
    """

    accepts_loss_kwargs = False  # a mean over texts: the trainer averages accumulated batches

    def __init__(self, config: WhenceConfig) -> None:
        config = resolved(config, False)
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = WhenceModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Int[Tensor, "b n"] | None = None,
        position_ids: Int[Tensor, "#b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n d"] | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> SequenceClassifierOutput:
        """Logits [b, labels], and the loss if there are labels."""
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        x = pooled(found.last_hidden_state, attention_mask, self._pooling())
        if self.model.pooler is not None:
            x = torch.tanh(self.model.pooler(x))
        logits = self.classifier(self.dropout(x))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=found.hidden_states,
            attentions=found.attentions,
        )

    def _pooling(self) -> str:
        if self.config.classifier_pooling is not None:
            return str(self.config.classifier_pooling)
        return "last" if self.config.causal else "first"
