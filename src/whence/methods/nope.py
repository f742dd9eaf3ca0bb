"""NoPE: no positional information at all, the baseline every method is measured against."""

from whence.method import PositionMethod


class Nope(PositionMethod):
    """Nothing is added anywhere. A causal model still sees position, through the mask.

    >>> Nope().sites(), Nope().n_parameters()
    ((), 0)
    """

    paper = "Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466"
    lengths_only = True
