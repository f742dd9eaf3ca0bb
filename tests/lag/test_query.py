"""A bias that is a product of queries and a table is any lag bias, but not before one looks."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from whence import LagBias, attend, explain
from whence.lag import QueryBias, deferred

POS = torch.arange(6)


def factors(*, per_head: bool = False, reach: int = 2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(2, 3, 6, 4, dtype=torch.float64, requires_grad=True)
    table = torch.randn(3 if per_head else 1, 2 * reach + 1, 4, dtype=torch.float64)
    return q, table.requires_grad_()


def by_definition(q: Tensor, table: Tensor, scale: float) -> Tensor:
    """scale * q_i . table[clip(j - i)] for every pair."""
    reach = table.shape[1] // 2
    vectors = table[:, (POS - POS[:, None]).clamp(-reach, reach) + reach]
    return scale * torch.einsum("bhqd,hqkd->bhqk", q, vectors.expand(3, -1, -1, -1))


@pytest.fixture
def unmade(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Tensor) -> Tensor:
        raise AssertionError("somebody made the band")

    monkeypatch.setattr(deferred, "_product", refuse)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("reach", [0, 2, 9])
def test_its_matrix_and_gradients_are_those_of_the_definition(per_head: bool, reach: int) -> None:
    q, table = factors(per_head=per_head, reach=reach)
    found = QueryBias(q, table, scale=0.3).to_dense(POS, POS)
    wanted = by_definition(q, table, 0.3)
    torch.testing.assert_close(found, wanted)
    weight = torch.randn_like(wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, (q, table), weight),
        torch.autograd.grad(wanted, (q, table), weight),
    )


def test_every_operation_of_a_lag_bias_is_that_of_the_clipped_product() -> None:
    q, table = factors()
    lazy = QueryBias(q, table, scale=0.5)
    made = LagBias.clipped(q @ (table * 0.5).transpose(-1, -2))
    slope = LagBias.line(torch.tensor([-0.5, -0.25, -0.125], dtype=torch.float64))
    lags = torch.arange(-4, 5)
    torch.testing.assert_close(lazy.at(lags), made.at(lags))
    for change in (
        lambda bias: bias.rows(1, 4),
        lambda bias: bias.to(torch.float32),
        lambda bias: bias.widen(5),
        lambda bias: bias.narrow(1),
        lambda bias: bias.trimmed(),
        lambda bias: bias.plus(slope),
        lambda bias: slope.plus(bias),
        lambda bias: bias + bias,
    ):
        found, wanted = change(lazy), change(made)
        pos = POS[1:4] if wanted.shape[2] == 3 else POS
        torch.testing.assert_close(found.to_dense(pos, POS), wanted.to_dense(pos, POS))
        assert (found.shape, found.dtype, found.reach) == (wanted.shape, wanted.dtype, wanted.reach)
        assert (found.endless, found.sloped) == (wanted.endless, wanted.sloped)


def test_a_product_by_pieces_of_rows_is_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "PIECE", 2)
    q, table = factors(per_head=True)
    torch.testing.assert_close(QueryBias(q, table).band, q @ table.transpose(-1, -2))


@pytest.mark.usefixtures("unmade")
def test_shape_reach_rows_and_kind_of_tails_do_not_make_it() -> None:
    bias = QueryBias(*factors())
    assert (bias.shape, bias.reach, bias.dtype) == ((2, 3, 6, 5), 2, torch.float64)
    assert (bias.endless, bias.sloped, bias.ends, bias.extent) == (True, False, True, None)
    assert bias.rows(1, 4).shape == (2, 3, 3, 5)
    bias.check(-1000, 1000)
    q, table = bias.tensors()
    assert "runs" in str(explain(q, q, q, bias=QueryBias(q, table)))
    with pytest.raises(AssertionError, match="made the band"):
        _ = bias.band


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_a_look_without_gradients_takes_none_away_from_those_who_look_later(
    context: type[torch.no_grad],
) -> None:
    q, table = factors()
    bias = QueryBias(q, table)
    with context():
        first = bias.band
    out = attend(q, q, q, bias=bias, backend="sdpa")
    torch.testing.assert_close(first, bias.band)
    assert torch.autograd.grad(out.sum(), table)[0].abs().sum() > 0


def test_a_table_for_other_heads_or_an_even_one_is_refused() -> None:
    q, _ = factors()
    with pytest.raises(ValueError, match=r"table \[1 or 3, lag, 4\] .* got shape \(2, 5, 4\)"):
        QueryBias(q, torch.zeros(2, 5, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"odd lag axis .* got shape \(1, 4, 4\)"):
        QueryBias(q, torch.zeros(1, 4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"got shape \(1, 5, 6\)"):
        QueryBias(torch.zeros(1, 3, 6, 4), torch.zeros(1, 5, 6))
