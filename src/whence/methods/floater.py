"""FLOATER (Liu et al., 2020): position vectors that flow along a learned differential equation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, finite, require
from whence.extras import install
from whence.method import PositionMethod
from whence.methods.sinusoidal import Sinusoidal

QUERY, KEY, VALUE = 0, 1, 2


class Floater(PositionMethod):
    """q, k and v += p(interval * pos), dp/dt = h(t, p), h = Linear([relu(Linear([p; t])); t]).

    Each layer has an initial state p(0) for q, k and v (`start`); h is shared by all of them. It is
    solved by Runge-Kutta (order 4, 3/8 rule), `steps` to a position, at once for all positions and
    layers. The sinusoidal input embedding stays. With h = 0 and start = 0 it is a plain
    Transformer, and it begins close to one.

    A stack asks for `layer(i)` and calls `begin(length)`, which solves once for the pass. Whatever
    that did not cover, or covered with other weights or another grad mode, a hook solves itself.
    One `begin` serves one backward: two passes on it need retain_graph, as any graph they share.
    The solver is sequential and reads the device at each step: this method is slow by nature.

        >>> method = Floater(2, 4, n_layers=2).layer(1)
        >>> method.sites(), method.query_heads(torch.zeros(1, 2, 3, 4), torch.arange(3)).shape
        (('heads',), torch.Size([1, 2, 3, 4]))
    """

    paper = "Liu et al. 2020, arXiv:2003.09229"
    formula = "3 * n_layers * width + (width + 2) * hidden + (hidden + 2) * width"
    shared_by_layers = True
    anchored = True

    def __init__(
        self,
        n_heads: int,
        d_head: int,
        n_layers: int = 1,
        *,
        d_model: int | None = None,
        hidden: int | None = None,
        interval: float = 0.01,
        steps: int = 5,
    ) -> None:
        super().__init__()
        at_least(1, n_heads=n_heads, d_head=d_head, n_layers=n_layers, steps=steps)
        finite(interval=interval)
        require(
            interval > 0,
            f"interval, the time from a position to the next, must be above 0, got {interval}.",
        )
        _odeint()
        self.n_heads, self.d_head, self.n_layers = n_heads, d_head, n_layers
        self.interval, self.steps = interval, steps
        self.width = n_heads * d_head
        self.hidden = self.width if hidden is None else hidden
        at_least(1, hidden=self.hidden)
        self.embedding = Sinusoidal(self.width if d_model is None else d_model)
        self.start = nn.Parameter(torch.empty(n_layers, 3, self.width))
        self.inner = nn.Linear(self.width + 1, self.hidden)
        self.outer = nn.Linear(self.hidden + 1, self.width)
        self._solution: _Solution | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small states and a slow flow, so that q, k and v are nearly without position at first."""
        nn.init.normal_(self.start, 0.0, 0.02)
        self.inner.reset_parameters()
        nn.init.normal_(self.outer.weight, 0.0, 0.02)
        nn.init.zeros_(self.outer.bias)

    def layer(self, index: int) -> "FloaterLayer":
        """The view of one layer: its own initial states, everything else shared."""
        return FloaterLayer(self, index)

    def begin(self, length: int) -> None:
        """Solve for positions below `length`; without gradients, go on from where a pass ended."""
        known = self.start[None] if torch.is_grad_enabled() else self._known()
        self._solution = None
        states = self._continued(known, length)
        solution = _Solution.of(states, self._weights())
        if states.requires_grad:

            def forget(_: Tensor) -> None:  # the graph of this solution is spent
                if self._solution is solution:
                    self._solution = None

            states.register_hook(forget)  # type: ignore[no-untyped-call]
        self._solution = solution

    def input_term(self, pos: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n d_model"]:
        """The sinusoidal embedding, as in the plain Transformer."""
        return self.embedding.input_term(pos)

    def query_heads(
        self, q: Float[Tensor, "b h q d"], q_pos: Int[Tensor, "*b q"]
    ) -> Float[Tensor, "b h q d"]:
        """The only layer's queries."""
        return self._only().query_heads(q, q_pos)

    def key_heads(
        self, k: Float[Tensor, "b h k d"], k_pos: Int[Tensor, "*b k"]
    ) -> Float[Tensor, "b h k d"]:
        """The only layer's keys."""
        return self._only().key_heads(k, k_pos)

    def value_heads(
        self, v: Float[Tensor, "b h k d"], k_pos: Int[Tensor, "*b k"]
    ) -> Float[Tensor, "b h k d"]:
        """The only layer's values."""
        return self._only().value_heads(v, k_pos)

    def _only(self) -> "FloaterLayer":
        require(
            self.n_layers == 1,
            f"this Floater has the states of {self.n_layers} layers: layer i uses method.layer(i).",
        )
        return self.layer(0)

    def moved(
        self, x: Float[Tensor, "b h n d"], pos: Int[Tensor, "*b n"], layer: int, part: int
    ) -> Float[Tensor, "b h n d"]:
        """x + p(interval * pos) of one layer and of q, k or v."""
        require(
            x.shape[1] == self.n_heads and x.shape[3] == self.d_head,
            f"Floater was built for {self.n_heads} heads of {self.d_head} in q, k and v, got "
            f"{x.shape[1]} of {x.shape[3]}. It has no flow for grouped heads (fewer for k and v).",
        )
        if pos.numel() == 0:
            return x
        first, last = torch.stack(pos.aminmax()).tolist()
        require(first >= 0, f"Floater starts at position 0, got position {first}.")
        rows = self._continued(self._known(), last + 1)[:, layer, part][pos]
        bias = rows.view(*pos.shape, self.n_heads, self.d_head).transpose(-2, -3)
        return x + bias.to(x.dtype)

    def _known(self) -> Float[Tensor, "m layer 3 width"]:
        """What `begin` left, if it still holds, or the initial states."""
        old = self._solution
        return old.states if old and old.fits(self._weights()) else self.start[None]

    def _continued(
        self, known: Float[Tensor, "m layer 3 width"], length: int
    ) -> Float[Tensor, "n layer 3 width"]:
        """The states at positions below `length`, from the known ones on; float32 or better."""
        done = known.shape[0] - 1
        if length - 1 <= done:
            return known
        dtype = torch.promote_types(self.start.dtype, torch.float32)
        count = torch.arange(done * self.steps, (length - 1) * self.steps + 1, device=known.device)
        grid = count.to(dtype) * (self.interval / self.steps)
        with torch.autocast(known.device.type, enabled=False):
            states = _odeint()(
                _rate(self, dtype),
                known[-1].to(dtype),
                grid[:: self.steps],
                method="rk4",
                options={"grid_constructor": lambda func, y0, t: grid},
            )
        return torch.cat([known.to(dtype), states[1:]])

    def _weights(self) -> tuple[Tensor, ...]:
        """The numbers that the solution depends on; they are read past the layers' forward."""
        require(
            isinstance(self.inner, nn.Linear) and isinstance(self.outer, nn.Linear),
            "floater reads the weights of `inner` and `outer` by themselves, so an adapter around "
            "them would do nothing. Leave them out of it, as with PEFT's "
            "exclude_modules=['inner', 'outer'].",
        )
        return self.start, *self.inner.parameters(), *self.outer.parameters()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_solution": None}  # a graph can be neither copied nor saved


class FloaterLayer(PositionMethod):
    """One layer of a Floater: a view, with no parameters and no input term of its own."""

    whole: Floater
    anchored = True

    def __init__(self, whole: Floater, index: int) -> None:
        super().__init__()
        require(
            0 <= index < whole.n_layers,
            f"this Floater holds the states of layers 0..{whole.n_layers - 1}, got layer {index}. "
            "Build it with a larger n_layers.",
        )
        object.__setattr__(self, "whole", whole)  # not as a submodule: its owner registers it, once
        self.index = index

    def begin(self, length: int) -> None:
        """One solve for all layers."""
        self.whole.begin(length)

    def query_heads(
        self, q: Float[Tensor, "b h q d"], q_pos: Int[Tensor, "*b q"]
    ) -> Float[Tensor, "b h q d"]:
        """q + p_q."""
        return self.whole.moved(q, q_pos, self.index, QUERY)

    def key_heads(
        self, k: Float[Tensor, "b h k d"], k_pos: Int[Tensor, "*b k"]
    ) -> Float[Tensor, "b h k d"]:
        """k + p_k."""
        return self.whole.moved(k, k_pos, self.index, KEY)

    def value_heads(
        self, v: Float[Tensor, "b h k d"], k_pos: Int[Tensor, "*b k"]
    ) -> Float[Tensor, "b h k d"]:
        """v + p_v."""
        return self.whole.moved(v, k_pos, self.index, VALUE)


def _rate(method: Floater, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """h(t, p) as the solver calls it. Linear([p; t]) = W p + (b + t w): time moves the bias."""
    inner, inner_bias = (p.to(dtype) for p in (method.inner.weight, method.inner.bias))
    outer, outer_bias = (p.to(dtype) for p in (method.outer.weight, method.outer.bias))
    # Cut apart here and not in every one of thousands of evaluations.
    inner, inner_time = inner[:, :-1].contiguous(), inner[:, -1]
    outer, outer_time = outer[:, :-1].contiguous(), outer[:, -1]

    def rate(t: Tensor, p: Tensor) -> Tensor:
        x = F.relu(F.linear(p, inner, inner_bias + t * inner_time))
        return F.linear(x, outer, outer_bias + t * outer_time)

    return rate


@dataclass(frozen=True, eq=False)
class _Solution:
    """States at the first positions, and what they were made from."""

    states: Tensor
    weights: tuple[Tensor, ...]
    stamp: tuple[object, ...]
    values: tuple[Tensor, ...]

    @staticmethod
    def of(states: Tensor, weights: tuple[Tensor, ...]) -> "_Solution":
        copies = tuple(p.detach().clone() for p in weights)
        return _Solution(states, weights, _stamp(weights), copies)

    def fits(self, weights: tuple[Tensor, ...]) -> bool:
        """The same weights, unchanged since, in the same grad mode.

        Their version counters alone would not do: a fused optimizer does not move them.
        """
        return (
            all(a is b for a, b in zip(self.weights, weights, strict=True))
            and self.stamp == _stamp(weights)
            and all(torch.equal(a, b) for a, b in zip(self.values, weights, strict=True))
        )


def _stamp(weights: tuple[Tensor, ...]) -> tuple[object, ...]:
    versions = [None if p.is_inference() else p._version for p in weights]
    kinds = [(p.requires_grad, p.dtype, p.device) for p in weights]
    return torch.is_grad_enabled(), *versions, *kinds


def _odeint() -> Callable[..., Tensor]:
    try:
        from torchdiffeq import odeint
    except ImportError:
        raise ImportError(
            f"floater solves a differential equation with torchdiffeq: {install('flow')}."
        ) from None
    solver: Callable[..., Tensor] = odeint
    return solver
