"""The encoder-decoder, and the conditional language model on it."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.modeling_outputs import (
    BaseModelOutput,
    ModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.utils.generic import can_return_tuple

from whence.checks import require
from whence.kernels import Mask
from whence.models.config import WhenceSeq2SeqConfig
from whence.models.model import WhenceModel, caching, either, embedded
from whence.models.pretrained import Decoding, WhencePreTrainedModel
from whence.models.stack import WhenceStack


class WhenceSeq2SeqModel(WhencePreTrainedModel):
    """A bidirectional encoder and a causal decoder with one table of token embeddings.

    Both have the config's position, with parameters of their own, unless the decoder is given
    another; cross-attention has none.

        >>> sizes = {"vocab_size": 9, "hidden_size": 16, "num_attention_heads": 2}
        >>> model = WhenceSeq2SeqModel(WhenceSeq2SeqConfig(position="t5", **sizes))
        >>> ids = torch.ones(1, 5).long()
        >>> model(ids, decoder_input_ids=ids[:, :3]).last_hidden_state.shape
        torch.Size([1, 3, 16])
    """

    config_class = WhenceSeq2SeqConfig

    def __init__(self, config: WhenceSeq2SeqConfig) -> None:
        super().__init__(config)
        self.encoder = WhenceModel(config, pooler=False)
        self.decoder = WhenceStack(
            config,
            n_layers=config.num_hidden_layers,
            causal=True,
            cross=True,
            position=config.decoder_position,
        )
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings of both."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Put others in their place."""
        self.encoder.embed_tokens = value

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, which takes tokens."""
        return self.encoder

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Int[Tensor, "b m"] | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_position_ids: Int[Tensor, "#b m"] | None = None,
        encoder_outputs: ModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "b n d"] | None = None,
        decoder_inputs_embeds: Float[Tensor, "b m d"] | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> Seq2SeqModelOutput:
        """The decoder's hidden states, over the encoder's output."""
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                output_attentions=output_attentions,
                output_hidden_states=output_hidden_states,
                return_dict=True,
            )
        encoded: Any = encoder_outputs
        if not isinstance(encoded, ModelOutput):
            encoded = BaseModelOutput(*encoded)
        memory = encoded[0]
        config = self.config
        use_cache = caching(use_cache, config, self.decoder)
        if use_cache and past_key_values is None:
            own, cross = DynamicCache(config=config), DynamicCache(config=config)
            past_key_values = EncoderDecoderCache(own, cross)
        found = self.decoder(
            embedded(self.encoder.embed_tokens, decoder_input_ids, decoder_inputs_embeds, config),
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            past_key_values=past_key_values,
            memory=memory,
            memory_mask=None if attention_mask is None else Mask(keys=attention_mask != 0),
            output_hidden_states=either(output_hidden_states, config.output_hidden_states),
            output_attentions=either(output_attentions, config.output_attentions),
        )
        return Seq2SeqModelOutput(
            last_hidden_state=found.last,
            past_key_values=past_key_values if use_cache else None,
            decoder_hidden_states=found.hidden_states,
            decoder_attentions=found.attentions,
            cross_attentions=found.cross_attentions,
            encoder_last_hidden_state=memory,
            encoder_hidden_states=encoded.get("hidden_states"),
            encoder_attentions=encoded.get("attentions"),
        )


class WhenceForConditionalGeneration(
    Decoding,
    WhencePreTrainedModel,
    GenerationMixin,  # type: ignore[misc]
):
    """Logits of the decoder's tokens. Without decoder_input_ids these are `labels`, shifted by one.

    >>> sizes = {"vocab_size": 9, "hidden_size": 16, "num_attention_heads": 2}
    >>> model = WhenceForConditionalGeneration(WhenceSeq2SeqConfig(position="t5", **sizes))
    >>> model(torch.ones(1, 5).long(), labels=torch.ones(1, 3).long()).logits.shape
    torch.Size([1, 3, 9])
    """

    config_class = WhenceSeq2SeqConfig
    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: WhenceSeq2SeqConfig) -> None:
        super().__init__(config)
        self.model = WhenceSeq2SeqModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.post_init()

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, which takes tokens."""
        return self.model.encoder

    def get_decoder_stack(self) -> WhenceStack:
        """The decoder."""
        return self.model.decoder

    def prepare_decoder_input_ids_from_labels(
        self, labels: Int[Tensor, "b m"]
    ) -> Int[Tensor, "b m"]:
        """The labels one step later, after the token that starts; -100 becomes padding."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        require(
            start is not None and pad is not None,
            "labels become the decoder's input with decoder_start_token_id and pad_token_id: "
            "give both in the config.",
        )
        first = torch.full_like(labels[:, :1], start)
        shifted = torch.cat([first, labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, pad)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Int[Tensor, "b m"] | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_position_ids: Int[Tensor, "#b m"] | None = None,
        encoder_outputs: ModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "b n d"] | None = None,
        decoder_inputs_embeds: Float[Tensor, "b m d"] | None = None,
        labels: Int[Tensor, "b m"] | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Seq2SeqLMOutput:
        """Logits, and the loss if there are labels (not shifted: the input is)."""
        if use_cache is None and labels is not None:
            use_cache = False  # a loss is of whole sequences
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            decoder_position_ids=decoder_position_ids,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = ForMaskedLMLoss(
                logits,
                labels.contiguous(),
                self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=found.past_key_values,
            decoder_hidden_states=found.decoder_hidden_states,
            decoder_attentions=found.decoder_attentions,
            cross_attentions=found.cross_attentions,
            encoder_last_hidden_state=found.encoder_last_hidden_state,
            encoder_hidden_states=found.encoder_hidden_states,
            encoder_attentions=found.encoder_attentions,
        )
