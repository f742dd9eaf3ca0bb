"""The encoder-decoder of a job as it begins."""

from typing import Any

from whence.experiments.translation.bpe import END_ID, PAD_ID
from whence.experiments.translation.config import TranslationConfig, both_sides
from whence.methods.registry import import_modules


def new_model(config: TranslationConfig, position: str, *, seed: int, vocab_size: int) -> Any:
    """The Transformer of Vaswani et al., with one table for all embeddings and the output layer.

    Embeddings are scaled by sqrt(d_model), so that their entries are of the size of sinusoids. The
    norm comes first unless the configuration says otherwise, and weights begin at SmallInit's
    deviation, sqrt(2 / (5 d)) (Nguyen and Salazar, 2019): that trains small data at high rates.
    The weights are the same for the same seed, but for the positions' own.
    """
    from transformers import set_seed

    from whence.models import WhenceForConditionalGeneration, WhenceSeq2SeqConfig

    encoder, decoder = both_sides(position)
    for part in (encoder, decoder):
        import_modules(part)  # a method of the user's own, in a worker process too
    options = WhenceSeq2SeqConfig(
        position=encoder,
        decoder_position=None if decoder == encoder else decoder,
        vocab_size=vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        intermediate_size=config.d_ff,
        max_position_embeddings=config.max_length,
        norm="layernorm",
        norm_first=config.norm_first,
        scale_embeddings=True,
        hidden_act="relu",
        gated_mlp=False,
        mlp_bias=True,
        embedding_dropout=config.dropout,
        hidden_dropout=config.dropout,
        activation_dropout=0.0,
        attention_dropout=config.attention_dropout,
        initializer_range=(2 / (5 * config.d_model)) ** 0.5,
        residual_scale=config.norm_first,
        backend=config.backend,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        decoder_start_token_id=PAD_ID,
    )
    set_seed(seed)
    return WhenceForConditionalGeneration(options)


def positional_parameters(model: Any) -> int:
    """How many of a model's parameters belong to its positions."""
    parts = (model.model.encoder.stack.position, model.model.decoder.position)
    return sum(parameter.numel() for part in parts for parameter in part.parameters())
