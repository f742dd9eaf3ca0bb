"""The attention layers that are measured against each other, each one forward and backward.

In the group "tisa" all but `plain` compute softmax(q k^T / sqrt(d) + F_P) v with TISA's F_P, in the
group "shaw" both compute the article's attention with keys and values. A step gives the output and
the gradients of q, k, v and of the method's parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from article_shaw import article_attention
from whence import build
from whence.method import PositionMethod
from whence.methods.shaw import Shaw
from whence.methods.tisa import Tisa
from whence.nn import positioned_attention

Attention = Callable[[PositionMethod, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """What all contenders share: one bidirectional layer."""

    batch: int = 1
    n_heads: int = 12
    d_head: int = 64
    kernels: int = 5
    clip: int = 16
    threads: int = 2

    def method(self, group: str) -> PositionMethod:
        """TISA or Shaw, as it starts out before training."""
        spec = {"tisa": f"tisa:kernels={self.kernels}", "shaw": f"shaw:clip={self.clip}"}[group]
        return build(spec, n_heads=self.n_heads, d_head=self.d_head)


def lookup(position: PositionMethod, n: int) -> Float[Tensor, "h n n"]:
    """F_P, looked up from the 2n - 1 values of the curve.

    Of four ways (indexing, index_select, gather, unfold and flip) this one's forward and backward
    together took the least time.
    """
    assert isinstance(position, Tisa)
    curve = position.curve(torch.arange(1 - n, n))
    place = torch.arange(n)
    row = place - place[:, None] + n - 1
    return curve.index_select(1, row.flatten()).view(-1, n, n)


def whence(position: PositionMethod, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Ours: whatever backend `attend` picks."""
    return positioned_attention(position, q, k, v)


def eager(position: PositionMethod, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The n x n way, as the formula reads; q is scaled, not the logits, to save a pass."""
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + lookup(position, q.shape[2])
    return torch.softmax(logits, dim=-1) @ v


def sdpa_dense(position: PositionMethod, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention with the dense bias as its mask."""
    bias = lookup(position, q.shape[2])[None]
    return scaled_dot_product_attention(q, k, v, attn_mask=bias)


def plain(position: PositionMethod, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention without any position: the limit."""
    return scaled_dot_product_attention(q, k, v)


def article(position: PositionMethod, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The article's O(n^2 d) algorithm."""
    assert isinstance(position, Shaw)
    assert position.key_table is not None
    assert position.value_table is not None
    return article_attention(
        q,
        k,
        v,
        key_table=position.key_table[0],
        value_table=position.value_table[0],
        left=position.left,
        right=position.right,
    )


GROUPS: dict[str, dict[str, Attention]] = {
    "tisa": {"whence": whence, "eager": eager, "sdpa_dense": sdpa_dense, "plain": plain},
    "shaw": {"whence": whence, "article": article},
}


class Step:
    """One forward and backward of a contender; the inputs stand ready and are not part of it."""

    def __init__(
        self, setting: Setting, group: str, n: int, *, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(n)
        shape = (4, setting.batch, setting.n_heads, n, setting.d_head)
        q, k, v, self.d_out = torch.randn(shape, generator=generator, dtype=dtype).unbind()
        self.inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(0)
        self.group, self.method = group, setting.method(group).to(dtype)

    def run(self, contender: str) -> dict[str, Tensor]:
        """The output and every gradient by name; parameters without a gradient are left out."""
        out = GROUPS[self.group][contender](self.method, *self.inputs)
        named = dict(zip("qkv", self.inputs, strict=True)) | dict(self.method.named_parameters())
        grads = torch.autograd.grad(out, list(named.values()), self.d_out, allow_unused=True)
        found = {name: g for name, g in zip(named, grads, strict=True) if g is not None}
        return {"out": out.detach()} | found


def check_exactness(setting: Setting, lengths: tuple[int, ...] = (256, 1000)) -> dict[str, float]:
    """Every contender against the plainest of its group in float64; raises AssertionError.

    Gives the largest difference as a share of the largest entry. The longer length has keys beyond
    the reach of the bias, which take another path than the near ones.
    """
    worst: dict[str, float] = {}
    for group, contenders, yardstick in (
        ("tisa", ("whence", "sdpa_dense"), "eager"),
        ("shaw", ("whence",), "article"),
    ):
        for n in lengths:
            step = Step(setting, group, n, dtype=torch.float64)
            expected = step.run(yardstick)
            for contender in contenders:
                found = step.run(contender)
                for name, want in expected.items():
                    close_to(found[name], want, f"{group} {contender}, n={n}, {name}")
                    error = ((found[name] - want).abs().max() / want.abs().max()).item()
                    key = f"{group} {contender}"
                    worst[key] = max(worst.get(key, 0.0), error)
    return worst


def close_to(found: Tensor, want: Tensor, what: str) -> None:
    torch.testing.assert_close(
        found, want, rtol=1e-9, atol=1e-11, msg=lambda text: f"not exact: {what}: {text}"
    )
