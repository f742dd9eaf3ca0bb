"""Learned absolute embeddings (BERT, GPT-2): one trained vector a position, added to the input."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least
from whence.method import PositionMethod
from whence.methods.fixed_length import within


class Learned(PositionMethod):
    """p = table[pos + offset], max_length positions and none beyond.

    RoBERTa and OPT have offset=2: their first two rows are not positions, and their "514" or "2050"
    is max_length + offset.

        >>> method = Learned(8, 16)
        >>> method.input_term(torch.arange(16)).shape, method.fixed_length
        (torch.Size([16, 8]), True)
    """

    paper = "Gehring et al. 2017, arXiv:1705.03122; Devlin et al. 2019, arXiv:1810.04805"
    formula = "(max_length + offset) * d_model"
    lengths_only = True  # attention calls none of its hooks

    def __init__(self, d_model: int, max_length: int, *, offset: int = 0) -> None:
        super().__init__()
        at_least(1, d_model=d_model, max_length=max_length)
        at_least(0, offset=offset)
        self.d_model, self.max_length, self.offset = d_model, max_length, offset
        self.fixed_length = True
        self.table = nn.Parameter(torch.empty(max_length + offset, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02), as BERT and GPT-2."""
        nn.init.normal_(self.table, 0.0, 0.02)

    def input_term(self, pos: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n {self.d_model}"]:
        """The rows of these positions. Off the CPU only their number is checked, without a wait."""
        within(self.max_length, "Learned", pos)
        return F.embedding(pos + self.offset, self.table)
