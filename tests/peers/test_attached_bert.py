"""transformers' own suite for BERT, on models that have TISA attached."""

from typing import Any

from peer_suites import transformers_suite
from whence.hf.classes import FORMAT, config_class, model_class

suite = transformers_suite("models.bert.test_modeling_bert")

OPTIONS = {
    "format": FORMAT,
    "position": "tisa:kernels=3,start=local",
    "keep_positions": True,
    "share": False,
    "layers": None,
    "backend": "original",
}


def attached_class(plain: type) -> type:
    return model_class(plain, "bert")


class AttachedBertTester(suite.BertModelTester):
    """As the suite's, but that every config names a method."""

    def get_config(self) -> Any:
        config = super().get_config()
        config.__class__ = config_class("bert")
        config.whence = dict(OPTIONS)
        return config


class TestAttachedBert(suite.BertModelTest):
    all_model_classes = tuple(map(attached_class, suite.BertModelTest.all_model_classes))

    def setUp(self) -> None:
        super().setUp()
        self.model_tester = AttachedBertTester(self)
