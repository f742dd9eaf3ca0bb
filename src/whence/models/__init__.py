"""Native `transformers` models with any positional method; importing registers the Auto classes."""

from whence.models.causal import WhenceForCausalLM
from whence.models.classification import WhenceForSequenceClassification
from whence.models.config import WhenceConfig, WhenceSeq2SeqConfig
from whence.models.conversion import from_transformers
from whence.models.masked import WhenceForMaskedLM
from whence.models.model import WhenceModel
from whence.models.register import register
from whence.models.seq2seq import WhenceForConditionalGeneration, WhenceSeq2SeqModel

register()

__all__ = [
    "WhenceConfig",
    "WhenceForCausalLM",
    "WhenceForConditionalGeneration",
    "WhenceForMaskedLM",
    "WhenceForSequenceClassification",
    "WhenceModel",
    "WhenceSeq2SeqConfig",
    "WhenceSeq2SeqModel",
    "from_transformers",
]
