"""A model with one method, its optimizer and a step: what lm_cost.py and lm_at_once.py train.

A contender's name is a method, or one of

    nope, FlashAttention                    no position, attention by FlashAttention-2
    shaw:clip=16, the article's algorithm   Shaw with the article's tensors of n x n x d

and may end in a mode: ", compiled" is torch.compile, ", graphed" is torch.compile with CUDA graphs
(mode="reduce-overhead"), which the host launches as a whole. Without one it is eager.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from whence.bench.shaw_article import article_attention
from whence.models import WhenceConfig, WhenceForCausalLM

VOCABULARY = 16_384
TISA, SHAW = "tisa:kernels=5", "shaw:clip=16"
BASELINE, ARTICLE = "nope, FlashAttention", f"{SHAW}, the article's algorithm"
EAGER, COMPILED, GRAPHED = "eager", "compiled", "graphed"
COMPILERS = {COMPILED: None, GRAPHED: "reduce-overhead"}  # the mode of torch.compile


def named(name: str, mode: str) -> str:
    """A contender's name in a mode."""
    return name if mode == EAGER else f"{name}, {mode}"


def taken_apart(name: str) -> tuple[str, str]:
    """A contender's name without its mode, and the mode."""
    plain, _, mode = name.rpartition(", ")
    return (plain, mode) if mode in COMPILERS else (name, EAGER)


@contextlib.contextmanager
def by_the_article() -> Iterator[None]:
    """Attention of the models computed as the article says, with its O(n^2 d) tensors."""

    def attention(method: Any, q: Any, k: Any, v: Any, *, causal: bool, **rest: Any) -> Any:
        return article_attention(
            q,
            k,
            v,
            key_table=method.key_table[0].to(q.dtype),
            value_table=method.value_table[0].to(q.dtype),
            left=method.left,
            right=method.right,
            causal=causal,
        )

    with mock.patch("whence.models.attention.positioned_attention", attention):
        yield


class Contender:
    """A model in training, by its name; `shape` is the model's, n its longest sequence."""

    def __init__(self, name: str, shape: dict[str, int], n: int, device: str) -> None:
        torch.manual_seed(0)
        plain, self.mode = taken_apart(name)
        self.article, self.device = plain == ARTICLE, device
        self.flash = plain == BASELINE and device == "cuda"
        options = WhenceConfig(
            position={BASELINE: "nope", ARTICLE: SHAW}.get(plain, plain),
            vocab_size=VOCABULARY,
            max_position_embeddings=n,
            backend="sdpa" if plain == BASELINE else "auto",
            use_cache=False,
            **shape,
        )
        with torch.device(device):  # a third of a second less than to build it on the host
            self.model: Any = WhenceForCausalLM(options).to(device).train()
        fused = {"fused": True} if device == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **fused)
        self.run: Any = self.model
        if self.mode != EAGER:
            self.run = torch.compile(self.model, mode=COMPILERS[self.mode])

    def step(self, ids: torch.Tensor) -> None:
        """Forward, backward, update."""
        around: AbstractContextManager[Any] = contextlib.nullcontext()
        if self.article:
            around = by_the_article()
        elif self.flash:
            around = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        if self.mode == GRAPHED:
            torch.compiler.cudagraph_mark_step_begin()  # the last step's tensors may go
        with around, torch.autocast(self.device, torch.bfloat16):
            loss = self.run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def counts(self) -> dict[str, int]:
        """Parameters, and those of them that are the method's."""
        own = self.model.model.stack.position.parameters()
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "positional": sum(p.numel() for p in own),
        }


def random_ids(n: int, tokens: int, device: str) -> torch.Tensor:
    return torch.randint(VOCABULARY, (max(tokens // n, 1), n), device=device)
