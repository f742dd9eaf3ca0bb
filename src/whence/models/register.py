"""The native models under the Auto classes of `transformers`."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from whence.models.causal import WhenceForCausalLM
from whence.models.classification import WhenceForSequenceClassification
from whence.models.config import WhenceConfig, WhenceSeq2SeqConfig
from whence.models.masked import WhenceForMaskedLM
from whence.models.model import WhenceModel
from whence.models.seq2seq import WhenceForConditionalGeneration, WhenceSeq2SeqModel


def register() -> None:
    """Make the Auto classes know "whence" and "whence-seq2seq"; a second call changes nothing."""
    for config in (WhenceConfig, WhenceSeq2SeqConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto, model in (
        (AutoModel, WhenceModel),
        (AutoModelForCausalLM, WhenceForCausalLM),
        (AutoModelForMaskedLM, WhenceForMaskedLM),
        (AutoModelForSequenceClassification, WhenceForSequenceClassification),
    ):
        auto.register(WhenceConfig, model, exist_ok=True)
    AutoModel.register(WhenceSeq2SeqConfig, WhenceSeq2SeqModel, exist_ok=True)
    AutoModelForSeq2SeqLM.register(
        WhenceSeq2SeqConfig, WhenceForConditionalGeneration, exist_ok=True
    )
