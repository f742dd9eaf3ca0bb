"""Reads a stack of a checkpoint by its family's row: sizes, position table, W_Q and W_K."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from whence.analysis.checkpoint import Checkpoint, Doubles
from whence.analysis.own_models import OwnPosition, attached_to, native_family, own_position
from whence.analysis.toeplitz import FEWEST_ROWS
from whence.checks import require
from whence.families import INSPECTABLE, Family, Stack

MOST_COMPUTED = 2048  # positions of a table that is computed: the work grows with their square


@dataclass(frozen=True, eq=False)
class Projections:
    """W_Q, W_K and their biases head by head, zero where the model has none.

    Heads that share keys (grouped-query attention) have them repeated.
    """

    query: Float[np.ndarray, "h d m"]
    key: Float[np.ndarray, "h d m"]
    query_bias: Float[np.ndarray, "h d"]
    key_bias: Float[np.ndarray, "h d"]
    has_biases: bool


@dataclass(frozen=True, eq=False)
class StackReader:
    """A checkpoint seen through one stack of its family's row."""

    checkpoint: Checkpoint
    family: Family
    stack: Stack

    @property
    def n_layers(self) -> int:
        """Layers of the stack."""
        return self._size(self.stack.layers) * self.stack.copies(self.checkpoint.config)

    @property
    def n_heads(self) -> int:
        """Query heads of a layer."""
        return self._size(self.stack.heads)

    @property
    def d_model(self) -> int:
        """Dimensions of the stream that the projections read."""
        return self._size(self.stack.width)

    @property
    def d_head(self) -> int:
        """Dimensions of a head."""
        config = self.checkpoint.config
        if any(config.get(key) is not None for key in self.stack.head_size):
            return self._size(self.stack.head_size)
        return self.d_model // self.n_heads

    @property
    def causal(self) -> bool:
        """Whether a query sees no later key: always, or because the config says so."""
        return self.stack.causal or bool(self.checkpoint.config.get("is_decoder", False))

    @cached_property
    def own(self) -> OwnPosition | None:
        """The method of this library that the model has, with its numbers."""
        return own_position(self)

    def scale(self, layer: int) -> float:
        """What the model multiplies q.k with."""
        return self.stack.scale(self.checkpoint.config, self.d_head, layer)

    def table(self) -> Doubles | None:
        """The rows of the table that are positions, as stored; None for a model without one.

        Where a method of this library adds vectors to the input, they are the table, or are added
        to it. Vectors that are computed (sinusoids) have no end: the first MOST_COMPUTED are read.
        """
        stored, own = self._stored_table(), self.own
        if own is None:
            return stored
        kept = stored if own.keeps_table else None
        added = own.vectors(self.n_computed or self._max_length)
        if kept is None or added is None:
            return added if kept is None else kept
        require(
            kept.shape == added.shape,
            f"the table of {self.checkpoint.name} has the shape {list(kept.shape)}, and "
            f"{own.spec} adds vectors of the shape {list(added.shape)} beside it.",
        )
        total: Doubles = kept + added
        return total

    @property
    def _max_length(self) -> int:
        config = self.checkpoint.config
        length: int = config.get("max_position_embeddings", 512) - self.stack.first_row(config)
        return length

    @property
    def n_computed(self) -> int | None:
        """Positions that are read of vectors that the config alone sets no end to, or None."""
        own = self.own
        stored = own is None or own.whole.fixed_length or (own.keeps_table and self.stack.table)
        return MOST_COMPUTED if not stored and self._max_length > MOST_COMPUTED else None

    def _stored_table(self) -> Doubles | None:
        config = self.checkpoint.config
        if not self.stack.table or not self.stack.has_table(config):
            return None
        if self.own is not None and not self.own.keeps_table:  # nor need it be in the file
            return None
        name = self._need(self.stack.table + ".weight")
        table, first = self.checkpoint.tensor(name), self.stack.first_row(config)
        require(
            table.ndim == 2 and len(table) - first >= FEWEST_ROWS,
            f"{name} of {self.checkpoint.name} has the shape {list(table.shape)}, of which "
            f"{max(0, len(table) - first)} rows are positions: at least {FEWEST_ROWS} are needed "
            "to speak of diagonals.",
        )
        return table[first:]

    def rows(self, n: int) -> str:
        """Which rows of the stored table are positions, in words."""
        first = self.stack.first_row(self.checkpoint.config)
        if first == 0:
            return f"rows 0..{n - 1}; the first token, [CLS] where there is one, has row 0"
        return f"rows {first}..{first + n - 1}; the {first} before them are not positions"

    def projection(self) -> tuple[Doubles, Doubles] | None:
        """The map from the table's dimensions to the model's [m, t], with its bias (ALBERT)."""
        if not self.stack.projected_by:
            return None
        name = self.checkpoint.find(self.stack.projected_by + ".weight")
        if name is None:  # as wide as the model: nothing to project
            return None
        weight = self.checkpoint.tensor(name)
        return weight, self._bias(self.stack.projected_by + ".bias", len(weight))[0]

    def projections(self, layer: int) -> Projections:
        """The query and key projections of a layer."""
        self.check_layer(layer)
        h, d, stack = self.n_heads, self.d_head, self.stack
        place = stack.place(self.checkpoint.config, layer)
        attention = stack.attention.format(**place)
        q_name = f"{attention}.{stack.query}"
        q_weight = self._weight(q_name)
        if stack.fused == "no":
            k_name = f"{attention}.{stack.key}"
            k_weight = self._weight(k_name)
            q_bias, q_has = self._bias(q_name + ".bias", len(q_weight))
            k_bias, k_has = self._bias(k_name + ".bias", len(k_weight))
        else:
            fused, fused_has = self._bias(q_name + ".bias", len(q_weight))
            k_bias, k_has = self._part(fused, 1), fused_has
            if stack.query_bias:
                q_bias, q_has = self._bias(f"{attention}.{stack.query_bias}", h * d)
            else:
                q_bias, q_has = self._part(fused, 0), fused_has
            q_weight, k_weight = self._part(q_weight, 0), self._part(q_weight, 1)
        require(
            len(q_weight) == h * d and len(k_weight) > 0 and h * d % len(k_weight) == 0,
            f"{q_name} of {self.checkpoint.name} makes {len(q_weight)} numbers for queries and "
            f"{len(k_weight)} for keys, but the config says {h} heads of {d}.",
        )
        shared = h * d // len(k_weight)
        return Projections(
            q_weight.reshape(h, d, -1),
            k_weight.reshape(h // shared, d, -1).repeat(shared, axis=0),
            q_bias.reshape(h, d),
            k_bias.reshape(h // shared, d).repeat(shared, axis=0),
            q_has or k_has,
        )

    def check_layer(self, layer: int) -> None:
        """The layer must be one of the stack's."""
        which = f"the {self.stack.name} of " if self.stack.name else ""
        require(
            0 <= layer < self.n_layers,
            f"there is no layer {layer}: {which}{self.checkpoint.name} has {self.n_layers} "
            f"layers, 0..{self.n_layers - 1}.",
        )

    def named(self, pattern: str, layer: int) -> Doubles | None:
        """The tensor that a pattern names in a layer, or None."""
        place = self.stack.place(self.checkpoint.config, layer)
        name = self.checkpoint.find(pattern.format(**place))
        return None if name is None else self.checkpoint.tensor(name)

    def needed(self, pattern: str, layer: int) -> Doubles:
        """The tensor that a pattern names in a layer."""
        place = self.stack.place(self.checkpoint.config, layer)
        return self.checkpoint.tensor(self._need(pattern.format(**place)))

    def _weight(self, name: str) -> Doubles:
        weight = self.checkpoint.tensor(self._need(name + ".weight"))
        return weight.T if self.stack.transposed else weight

    def _bias(self, name: str, size: int) -> tuple[Doubles, bool]:
        found = self.checkpoint.find(name)
        return (np.zeros(size), False) if found is None else (self.checkpoint.tensor(found), True)

    def _part(self, fused: Doubles, which: int) -> Doubles:
        """Queries (0) or keys (1) of a fused tensor [3 h d, ...]."""
        h, d = self.n_heads, self.d_head
        require(
            len(fused) == 3 * h * d,
            f"the fused projection of {self.checkpoint.name} has {len(fused)} rows, but "
            f"{h} heads of {d} need {3 * h * d}.",
        )
        if self.stack.fused == "blocks":
            return fused[which * h * d : (which + 1) * h * d]
        by_head = fused.reshape(h, 3, d, -1)
        return by_head[:, which].reshape(h * d, *fused.shape[1:])

    def _need(self, name: str) -> str:
        found = self.checkpoint.find(name)
        require(
            found is not None,
            f"{self.checkpoint.name} says it is of the family {self.family.name}, but has no "
            f"tensor {name} among its {len(self.checkpoint.names)}: it is a model without "
            "attention, only a part of one, or its names are others.",
        )
        assert found is not None
        return found

    def _size(self, keys: tuple[str, ...]) -> int:
        config = self.checkpoint.config
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        require(
            isinstance(value, int) and value > 0,
            f"config.json of {self.checkpoint.name} must give {' or '.join(keys)} as a number "
            f"above 0, got {value!r}.",
        )
        assert isinstance(value, int)
        return value


def read_stack(checkpoint: Checkpoint, *, stack: str | None = None) -> StackReader:
    """The reader of a checkpoint: of its first stack, or of the one named."""
    family = family_of(checkpoint)
    names = [one.name for one in family.stacks]
    if stack is None:
        return StackReader(checkpoint, family, family.stacks[0])
    require(
        stack in names,
        f"{checkpoint.name} has no stack {stack!r}: a {family.name} has "
        f"{' and '.join(repr(name) for name in names) if names != [''] else 'only one'}.",
    )
    return StackReader(checkpoint, family, family.stacks[names.index(stack)])


def family_of(checkpoint: Checkpoint) -> Family:
    """The row for a checkpoint; an unknown one says what was found and how to add a row."""
    native = native_family(checkpoint.config)
    if native is not None:
        return native
    kind = attached_to(checkpoint.config) or checkpoint.config.get("model_type")
    if isinstance(kind, str) and kind in INSPECTABLE:
        return INSPECTABLE[kind]
    names = sorted(checkpoint.names)
    require(
        any(_looks_like(name, _ATTENTION) for name in names),
        f"{checkpoint.name} is a model without attention, as far as its names tell (model_type "
        f"{kind!r}, no tensor of {len(names)} is named like queries and keys), so there is no "
        "positional attention to inspect.",
    )
    tables = [name for name in names if _looks_like(name, _POSITION)]
    known = ", ".join(sorted(INSPECTABLE))
    raise ValueError(
        f"{checkpoint.name} is of no known family: its model_type is {kind!r}. Tensors that look "
        f"like positions: {', '.join(tables[:6]) or 'none'}. To add it, write a row with its "
        f"tensors' names in FAMILIES (whence/families.py). Known: {known}."
    )


_ATTENTION = ("attn", "attention", "query", "q_proj", "q_lin")
_POSITION = ("position", "pos_emb", "wpe", "relative", "rel_emb", "rotary")


def _looks_like(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name.lower() for word in words)
