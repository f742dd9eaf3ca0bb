"""What every method of METHODS must do, by iteration: a new one is tested by being registered."""

from collections.abc import Iterator

import pytest
import torch

from battery import D_HEAD, HEADS, LENGTH, SHAPES, Layer, inputs, leaves, score, small
from whence import METHODS, LagBias, Line, PositionMethod, build, explain
from whence.bench import flex_peer
from whence.method import Content
from whence.methods import Sum
from whence.methods.tisa import Tisa

EVERY = sorted(METHODS)

# What the papers say. The law below is checked both ways: these do not move, all others do.
MOVES_WITH_THE_ORIGIN = {
    "sinusoidal",
    "learned",
    "floater",
    "synthesizer",
    "tupe",
    "fire",
    "tisa2d",
    "table2d",
}


@pytest.fixture(params=EVERY)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_number_of_parameters_is_what_the_formula_says(name: str) -> None:
    for n_heads, d_head, length in [(HEADS, D_HEAD, LENGTH), (4, 8, 16)]:
        causal = METHODS[name].causal_only
        method = build(name, n_heads=n_heads, d_head=d_head, max_length=length, causal=causal)
        assert method.n_parameters() == method.n_parameters_by_formula()


def test_it_says_where_it_acts_and_who_published_it(name: str) -> None:
    assert METHODS[name].paper
    assert METHODS[name].sites() or name == "nope"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sdpa_equals_the_definition_in_output_and_gradients(
    name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "whence.kernels.blocks.plan.MOST_ROWS", 4
    )  # so that small inputs take several blocks
    monkeypatch.setattr("whence.kernels.blocks.plan.MOST_LOGITS", 1)
    monkeypatch.setattr("whence.kernels.blocks.plan.MOST_KEPT_WEIGHTS", 0)
    monkeypatch.setattr("whence.kernels.blocks.plan.FEWEST_FAR_KEYS", 2)
    n_q, n_k = shape
    layer, x = Layer(small(name)), inputs(n_k).requires_grad_()
    wanted = layer(x, n_q, backend="reference")
    found = layer(x, n_q, backend="sdpa")
    torch.testing.assert_close(found, wanted)
    weight = torch.randn_like(wanted)
    targets = [x, *layer.parameters()]
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), targets, allow_unused=True),
        torch.autograd.grad((wanted * weight).sum(), targets, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(
            torch.zeros(()) if a is None else a.to(torch.float64),
            torch.zeros(()) if b is None else b.to(torch.float64),
            check_dtype=False,
        )


@pytest.mark.compiled
@pytest.mark.parametrize("shape", [(7, 7), (1, 9), (5, 13)], ids=str)
def test_the_flex_peer_equals_the_definition_or_says_why_it_does_not_run(
    name: str, shape: tuple[int, int]
) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    layer, x = Layer(small(name)), inputs(shape[1])
    with torch.no_grad():
        call = layer.call(x, shape[0])
        reason = flex_peer.refuse(call)
        if reason is not None:
            assert reason.endswith(".")
            return
        found = flex_peer.flex_attend(call, flex_attention, flex_peer.block_mask(call))
        torch.testing.assert_close(found, layer(x, shape[0], backend="reference"))


def test_masks_windows_and_grouped_heads_change_no_backend(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whence.kernels.blocks.plan.MOST_ROWS", 4)
    monkeypatch.setattr("whence.kernels.blocks.plan.MOST_LOGITS", 1)
    monkeypatch.setattr("whence.kernels.blocks.plan.MOST_KEPT_WEIGHTS", 0)
    x = inputs(13)
    mask = torch.rand(2, 13) > 0.3
    for options in [
        {"mask": mask},
        {"causal": True},
        {"window": 3},
        {"mask": mask, "causal": True},
    ]:
        layer = Layer(small(name))
        torch.testing.assert_close(
            layer(x, 11, backend="sdpa", **options), layer(x, 11, backend="reference", **options)
        )
    grouped = Layer(small(name), kv_heads=1)
    try:
        wanted = grouped(x, 11, backend="reference")
    except ValueError as refusal:
        assert "heads" in str(refusal)
    else:
        torch.testing.assert_close(grouped(x, 11, backend="sdpa"), wanted)


def test_gradients_are_right_in_float64(name: str) -> None:
    layer, x = Layer(small(name)), inputs(5, batch=1).requires_grad_()
    parameters = [p for p in layer.parameters() if p.requires_grad]
    names = [n for n, p in layer.named_parameters() if p.requires_grad]

    for backend in ("reference", "sdpa"):

        def run(x: torch.Tensor, *values: torch.Tensor, backend: str = backend) -> torch.Tensor:
            changed = dict(zip(names, values, strict=True))
            return torch.func.functional_call(layer, changed, (x, 3), {"backend": backend})

        assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


def test_causal_gradients_are_right_in_float64(name: str) -> None:
    layer, x = Layer(small(name)), inputs(5, batch=1).requires_grad_()
    for backend in ("reference", "sdpa"):
        assert torch.autograd.gradcheck(
            lambda x, backend=backend: layer(x, 5, causal=True, backend=backend),
            (x,),
            fast_mode=True,
        )


def test_the_last_rows_of_a_cache_are_the_last_rows_of_the_whole(name: str) -> None:
    layer, x = Layer(small(name)), inputs(11)
    whole = layer(x, 11)
    for n_q in (1, 4):
        torch.testing.assert_close(layer(x, n_q), whole[:, :, 11 - n_q :])


def test_rows_of_its_bias_are_rows_of_the_whole_bias(name: str) -> None:
    bias = score(small(name), 9, 9)
    if bias is None:
        pytest.skip("this method has no score term")
    pos = torch.arange(9)
    whole = bias.to_dense(pos, pos)
    torch.testing.assert_close(bias.rows(3, 7).to_dense(pos[3:7], pos), whole[:, :, 3:7])


def test_what_its_extent_skips_is_exactly_its_tail(name: str) -> None:
    bias = score(small(name), 19, 19)
    for part in leaves(bias) if bias is not None else ():
        if isinstance(part, LagBias) and part.extent is not None:
            lag = torch.arange(-30, 31)
            assert torch.equal(part.trimmed().at(lag), part.at(lag))


def test_a_shift_of_all_positions_changes_nothing_where_the_paper_says_so(name: str) -> None:
    method = small(name)
    layer, x = Layer(method), inputs(9)
    shift = LENGTH - 9 if method.fixed_length else 1001  # beyond FIRE's threshold
    shift = 101 if name == "floater" else shift  # it is solved from 0 on, step by step
    here = layer(x, 9)
    there = layer(x, 9, start=shift)
    if name in MOVES_WITH_THE_ORIGIN:
        assert (here - there).abs().max() > 1e-6
    else:
        torch.testing.assert_close(there, here)


def test_order_matters_to_it(name: str) -> None:
    """Without position attention is a set function; with it, moving a token changes the others."""
    layer, x = Layer(small(name)), inputs(9)
    swapped = x[:, [0, 1, 5, 3, 4, 2, 6, 7, 8]]
    change = (layer(x, 9)[:, :, 8] - layer(swapped, 9)[:, :, 8]).abs().max()
    assert (change > 1e-6) == (name != "nope")


def test_uninitialised_memory_never_shows(name: str) -> None:
    layer, x = Layer(small(name)), inputs(13).requires_grad_()
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # with this on, torch.empty is filled with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        for backend in ("reference", "sdpa"):
            out = layer(x, 11, backend=backend)
            out.sum().backward()
            assert torch.isfinite(out).all()
            assert x.grad is not None
            assert torch.isfinite(x.grad).all()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def test_a_row_that_sees_nothing_is_zero_with_finite_gradients(name: str) -> None:
    layer, x = Layer(small(name)), inputs(7).requires_grad_()
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1] = False
    for backend in ("reference", "sdpa"):
        out = layer(x, 7, mask=mask, backend=backend)
        torch.testing.assert_close(out[1], torch.zeros_like(out[1]))
        out.sum().backward()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()


def test_it_keeps_the_dtype_of_its_input(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = Layer(small(name, dtype))
        assert layer(inputs(7, dtype=dtype), 7, backend="sdpa").dtype == dtype


def test_half_precision_parameters_do_not_blur_distant_lags(name: str) -> None:
    """bfloat16 cannot tell lag 257 from 256: the bias must be that of the same numbers, exactly."""
    half = small(name, torch.bfloat16)
    if half.fixed_length:
        pytest.skip("this method has no distant lags")
    bias = score(half, 1, 600)
    if not isinstance(bias, LagBias) or bias.band.shape[0] > 1:
        pytest.skip("this method has no lag bias, or one that depends on content")
    pos = torch.arange(600)
    found = bias.to_dense(pos[-1:], pos)
    wanted = score(half.double(), 1, 600)
    assert wanted is not None
    torch.testing.assert_close(found.double(), wanted.to_dense(pos[-1:], pos), rtol=1e-4, atol=1e-4)


def test_state_dict_round_trip_and_a_length_it_was_not_built_for(name: str) -> None:
    method = small(name)
    twin = small(name)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(method.state_dict())
    x = inputs(9)
    torch.testing.assert_close(Layer(twin)(x, 9), Layer(method)(x, 9))
    longer = inputs(2 * LENGTH, batch=1)
    if method.fixed_length:
        with pytest.raises(ValueError, match=str(LENGTH)):
            Layer(method)(longer, 2 * LENGTH)
    else:
        assert torch.isfinite(Layer(method)(longer, 2 * LENGTH)).all()


def test_nan_in_a_parameter_is_not_hidden_and_validate_names_it(name: str) -> None:
    method = small(name)
    parameters = list(method.named_parameters())
    method.validate()
    if not parameters:
        pytest.skip("this method has no parameters")
    with torch.no_grad():
        parameters[0][1].fill_(torch.nan)
    with pytest.raises(ValueError, match="holds NaN"):
        method.validate()
    assert Layer(method)(inputs(5), 5, backend="sdpa").isnan().any()


def test_explain_says_which_terms_are_dense(name: str) -> None:
    bias = score(small(name), 9, 9)
    q = torch.randn(2, HEADS, 9, D_HEAD, dtype=torch.float64)
    found = explain(q, q, q, bias=bias)
    assert found.chosen == "sdpa"
    dense = [] if bias is None else bias.terms().dense
    assert len(found.dense) == len(dense)
    assert all(term.why in str(found) for term in dense)


class Throwaway(PositionMethod):
    """A method that exists in this test alone: one class, one line in METHODS."""

    paper = "nobody"
    formula = "n_heads"

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.gain = torch.nn.Parameter(torch.ones(n_heads))

    def score_term(self, q, q_pos, k_pos, *, content=None):  # type: ignore[no-untyped-def]
        return LagBias.from_function(
            lambda lag: self.gain[:, None] * lag, 3, left=Line(), right=Line()
        )


@pytest.fixture
def throwaway() -> Iterator[str]:
    METHODS["throwaway"] = Throwaway
    yield "throwaway"
    del METHODS["throwaway"]


def test_a_method_added_to_METHODS_is_picked_up_with_no_other_edit(  # noqa: N802
    throwaway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_the_number_of_parameters_is_what_the_formula_says(throwaway)
    test_sdpa_equals_the_definition_in_output_and_gradients(throwaway, (7, 7), monkeypatch)
    test_gradients_are_right_in_float64(throwaway)
    test_a_shift_of_all_positions_changes_nothing_where_the_paper_says_so(throwaway)
    test_order_matters_to_it(throwaway)
    assert build("throwaway+tisa", n_heads=2, d_head=4).sites() == ("score",)


def test_the_battery_fails_a_method_that_is_wrong(throwaway: str) -> None:
    """A broken copy, so that we know these tests can fail."""

    class Broken(Throwaway):
        def score_term(self, q, q_pos, k_pos, *, content=None):  # type: ignore[no-untyped-def]
            shift = q_pos[:1].to(q.dtype)  # depends on the origin
            return LagBias((shift * self.gain)[None, :, None, None], Line(), Line())

    METHODS["throwaway"] = Broken
    with pytest.raises(AssertionError):
        test_a_shift_of_all_positions_changes_nothing_where_the_paper_says_so(throwaway)
    with pytest.raises(AssertionError):
        test_the_last_rows_of_a_cache_are_the_last_rows_of_the_whole(throwaway)


def test_any_two_methods_work_together() -> None:
    x = inputs(9)
    for name in EVERY:
        torch.manual_seed(4)
        parts = [small(name), small("tisa")]
        both = Sum(*parts)
        assert set(both.sites()) == set(parts[0].sites()) | {"score"}
        layer = Layer(both)
        layer.causal = METHODS[name].causal_only
        torch.testing.assert_close(layer(x, 9, backend="sdpa"), layer(x, 9, backend="reference"))


def test_lag_biases_of_a_sum_are_added_into_one() -> None:
    both = build("tisa+alibi+t5", n_heads=HEADS, d_head=D_HEAD).double()
    bias = score(both, 9, 9)
    assert isinstance(bias, LagBias)
    pos = torch.arange(9)
    alone = [score(build(n, n_heads=HEADS, d_head=D_HEAD).double(), 9, 9) for n in ("alibi",)]
    assert alone[0] is not None
    parts = [p for p in both.parts if isinstance(p, Tisa)]
    assert len(parts) == 1
    total = sum(
        part.score_term(torch.zeros(1, HEADS, 9, D_HEAD, dtype=torch.float64), pos, pos).to_dense(
            pos, pos
        )
        for part in both.parts
    )
    torch.testing.assert_close(bias.to_dense(pos, pos), total)


def test_lengths_only_is_said_of_methods_whose_hooks_of_attention_never_read_a_position(
    name: str,
) -> None:
    method = small(name)
    if not method.lengths_only:
        return
    q, x = torch.randn(2, HEADS, 5, D_HEAD), torch.randn(2, LENGTH, HEADS * D_HEAD)
    content = Content(x_q=x[:, -5:], x_k=x, k=torch.randn(2, HEADS, LENGTH, D_HEAD))
    real, bare = ([torch.arange(n).to(to) for n in (5, LENGTH)] for to in ("cpu", "meta"))
    q_pos, k_pos = torch.arange(LENGTH - 5, LENGTH), torch.arange(LENGTH)
    terms = [method.score_term(q, *positions, content=content) for positions in (real, bare)]
    tables = [method.value_term(*positions) for positions in (real, bare)]
    if terms[0] is not None and terms[1] is not None:
        dense = [term.to_dense(q_pos, k_pos) for term in terms if term is not None]
        assert torch.equal(dense[0], dense[1])
    if tables[0] is not None and tables[1] is not None:
        assert torch.equal(tables[0].table, tables[1].table)
    assert (terms[0] is None) == (terms[1] is None)
    assert (tables[0] is None) == (tables[1] is None)
    assert method.logits(q, *bare, content=content) is None
    if method.rotation() is None:
        for hook in (method.query_heads, method.key_heads):
            assert torch.equal(hook(q, bare[0]), hook(q, real[0]))
    assert torch.equal(method.value_heads(q, bare[0]), method.value_heads(q, real[0]))


def test_a_sum_has_lengths_only_if_all_its_parts_have() -> None:
    assert Sum(small("tisa"), small("alibi")).lengths_only
    assert not Sum(small("tisa"), small("xpos")).lengths_only
    assert Sum(small("tisa"), small("rope")).lengths_only


def test_a_sum_of_two_methods_that_change_heads_reads_positions() -> None:
    assert not Sum(small("rope"), small("rope")).lengths_only


def test_a_rotation_does_what_the_hooks_of_heads_do(name: str) -> None:
    method = small(name)
    rotation = method.rotation()
    if rotation is None:
        return
    q, pos = torch.randn(2, HEADS, 5, D_HEAD, dtype=torch.float64), torch.arange(LENGTH - 5, LENGTH)
    for hook in (method.query_heads, method.key_heads):
        torch.testing.assert_close(rotation.turned(q, pos), hook(q, pos), rtol=0, atol=0)
