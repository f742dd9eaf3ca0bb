"""Learning rates of a method beside those of pretrained weights."""

from typing import Any

from torch import nn

from whence.checks import require
from whence.hf.attaching import attached

POSITION_RATE = 1.5e-3  # moves a logit by one or two in a few hundred steps


def own_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the method that is attached to a model, those that learn."""
    handle = attached(model)
    methods = [] if handle is None else [method for method in handle.methods if method is not None]
    found = {id(p): p for method in methods for p in method.parameters()}  # layers may share one
    return [parameter for parameter in found.values() if parameter.requires_grad]


def parameter_groups(
    model: nn.Module, learning_rate: float, *, position_rate: float = POSITION_RATE
) -> list[dict[str, Any]]:
    """For an optimizer: the model's weights at their rate, those of its method at one of their own.

    Pretrained weights want small steps, at which Gaussians that begin at zero hardly move. The
    method's numbers have no weight decay.

        >>> from transformers import BertConfig, BertModel
        >>> from whence.hf import attach
        >>> sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
        >>> model = BertModel(BertConfig(**sizes))
        >>> _ = attach(model, "tisa:kernels=5")
        >>> groups = parameter_groups(model, 2e-5)
        >>> len(groups[1]["params"]), groups[1]["lr"]
        (6, 0.0015)
    """
    own = own_parameters(model)
    require(
        len(own) > 0,
        "there is no attached method that learns: whence.hf.attach(model, 'tisa') comes first.",
    )
    ids = {id(parameter) for parameter in own}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
    return [
        {"params": others, "lr": learning_rate},
        {"params": own, "lr": position_rate, "weight_decay": 0.0},
    ]
