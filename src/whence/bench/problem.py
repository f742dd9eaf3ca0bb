"""The inputs of one measured attention, the method it is with, and one step of it."""

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from whence.bench.point import DTYPES, Point
from whence.checks import require
from whence.kernels.call import AttentionCall
from whence.methods import build
from whence.nn.positioned import positioned_call


class Problem:
    """q, k, v, the layer's input x, the gradient of the output, and a method as it starts out.

    The method's parameters are float32 (float64 for float64 inputs), as in mixed precision.
    """

    def __init__(self, point: Point) -> None:
        device, dtype = torch.device(point.device), DTYPES[point.dtype]
        torch.manual_seed(0)
        self.method = build(
            point.method,
            n_heads=point.n_heads,
            d_head=point.d_head,
            max_length=point.n,
            causal=point.causal,
        ).to(device, torch.promote_types(dtype, torch.float32))
        require(
            point.causal or point.mode == "decode" or not self.method.causal_only,
            f"{point.method} is for causal attention only: give --causal.",
        )
        generator = torch.Generator(device).manual_seed(point.n)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        b, h, d = point.batch, point.n_heads, point.d_head
        self.q = random(b, h, point.n_q, d)
        self.k, self.v = random(b, h, point.n, d), random(b, h, point.n, d)
        self.d_out = random(b, h, point.n_q, d)
        self.x = random(b, point.n, h * d)
        self.x_q = self.x[:, -point.n_q :]  # here: cutting it is no part of the attention
        self.point = point
        self.causal, self.learns = point.causal, point.mode == "both"
        if self.learns:
            for part in (self.q, self.k, self.v):
                part.requires_grad_()

    def double(self) -> "Problem":
        """The same numbers in float64."""
        other = copy.copy(self)
        other.method = copy.deepcopy(self.method).double()
        other.__dict__.pop("leaves", None)  # those of this problem
        for name in ("q", "k", "v", "d_out", "x"):
            setattr(other, name, getattr(self, name).detach().double())
        other.x_q = other.x[:, -self.point.n_q :]
        if self.learns:
            for part in (other.q, other.k, other.v):
                part.requires_grad_()
        return other

    @functools.cached_property
    def leaves(self) -> dict[str, Tensor]:
        """What has a gradient, by name; looked up once, for it is no part of the attention."""
        return {"q": self.q, "k": self.k, "v": self.v} | dict(self.method.named_parameters())

    def call(self) -> AttentionCall:
        """The attention, described and not computed: what the peers are given."""
        return positioned_call(
            self.method,
            self.q,
            self.k,
            self.v,
            x_q=self.x_q,
            x_k=self.x,
            causal=self.causal,
        )

    def run(
        self, attention: "Attention", *, d_out: Tensor | None = None, select: "Select | None" = None
    ) -> dict[str, Tensor]:
        """One step: the output and every gradient by name.

        Parameters that the attention does not depend on are left out. `select` picks the rows that
        the output is compared on; it takes part in no measured step.
        """
        self.method.begin(self.point.n)
        if not self.learns:
            with torch.no_grad():
                out = attention(self)
            return {"out": out if select is None else select(out)}
        out = attention(self)
        named = self.leaves
        grads = torch.autograd.grad(
            out, list(named.values()), self.d_out if d_out is None else d_out, allow_unused=True
        )
        found = {name: g for name, g in zip(named, grads, strict=True) if g is not None}
        if select is not None:
            found |= {name: select(found[name]) for name in "qkv" if name in found}
            out = select(out)
        return {"out": out.detach()} | found


Attention = Callable[[Problem], Tensor]
Select = Callable[[Tensor], Tensor]
