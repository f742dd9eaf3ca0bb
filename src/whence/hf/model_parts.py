"""The modules of a built model that `attach` has to reach, by the names in its family's row."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from whence.checks import require, unknown
from whence.families import ATTACHABLE, Attach, Config, Family, Stack, T5Bias


@dataclass(frozen=True, eq=False)
class ModelParts:
    """A base model of `transformers`, seen through its family's row."""

    base: nn.Module
    family: Family

    @property
    def stack(self) -> Stack:
        """The stack of layers that methods are attached to."""
        return self.family.stacks[0]

    @property
    def attach(self) -> Attach:
        """The part of the row that is for `attach` alone."""
        assert self.family.attach is not None
        return self.family.attach

    @property
    def config(self) -> Config:
        """The model's config, as config.json has it."""
        config: Any = self.base.config
        found: dict[str, Any] = config.to_dict()
        return found

    def attentions(self) -> list[nn.Module]:
        """The attention modules, in the order in which a pass runs them first."""
        found: list[nn.Module] = [self.base]
        for name in self.stack.attention.split("."):
            if name.startswith("{"):
                found = [child for module in found for child in module.children()]
            else:
                found = [module.get_submodule(name) for module in found]
        return found

    def n_layers(self) -> int:
        """How often a pass runs an attention."""
        if not self.attach.repeats:
            return len(self.attentions())
        config = self.config
        return int(config[self.stack.layers[0]]) * self.stack.copies(config)

    def max_length(self) -> int:
        """The number of positions in the table."""
        parent, _, name = self.stack.table.rpartition(".")
        table: Any = getattr(self.base.get_submodule(parent), name)
        rows = int(table.shape[1] if isinstance(table, Tensor) else table.weight.shape[0])
        return rows - self.first_position()

    def first_position(self) -> int:
        """The row of position 0."""
        return self.stack.first_row(self.config)

    def position_tables(self) -> tuple[str, ...]:
        """The names of all tables that tell the model positions."""
        relative = self.stack.relative
        return (self.stack.table, *((relative.table,) if isinstance(relative, T5Bias) else ()))

    def is_causal(self) -> bool:
        """Whether its attention looks back only: always, or as its config says."""
        return self.stack.causal or bool(getattr(self.base.config, "is_decoder", False))

    def input_site(self) -> tuple[nn.Module, Literal["input", "output"]]:
        """The module at which a method's input term is added, and on which side of it.

        ELECTRA projects its embeddings only where they are narrower than the model.
        """
        modules, projection = dict(self.base.named_modules()), self.stack.projected_by
        if projection and projection in modules:
            return modules[projection], "output"
        if self.attach.term_before:
            return modules[self.attach.term_before], "input"
        return modules[self.stack.table], "output"


def parts_of(base: nn.Module) -> ModelParts:
    """The parts of a base model, or an error that names the families there are."""
    config: Any = base.config
    return ModelParts(base, family_of(str(config.model_type)))


def family_of(model_type: str) -> Family:
    """The row of a model_type that a method can be attached to, or an error that names all."""
    model_type = model_type.removeprefix("whence-")
    require(
        model_type in ATTACHABLE,
        unknown("family of model", model_type, ATTACHABLE)
        + " Say in its row of whence.families how to attach to it, or build it anew from "
        "whence.models.",
    )
    return ATTACHABLE[model_type]
