"""Several methods at once: sites merged, lag biases added into one."""

from collections.abc import Iterable
from typing import TypeVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import require
from whence.lag import Bias, LagValues
from whence.method import SITES, Content, PositionMethod
from whence.rotation import Rotation

Term = TypeVar("Term", Tensor, Bias, LagValues)


class Sum(PositionMethod):
    """Every part at its own sites: terms are added, heads pass through the parts in order.

    If a part replaces the logits, the other parts' score terms are added to what it puts there.

        >>> from whence.methods.alibi import Alibi
        >>> from whence.methods.tisa import Tisa
        >>> both = Sum(Tisa(4, kernels=5), Alibi(4))  # or build("tisa:kernels=5+alibi", ...)
        >>> both.sites(), both.n_parameters()
        (('score',), 60)
    """

    def __init__(self, *parts: PositionMethod) -> None:
        super().__init__()
        require(len(parts) > 0, "Sum needs at least one method.")
        self.parts = nn.ModuleList(parts)
        self.fixed_length = any(part.fixed_length for part in parts)
        self.causal_only = any(part.causal_only for part in parts)
        self.anchored = any(part.anchored for part in parts)
        self.grows = any(part.grows for part in parts)
        self.reads_key_inputs = any(part.reads_key_inputs for part in parts)
        # Two parts that change heads do so in order, by their hooks: no rotation stands for both.
        turning = [i for i, part in enumerate(parts) if "heads" in part.sites()]
        self._turning = turning[0] if len(turning) == 1 else None
        self.lengths_only = len(turning) < 2 and all(part.lengths_only for part in parts)

    def _each(self) -> Iterable[PositionMethod]:
        for part in self.parts:
            assert isinstance(part, PositionMethod)
            yield part

    def sites(self) -> tuple[str, ...]:  # type: ignore[override]
        """The sites of all parts: of this instance, not of the class, which could use any."""
        used = {site for part in self._each() for site in part.sites()}
        return tuple(site for site in SITES if site in used)

    def n_parameters_by_formula(self) -> int:
        """The sum of the parts' formulas."""
        return sum(part.n_parameters_by_formula() for part in self._each())

    def begin(self, length: int) -> None:
        """Every part begins."""
        for part in self._each():
            part.begin(length)

    def layer(self, index: int) -> PositionMethod:
        """The sum of the parts' views, or itself where no part's layers differ."""
        views = [part.layer(index) for part in self._each()]
        if all(view is part for view, part in zip(views, self._each(), strict=True)):
            return self
        return Sum(*views)

    def input_term(self, pos: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n d_model"] | None:
        """The sum of the parts' terms."""
        return _added(part.input_term(pos) for part in self._each())

    def query_heads(self, q: Tensor, q_pos: Int[Tensor, "*b q"]) -> Tensor:
        """Through the parts in order."""
        for part in self._each():
            q = part.query_heads(q, q_pos)
        return q

    def key_heads(self, k: Tensor, k_pos: Int[Tensor, "*b k"]) -> Tensor:
        """Through the parts in order."""
        for part in self._each():
            k = part.key_heads(k, k_pos)
        return k

    def rotation(self) -> Rotation | None:
        """That of the only part that changes heads, or None."""
        if self._turning is None:
            return None
        part = self.parts[self._turning]
        assert isinstance(part, PositionMethod)
        return part.rotation()

    def value_heads(self, v: Tensor, k_pos: Int[Tensor, "*b k"]) -> Tensor:
        """Through the parts in order."""
        for part in self._each():
            v = part.value_heads(v, k_pos)
        return v

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> Bias | None:
        """The sum of the parts' terms, of which some may get the counted positions of `content`."""
        counted = None if content is None else content.counted
        terms = []
        for part in self._each():
            given = counted if counted is not None and part.lengths_only else (q_pos, k_pos)
            terms.append(part.score_term(q, *given, content=content))
        return _added(terms)

    def value_term(self, q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"]) -> LagValues | None:
        """The sum of the parts' tables."""
        return _added(part.value_term(q_pos, k_pos) for part in self._each())

    def logits(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> Bias | None:
        """What the replacing parts put there and the others add, or None if no part replaces."""
        replaced = _added(part.logits(q, q_pos, k_pos, content=content) for part in self._each())
        if replaced is None:
            return None
        return _added([replaced, self.score_term(q, q_pos, k_pos, content=content)])


def _added(terms: "Iterable[Term | None]") -> "Term | None":
    total: Term | None = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total
