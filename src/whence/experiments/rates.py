"""A learning rate of their own for learned biases: their numbers have another scale."""

from typing import Any

from whence.method import PositionMethod


def trainer_class(rate: float) -> Any:
    """`transformers.Trainer`, with `rate` times the learning rate for biases that are learned.

    Adam moves every number by about the learning rate a step, whatever its size. A weight matrix
    has entries of some hundredths; a bias that is to tell lags apart is of the size of a logit, 1
    and more, which 500 steps of 1e-3 under a cosine never reach. So it goes for the parameters of
    methods that are `logit_sized`; tables of vectors learn as the model does.
    """
    from transformers import Trainer

    if rate == 1:
        return Trainer

    class RatedTrainer(Trainer):  # type: ignore[misc]
        """The same in groups: the model's own, and the biases' at their rate."""

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            """As the library makes it, then each of its groups cut in two."""
            optimizer = super().create_optimizer(*args, **kwargs)
            methods = self.model.model.stack.position.modules()
            sized = (x for x in methods if isinstance(x, PositionMethod) and x.logit_sized)
            apart(optimizer, {id(p) for method in sized for p in method.parameters()}, rate)
            return optimizer

    return RatedTrainer


def apart(optimizer: Any, own: set[int], rate: float) -> None:
    """Move these parameters into groups of their own, which learn at `rate` times the rate.

    They decay as they did: AdamW takes learning rate times weight decay off a number a step.
    """
    for group in list(optimizer.param_groups):
        ours = [p for p in group["params"] if id(p) in own]
        if ours:
            group["params"] = [p for p in group["params"] if id(p) not in own]
            options = {key: value for key, value in group.items() if key != "params"}
            options |= {"lr": rate * group["lr"], "weight_decay": group["weight_decay"] / rate}
            optimizer.add_param_group({**options, "params": ours})
