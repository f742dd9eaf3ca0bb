"""`transformers.Trainer`, without weight decay on numbers that are of the size of a logit."""

from typing import Any

from transformers import Trainer

from whence.method import PositionMethod


class PositionTrainer(Trainer):  # type: ignore[misc]
    """Weight decay falls on weights and on tables of vectors, not on `logit_sized` parameters.

    Such a number is itself a part of the answer, as a bias of a layer is: decay would pull every
    curve of a learned bias towards zero, the more the longer a run is.
    """

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """The names that the library gives, less those of `logit_sized` methods."""
        methods = (x for x in model.modules() if isinstance(x, PositionMethod) and x.logit_sized)
        spared = {id(parameter) for method in methods for parameter in method.parameters()}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        names: list[str] = super().get_decay_parameter_names(model)
        return [name for name in names if id(parameters.get(name)) not in spared]
