"""The configuration of a native model: sizes, the position, and each choice of architecture."""

import difflib
from dataclasses import fields
from typing import Any, ClassVar, no_type_check

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from whence.checks import at_least, one_of, require
from whence.kernels import BACKENDS

# What the base class reads, and keeps under another name.
READ_BY_BASE = ("attn_implementation", "experts_implementation", "torch_dtype")
NORMS = ("rmsnorm", "layernorm")
POOLINGS = ("first", "last", "mean")
_STORED = "_stored"  # marks what was read from a file

# Queries, keys and values are cut by heads, what follows them by columns. Position parameters are
# on every process, as they are small and often shared by heads: `local_heads` cuts what they give.
_LAYER_PLAN = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


@no_type_check  # a checker of shapes would refuse the names that the base class lets through
class WhenceConfig(PreTrainedConfig):  # type: ignore[misc]
    """A Transformer with any positional method; by default pre-norm, RMSNorm, SwiGLU, no biases.

    position         a method or a sum of methods, as in `whence.build`: "tisa:kernels=5+rope"
    causal           None leaves it to the class: causal LM True, masked LM and classifier False
    shared_layers    one layer's weights for all layers (ALBERT), but for its position
    shared_positions one set of position parameters for all layers
    sliding_window   a query sees itself and window - 1 keys before it (and after it, if not causal)
    scale_attention  False drops the 1/sqrt(head_dim) of q.k (T5)
    norm_first       False is post-norm (BERT): the norm comes after the residual sum
    final_norm       a norm after the last layer; None is norm_first
    embedding_norm   a norm after the embeddings (BERT)
    scale_embeddings token embeddings times sqrt(hidden_size), drawn that much smaller (Vaswani et
                     al.): entries of size 1, beside which sinusoids do not hide the words
    gated_mlp        act(gate) * up (LLaMA, T5 1.1) in place of act(up)
    type_vocab_size  token types (segments); 0 for none
    pooler           tanh(W h) of the first token, for the base model and the classifier (BERT)
    head_transform   dense, activation, norm before the masked LM's output layer (BERT)
    residual_scale   initial weights of what is added to the residual divided by sqrt(2 layers)
    backend          of `whence.attend`

    `max_position_embeddings` is for methods with a table of positions; the others take any length.
    `intermediate_size` is 4 * hidden_size unless given, 8/3 of it (a multiple of 64) if gated.

        >>> WhenceConfig(position="t5", hidden_size=64, num_attention_heads=4).head_dim
        16
    """

    model_type = "whence"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        f"stack.layers.*.{name}": style for name, style in _LAYER_PLAN.items()
    }
    attribute_map: ClassVar[dict[str, str]] = {}

    vocab_size: int = 32000
    hidden_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 2048

    position: str = "tisa:kernels=5"
    causal: bool | None = None
    shared_layers: bool = False
    shared_positions: bool = False
    sliding_window: int | None = None
    scale_attention: bool = True

    norm: str = "rmsnorm"
    norm_eps: float = 1e-6
    norm_first: bool = True
    final_norm: bool | None = None
    embedding_norm: bool = False
    scale_embeddings: bool = False
    hidden_act: str = "silu"
    gated_mlp: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    type_vocab_size: int = 0
    pooler: bool = False
    head_transform: bool = False
    head_bias: bool = False
    classifier_pooling: str | None = None

    embedding_dropout: float = 0.0
    hidden_dropout: float = 0.0
    activation_dropout: float = 0.0
    attention_dropout: float = 0.0
    classifier_dropout: float = 0.0
    initializer_range: float = 0.02
    residual_scale: bool = True
    backend: str = "auto"

    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown(kwargs, stored=kwargs.pop(_STORED, False))
        require(
            isinstance(self.position, str),
            f"position must be a text such as 'tisa:kernels=5', got {self.position!r}.",
        )
        at_least(
            1,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
        )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            require(
                self.hidden_size % self.num_attention_heads == 0,
                "hidden_size must be a multiple of num_attention_heads, got "
                f"{self.hidden_size} and {self.num_attention_heads}. Change one, or give head_dim.",
            )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            wide = 4 * self.hidden_size
            self.intermediate_size = -(-2 * wide // (3 * 64)) * 64 if self.gated_mlp else wide
        if self.final_norm is None:
            self.final_norm = self.norm_first
        at_least(
            1,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            max_position_embeddings=self.max_position_embeddings,
        )
        at_least(0, type_vocab_size=self.type_vocab_size)
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_attention_heads must be a multiple of num_key_value_heads, got "
            f"{self.num_attention_heads} and {self.num_key_value_heads}.",
        )
        if self.sliding_window is not None:
            at_least(1, sliding_window=self.sliding_window)
        one_of("norm", self.norm, NORMS)
        one_of("hidden_act", self.hidden_act, ACT2FN)
        one_of("backend", self.backend, ("auto", *BACKENDS))
        if self.classifier_pooling is not None:
            one_of("classifier_pooling", self.classifier_pooling, POOLINGS)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As the library's. A file may hold names of anybody's: only those that are nearly ours,
        and would be silent defaults, are refused."""
        return super().from_dict(config_dict | {_STORED: True}, **kwargs)

    def _refuse_unknown(self, extra: dict[str, Any], *, stored: bool) -> None:
        """The base class keeps any name it does not know, so a typo would be a silent default."""
        known = [field.name for field in fields(self) if not field.name.startswith("_")]
        for name in extra:
            if name.startswith("_") or name in READ_BY_BASE or hasattr(type(self), name):
                continue
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8 if stored else 0.65)
            hint = f"Did you mean {near[0]!r}?" if near else "help(WhenceConfig) has them all."
            require(stored and not near, f"{type(self).__name__} has no option {name!r}. {hint}")


@no_type_check
class WhenceSeq2SeqConfig(WhenceConfig):
    """The config of an encoder and a causal decoder, which has num_hidden_layers layers.

    `num_encoder_layers` is num_hidden_layers unless given. `decoder_position` is the decoder's
    method where that is not the encoder's `position`. Cross-attention has no position.

        >>> config = WhenceSeq2SeqConfig(position="t5", hidden_size=64, num_attention_heads=4)
        >>> config.num_encoder_layers == config.num_hidden_layers
        True
    """

    model_type = "whence-seq2seq"
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        f"{part}.layers.*.{name}": style
        for part in ("encoder.stack", "decoder")
        for name, style in (
            *_LAYER_PLAN.items(),
            *(
                (name.replace("self_attn", "cross_attn"), style)
                for name, style in _LAYER_PLAN.items()
                if name.startswith("self_attn") and part == "decoder"
            ),
        )
    }

    num_encoder_layers: int | None = None
    decoder_position: str | None = None
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    decoder_start_token_id: int | None = 0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_encoder_layers is None:
            self.num_encoder_layers = self.num_hidden_layers
        at_least(1, num_encoder_layers=self.num_encoder_layers)
        require(
            self.decoder_position is None or isinstance(self.decoder_position, str),
            "decoder_position must be a text such as 'tisa:kernels=5', or None for that of the "
            f"encoder, got {self.decoder_position!r}.",
        )
        require(
            self.causal is None,
            "an encoder-decoder is causal in its decoder alone: leave causal=None, "
            f"got causal={self.causal}.",
        )
        super().__post_init__(**kwargs)
