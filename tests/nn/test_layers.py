"""whence.nn against torch.nn with the same weights, and every method inside its layers."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softmax
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import whence.nn
from shaking import shake
from whence import METHODS, PositionMethod, Sum, build
from whence.methods import build_layers
from whence.nn import (
    MultiheadAttention,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from whence.nn.masks import from_torch

B, Q, K, H, D = 2, 5, 7, 3, 12
NEVER = float("-inf")


def pair(*, dtype: torch.dtype = torch.float64, **options: object) -> tuple[nn.Module, nn.Module]:
    """torch's attention with random weights, biases too, and ours with the same ones loaded."""
    theirs = nn.MultiheadAttention(D, H, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    ours = MultiheadAttention(D, H, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def tokens(n: int, *, batch_first: bool = False, width: int = D) -> Tensor:
    x = torch.randn(B, n, width, dtype=torch.float64)
    return x if batch_first else x.transpose(0, 1)


def assert_same(theirs: nn.Module, ours: nn.Module, *inputs: Tensor, **call: object) -> None:
    """Equal outputs, weights and gradients of inputs and parameters."""
    results = []
    for module in (theirs, ours):
        x = [leaf.clone().requires_grad_() for leaf in inputs]
        module.zero_grad()
        out, weights = module(*x, **call)
        total = out.sin().sum() + (0 if weights is None else weights.square().sum())
        total.backward()
        grads = {name: p.grad for name, p in module.named_parameters()}
        results.append((out, weights, [leaf.grad for leaf in x], grads))
    expected, got = results
    assert (expected[1] is None) == (got[1] is None)
    assert_close(got, expected)


def forbidden(*shape: int) -> Tensor:
    """A random mask, True forbids, that leaves every query its first key."""
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_equals_torchs(batch_first: bool, bias: bool, need_weights: bool) -> None:
    theirs, ours = pair(batch_first=batch_first, bias=bias)
    x = tokens(Q, batch_first=batch_first)
    results = []
    for module in (theirs, ours):
        leaf = x.clone().requires_grad_()
        out, weights = module(leaf, leaf, leaf, need_weights=need_weights)
        out.sin().sum().backward()
        results.append((out, weights, leaf.grad))
    assert_close(results[1], results[0])


@pytest.mark.parametrize("position", ["nope", "tisa", "shaw"])
def test_the_weights_of_every_head_are_what_the_output_is_computed_from(position: str) -> None:
    layer = MultiheadAttention(D, H, batch_first=True, position=position, dtype=torch.float64)
    x = tokens(Q, batch_first=True)
    out, weights = layer(x, x, x, average_attn_weights=False)
    (by_weights,) = torch.autograd.grad(out.sum(), weights)
    assert by_weights.abs().min() > 0


@pytest.mark.parametrize("sizes", [{}, {"kdim": 5}, {"vdim": 7}, {"kdim": 5, "vdim": 7}])
@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention_equals_torchs_for_any_key_and_value_size(
    sizes: dict[str, int], bias: bool
) -> None:
    theirs, ours = pair(bias=bias, **sizes)
    k, v = tokens(K, width=sizes.get("kdim", D)), tokens(K, width=sizes.get("vdim", D))
    assert_same(theirs, ours, tokens(Q), k, v)


@pytest.mark.parametrize(("bias_kv", "zero"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("average", [True, False])
def test_extra_keys_equal_torchs_under_every_mask(bias_kv: bool, zero: bool, average: bool) -> None:
    theirs, ours = pair(batch_first=True, add_bias_kv=bias_kv, add_zero_attn=zero)
    inputs = tokens(Q, batch_first=True), tokens(K, batch_first=True), tokens(K, batch_first=True)
    masks = [
        {},
        {"key_padding_mask": forbidden(B, K)},
        {"attn_mask": forbidden(Q, K)},
        {"attn_mask": forbidden(B * H, Q, K), "key_padding_mask": forbidden(B, K)},
        {"attn_mask": torch.randn(Q, K, dtype=torch.float64)},
    ]
    for mask in masks:
        assert_same(theirs, ours, *inputs, **mask, average_attn_weights=average)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float", "infinite"])
@pytest.mark.parametrize("shape", [(Q, K), (B * H, Q, K)])
@pytest.mark.parametrize("padded", [False, True])
def test_masks_mean_what_they_mean_in_torch(
    kind: str, shape: tuple[int, ...], padded: bool, need_weights: bool
) -> None:
    theirs, ours = pair()

    def mask(*shape: int) -> Tensor:
        where = forbidden(*shape)
        if kind == "bool":
            return where
        added = torch.randn(shape, dtype=torch.float64)
        return added if kind == "float" else added.masked_fill(where, NEVER)

    call = {"attn_mask": mask(*shape), "need_weights": need_weights}
    if padded:
        call["key_padding_mask"] = mask(B, K)
    assert_same(theirs, ours, tokens(Q), tokens(K), tokens(K), **call)


def test_what_a_float_mask_forbids_is_no_number_of_the_bias() -> None:
    mask = torch.tensor([[0.5, NEVER, -65504.0], [1e30, -2.0, torch.finfo(torch.float32).min]])
    for dtype in (torch.float32, torch.float16):
        like = torch.zeros(2, 1, 2, 4, dtype=dtype)
        allowed, bias = from_torch(mask, mask.repeat(2, 1, 1).clamp(max=9), like=like, n_k=3)
        pos = torch.arange(2), torch.arange(3)
        assert torch.isfinite(bias.terms().dense[0].to_dense(*pos)).all()
        assert_close(allowed.keys, mask.to(dtype) != NEVER)
        assert_close(allowed.pairs[1, 0], mask.to(dtype) != NEVER)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_one_sequence_without_a_batch_equals_torchs(batch_first: bool, average: bool) -> None:
    theirs, ours = pair(batch_first=batch_first)
    q, k, v = (torch.randn(n, D, dtype=torch.float64) for n in (Q, K, K))
    for call in (
        {},
        {"key_padding_mask": forbidden(K)},
        {"attn_mask": forbidden(Q, K)},
        {"attn_mask": forbidden(H, Q, K), "key_padding_mask": forbidden(K)},
        {"need_weights": False},
    ):
        assert_same(theirs, ours, q, k, v, **call, average_attn_weights=average)


@pytest.mark.parametrize("need_weights", [True, False])
def test_is_causal_equals_torchs_and_needs_no_mask(need_weights: bool) -> None:
    theirs, ours = pair()
    x = tokens(Q)
    causal = torch.ones(Q, Q).triu(1).bool()
    call = {"need_weights": need_weights}
    expected = theirs(x, x, x, attn_mask=causal, is_causal=True, **call)
    assert_close(ours(x, x, x, attn_mask=causal, is_causal=True, **call), expected)
    assert_close(ours(x, x, x, is_causal=True, **call), expected)
    always = MultiheadAttention(D, H, dtype=torch.float64, causal=True)
    always.load_state_dict(theirs.state_dict())
    assert_close(always(x, x, x, **call), expected)


def test_extra_keys_are_seen_by_every_query_of_causal_attention() -> None:
    theirs, ours = pair(add_bias_kv=True, add_zero_attn=True)
    x = tokens(Q)
    causal = torch.ones(Q, Q).triu(1).bool()
    assert_close(ours(x, x, x, is_causal=True), theirs(x, x, x, attn_mask=causal))


def test_float32_equals_torchs() -> None:
    theirs, ours = pair(dtype=torch.float32)
    x = tokens(Q).float()
    assert_close(ours(x, x, x), theirs(x, x, x))


def test_the_same_seed_gives_torchs_initial_weights() -> None:
    for options in ({}, {"kdim": 5, "vdim": 7}, {"add_bias_kv": True}):
        torch.manual_seed(5)
        theirs = nn.MultiheadAttention(D, H, **options)
        torch.manual_seed(5)
        position = "nope" if options else "tisa"
        ours = MultiheadAttention(D, H, position=position, **options)
        for name, parameter in theirs.named_parameters():
            assert_close(ours.get_parameter(name), parameter, rtol=0, atol=0)


def test_dropout_acts_in_training_only_and_spares_the_weights() -> None:
    layer = MultiheadAttention(D, H, dropout=0.5, dtype=torch.float64)
    x = tokens(Q)
    dropped, weights = layer(x, x, x)
    layer.eval()
    plain, plain_weights = layer(x, x, x)
    assert_close(weights, plain_weights)
    assert (dropped - plain).abs().max() > 1e-3
    assert_close(layer(x, x, x)[0], plain)


@pytest.mark.parametrize("kind", ["keys", "pairs", "float"])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a_query_that_may_look_at_nothing_gets_zeros_and_sound_gradients(
    kind: str, backend: str
) -> None:
    layer = MultiheadAttention(D, H, dtype=torch.float64, position="tisa", backend=backend)
    nn.init.normal_(layer.out_proj.bias)
    x = tokens(Q).requires_grad_()
    nothing = torch.zeros(Q, Q, dtype=torch.bool)
    nothing[2] = True
    masks = {
        "keys": {"key_padding_mask": torch.tensor([[True] * Q, [False] * Q])},
        "pairs": {"attn_mask": nothing},
        "float": {"attn_mask": torch.zeros(Q, Q).masked_fill(nothing, NEVER)},
    }
    out, weights = layer(x, x, x, **masks[kind])
    blind, unseen = (out[:, 0], weights[0]) if kind == "keys" else (out[2], weights[:, 2])
    assert_close(blind, layer.out_proj.bias.expand_as(blind))
    assert_close(unseen, torch.zeros_like(unseen))
    out.sum().backward()
    assert_finite_gradients(layer)
    assert torch.isfinite(x.grad).all()


def assert_finite_gradients(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_grouped_heads_equal_torchs_with_the_shared_heads_written_out() -> None:
    heads, groups, width = 4, 2, 4
    ours = MultiheadAttention(16, heads, num_kv_heads=groups, dtype=torch.float64)
    nn.init.normal_(ours.in_proj_bias)
    theirs = nn.MultiheadAttention(16, heads, dtype=torch.float64)

    def written_out(packed: Tensor) -> Tensor:
        parts = packed.split([16, groups * width, groups * width])
        each = [p.unflatten(0, (-1, width)) for p in parts]
        return torch.cat([each[0], *(p.repeat_interleave(2, 0) for p in each[1:])]).flatten(0, 1)

    state = ours.state_dict()
    for name in ("in_proj_weight", "in_proj_bias"):
        state[name] = written_out(state[name])
    theirs.load_state_dict(state)
    x = tokens(Q, width=16)
    assert_close(ours(x, x, x), theirs(x, x, x))


def position_of(name: str, **options: object) -> dict[str, object]:
    return {"position": name, "causal": METHODS[name].causal_only, "max_length": 16, **options}


def shaken(module: nn.Module) -> nn.Module:
    """Random parameters: many start at zero, which would hide bugs."""
    shake(module, 0.2)
    return module


@pytest.mark.parametrize("name", METHODS)
def test_every_method_works_in_attention_forward_and_backward(name: str) -> None:
    layer = MultiheadAttention(D, H, dtype=torch.float64, batch_first=True, **position_of(name))
    shaken(layer)
    x = tokens(9, batch_first=True).requires_grad_()
    padding = torch.zeros(B, 9, dtype=torch.bool)
    padding[1, 6:] = True
    out, weights = layer(x, x, x, key_padding_mask=padding)
    assert out.shape == x.shape
    assert_close(weights.sum(-1), torch.ones(B, 9, dtype=torch.float64))
    assert_close(weights[1, :, 6:], torch.zeros(9, 3, dtype=torch.float64))
    out.square().sum().backward()
    assert_finite_gradients(layer)
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_decodes_the_last_rows_as_it_did_among_all(name: str) -> None:
    layer = MultiheadAttention(
        D, H, dtype=torch.float64, batch_first=True, **position_of(name, causal=True)
    )
    shaken(layer)
    x = tokens(8, batch_first=True)
    whole, whole_weights = layer(x, x, x)
    rows, weights = layer(x[:, 6:], x, x, q_start=6)
    assert_close(rows, whole[:, 6:])
    assert_close(weights, whole_weights[:, 6:])


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].sites() == ("score",)])
@pytest.mark.parametrize("cross", [False, True])
def test_a_score_method_equals_torch_with_its_dense_matrix_as_mask(name: str, cross: bool) -> None:
    causal = METHODS[name].causal_only
    n_q = 4 if cross and not causal else K
    theirs, _ = pair(batch_first=True)
    ours = MultiheadAttention(D, H, dtype=torch.float64, batch_first=True, **position_of(name))
    ours.load_state_dict(theirs.state_dict(), strict=False)
    shaken(ours.position)
    x_k = tokens(K, batch_first=True)
    x_q = tokens(n_q, batch_first=True) if n_q < K else x_k
    weights = theirs.in_proj_weight.chunk(3)
    biases = theirs.in_proj_bias.chunk(3)
    q, k = (
        nn.functional.linear(x, weights[i], biases[i]).unflatten(-1, (H, -1)).transpose(1, 2)
        for i, x in enumerate((x_q, x_k))
    )
    q_pos, k_pos = torch.arange(n_q), torch.arange(K)
    bias = ours.position.score_term(q, q_pos, k_pos, content=whence.Content(x_q, x_k, k))
    mask = bias.to_dense(q_pos, k_pos).expand(B, H, n_q, K)
    if causal:
        mask = mask.masked_fill(torch.ones(n_q, K).triu(1).bool(), NEVER)
    mask = mask.reshape(B * H, n_q, K).to(torch.float64)
    assert_close(ours(x_q, x_k, x_k), theirs(x_q, x_k, x_k, attn_mask=mask))
    added = torch.randn(n_q, K, dtype=torch.float64)
    assert_close(
        ours(x_q, x_k, x_k, attn_mask=added), theirs(x_q, x_k, x_k, attn_mask=mask + added)
    )


def test_shaws_layer_equals_the_formula_written_out() -> None:
    layer = MultiheadAttention(D, H, dtype=torch.float64, position="shaw:clip=2", batch_first=True)
    x, d = tokens(Q, batch_first=True), D // H
    q, k, v = (
        part.unflatten(-1, (H, d)).transpose(1, 2)
        for part in nn.functional.linear(x, layer.in_proj_weight).chunk(3, dim=-1)
    )
    out = torch.zeros(B, Q, H, d, dtype=torch.float64)
    shaw = layer.position
    for b, h, i in itertools.product(range(B), range(H), range(Q)):
        row = [min(max(j - i, -2), 2) + 2 for j in range(Q)]
        keys, values = k[b, h] + shaw.key_table[0, row], v[b, h] + shaw.value_table[0, row]
        out[b, i, h] = softmax(keys @ q[b, h, i] / d**0.5, dim=0) @ values
    assert_close(layer(x, x, x)[0], layer.out_proj(out.flatten(2)))


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_lone_layer_adds_the_input_term_and_one_in_a_stack_does_not(batch_first: bool) -> None:
    theirs, plain = pair(batch_first=batch_first)
    ours = MultiheadAttention(
        D, H, dtype=torch.float64, batch_first=batch_first, position="learned", max_length=20
    )
    ours.load_state_dict(theirs.state_dict(), strict=False)
    q, k, v = (tokens(n, batch_first=batch_first) for n in (Q, K, K))

    def moved(x: Tensor, start: int = 0) -> Tensor:
        n = x.shape[1 if batch_first else 0]
        term = ours.position.table[start : start + n]
        return x + (term if batch_first else term[:, None])

    assert_close(ours(q, k, v), theirs(moved(q), moved(k), moved(v)))
    assert_close(ours(q, k, v, q_start=4), theirs(moved(q, 4), moved(k), moved(v)))
    assert_close(ours(q, q, q), theirs(moved(q), moved(q), moved(q)))
    assert_close(ours(q, q, q, q_start=4), theirs(moved(q, 4), moved(q), moved(q)))
    axis = 0 if batch_first else 1
    alone, _ = ours(*(x.select(axis, 0) for x in (q, k, v)))  # one sequence, without a batch
    assert_close(alone, ours(q, k, v)[0].select(axis, 0))
    ours.standalone = False
    assert_close(ours(q, k, v), plain(q, k, v))


def test_torchs_encoder_layer_does_not_take_a_fast_path_past_the_position() -> None:
    layer = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True, dtype=torch.float64).eval()
    ours = MultiheadAttention(D, 2, batch_first=True, dtype=torch.float64, position="alibi")
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    x = tokens(Q, batch_first=True)
    with torch.no_grad():
        fast = layer(x)
    assert_close(fast, layer(x).detach())


# Layers and stacks


def layer_options(**more: object) -> dict[str, object]:
    return {"dim_feedforward": 10, "dropout": 0.0, "dtype": torch.float64, **more}


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_encoder_layer_equals_torchs(
    norm_first: bool, activation: str, batch_first: bool
) -> None:
    options = layer_options(norm_first=norm_first, activation=activation, batch_first=batch_first)
    theirs = shaken(nn.TransformerEncoderLayer(D, H, **options))
    ours = TransformerEncoderLayer(D, H, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = tokens(Q, batch_first=batch_first)
    assert_close(ours(x), theirs(x))
    padding, causal = forbidden(B, Q), torch.ones(Q, Q).triu(1).bool()
    assert_close(
        ours(x, src_mask=causal, src_key_padding_mask=padding),
        theirs(x, src_mask=causal, src_key_padding_mask=padding),
    )
    assert_close(ours(x, is_causal=True), theirs(x, src_mask=causal, is_causal=True))
    theirs.eval()
    ours.eval()
    with torch.no_grad():
        assert_close(ours(x, None, padding), theirs(x, None, padding))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_decoder_layer_equals_torchs(norm_first: bool, bias: bool, batch_first: bool) -> None:
    options = layer_options(norm_first=norm_first, bias=bias, batch_first=batch_first)
    theirs = shaken(nn.TransformerDecoderLayer(D, H, **options))
    ours = TransformerDecoderLayer(D, H, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x, memory = tokens(Q, batch_first=batch_first), tokens(K, batch_first=batch_first)
    assert_close(ours(x, memory), theirs(x, memory))
    masks = {
        "tgt_mask": torch.ones(Q, Q).triu(1).bool(),
        "memory_mask": forbidden(Q, K),
        "tgt_key_padding_mask": forbidden(B, Q),
        "memory_key_padding_mask": forbidden(B, K),
    }
    assert_close(ours(x, memory, **masks), theirs(x, memory, **masks))


@pytest.mark.parametrize("position", ["nope", "sinusoidal", "t5"])
def test_an_encoder_equals_torchs_with_the_position_put_in_by_hand(position: str) -> None:
    options = layer_options(norm_first=True)
    norm = nn.LayerNorm(D, dtype=torch.float64)
    layer = nn.TransformerEncoderLayer(D, H, **options)
    theirs = shaken(nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False))
    ours = TransformerEncoder(D, H, 3, norm=copy.deepcopy(norm), position=position, **options)
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert all(".position." in name for name in missing)
    assert unexpected == []
    x, mask, method = tokens(Q), None, ours.layers[0].self_attn.position
    moved = x
    if position == "sinusoidal":
        moved = x + method.input_term(torch.arange(Q))[:, None]
    if position == "t5":
        pos = torch.arange(Q)
        bias = method.score_term(torch.zeros(1, H, Q, 4), pos, pos).to_dense(pos, pos)
        mask = bias.expand(B, H, Q, Q).reshape(B * H, Q, Q)
    assert_close(ours(x), theirs(moved, mask=mask))
    assert_close(ours(x[:, 0]), ours(x)[:, 0])  # one sequence, without a batch


def test_a_decoder_equals_torchs_and_its_cross_attention_has_no_position() -> None:
    options = layer_options()
    layer = nn.TransformerDecoderLayer(D, H, **options)
    theirs = shaken(nn.TransformerDecoder(layer, 2))
    ours = TransformerDecoder(D, H, 2, position="alibi", causal=True, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x, memory, pos = tokens(Q), tokens(K), torch.arange(Q)
    bias = build("alibi", n_heads=H, d_head=4).score_term(torch.zeros(1, H, Q, 4), pos, pos)
    mask = bias.to_dense(pos, pos).masked_fill(torch.ones(Q, Q).triu(1).bool(), NEVER)
    mask = mask.expand(B, H, Q, Q).reshape(B * H, Q, Q).double()
    padding = torch.zeros(B, K, dtype=torch.float64).masked_fill(forbidden(B, K), NEVER)
    assert_close(
        ours(x, memory, memory_key_padding_mask=padding),
        theirs(x, memory, tgt_mask=mask, memory_key_padding_mask=padding),
    )
    crossed = TransformerDecoder(D, H, 2, position="alibi", cross_position="tisa", **options)
    tables = {id(layer.multihead_attn.position) for layer in crossed.layers}
    assert len(tables) == 2
    crossed(x, memory).sum().backward()
    assert_finite_gradients(crossed)
    flowing = TransformerDecoder(D, H, 2, position="floater", **options)
    flowing(x, memory).sum().backward()
    assert_finite_gradients(flowing.shared)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_works_in_a_stack_and_is_counted_as_often_as_it_is_there(name: str) -> None:
    options = position_of(name)
    stack = TransformerEncoder(D, H, 2, **layer_options(), **options)
    plain = TransformerEncoder(D, H, 2, **layer_options(), position="nope")
    stack(tokens(6)).square().sum().backward()
    assert_finite_gradients(stack)
    count = sum(p.numel() for p in stack.parameters()) - sum(p.numel() for p in plain.parameters())
    whole = build(
        name, n_heads=H, d_head=4, max_length=16, causal=METHODS[name].causal_only, n_layers=2
    )
    once = METHODS[name].shared_by_layers or METHODS[name].sites() == ("input",)
    assert count == whole.n_parameters() * (1 if once else 2)


def test_a_sum_shares_only_the_parts_that_layers_share() -> None:
    shape = {"n_heads": H, "d_head": 4, "max_length": 16}
    whole, layers = build_layers("learned+t5+tisa+floater", 3, **shape)
    parts = [list(layer.parts) for layer in layers]
    for first, second in itertools.pairwise(parts):
        assert first[0] is second[0]
        assert first[1] is second[1]
        assert first[2] is not second[2]
        assert first[3] is not second[3]
        assert first[3].whole is second[3].whole
    assert whole.parts[2] is parts[0][2]
    assert whole.parts[3] is parts[0][3].whole
    whole, layers = build_layers("t5+tisa", 2, **shape)
    assert whole is layers[0]


class CrossBegins(PositionMethod):
    """Notes how often a pass begins."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []
        self.inputs = 0

    def begin(self, length: int) -> None:
        self.lengths.append(length)


class Begins(CrossBegins):
    """Notes the input terms too."""

    def input_term(self, pos: Tensor) -> Tensor:
        self.inputs += 1
        return torch.zeros(len(pos), D, dtype=torch.float64)


def test_a_stack_begins_once_and_adds_the_input_term_once() -> None:
    method = Begins()
    stack = TransformerEncoder(D, H, 3, position=method, **layer_options())
    stack(tokens(6))
    assert (method.lengths, method.inputs) == ([6], 1)
    method = Begins()
    decoder = TransformerDecoder(D, H, 2, position=method, batch_first=True, **layer_options())
    decoder(tokens(4, batch_first=True), tokens(9, batch_first=True))
    assert (method.lengths, method.inputs) == ([4], 1)
    method = Begins()
    layer = TransformerDecoderLayer(D, H, position=method, **layer_options())
    layer(tokens(4), tokens(9))
    assert (method.lengths, method.inputs) == ([4], 1)
    method = CrossBegins()
    for module in (
        TransformerDecoderLayer(D, H, cross_position=method, **layer_options()),
        TransformerDecoder(D, H, 2, cross_position=method, **layer_options()),
    ):
        method.lengths.clear()
        module(tokens(4), tokens(9))
        assert method.lengths == [9]
    method = Begins()
    attention = MultiheadAttention(D, H, position=method, dtype=torch.float64)
    attention(tokens(4), tokens(9), tokens(9))
    assert method.lengths == [9]


@pytest.mark.parametrize(
    "position", ["tisa", "t5", "shaw", "rope", "floater", "fire", "learned+tisa"]
)
def test_checkpointing_gives_equal_gradients(position: str) -> None:
    stack = TransformerEncoder(D, H, 2, position=position, max_length=16, **layer_options())
    x = tokens(6)

    def gradients(layers: object) -> list[Tensor]:
        stack.zero_grad()
        method = stack.layers[0].self_attn.position if stack.shared is None else stack.shared
        method.begin(6)
        y = x
        for layer in stack.layers:
            y = layers(layer, y)
        y.square().sum().backward()
        return [p.grad for p in stack.parameters() if p.grad is not None]

    plain = gradients(lambda layer, y: layer(y))
    again = gradients(lambda layer, y: checkpoint(layer, y, use_reentrant=False))
    assert_close(again, plain)
    assert len(plain) > 0


@pytest.mark.parametrize("position", ["tisa", "t5+shaw", "floater", "learned+tupe", "synthesizer"])
def test_a_stack_can_be_copied_and_its_state_loaded(position: str) -> None:
    options = {"position": position, "max_length": 16, **layer_options()}
    stack, other = (
        shaken(TransformerEncoder(D, H, 2, **options)),
        TransformerEncoder(D, H, 2, **options),
    )
    x = tokens(6)
    expected = stack(x)
    twin = copy.deepcopy(stack)
    assert_close(twin(x), expected)
    assert not {p.data_ptr() for p in twin.parameters()} & {
        p.data_ptr() for p in stack.parameters()
    }
    assert len(list(twin.parameters())) == len(list(stack.parameters()))
    other.load_state_dict(stack.state_dict(), strict=True)
    assert_close(other(x), expected)
    shaken(twin)
    assert (twin(x) - expected).abs().max() > 1e-6  # the copy uses its own parameters
    assert_close(stack(x), expected)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_in_bfloat16_and_under_autocast(name: str) -> None:
    half = MultiheadAttention(D, H, dtype=torch.bfloat16, **position_of(name))
    x = torch.randn(6, B, D)
    out, weights = half(*[x.bfloat16()] * 3)
    assert (out.dtype, weights.dtype) == (torch.bfloat16, torch.bfloat16)
    out.float().sum().backward()
    assert_finite_gradients(half)
    full = MultiheadAttention(D, H, **position_of(name))
    with torch.autocast("cpu", torch.bfloat16):
        full(x, x, x, need_weights=False)[0].float().sum().backward()
    assert_finite_gradients(full)


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 10, "num_heads": 3}, "embed_dim must be a multiple of num_heads, got 10 and 3"),
        ({"embed_dim": 12, "num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_kv_heads": 2}, "num_heads must be a multiple of num_kv_heads, got 3 and 2"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"position": "tisaa"}, "Unknown method 'tisaa'. Did you mean 'tisa'"),
        ({"position": "tisa:kernel=5"}, "'kernel'. Did you mean 'kernels'"),
        ({"position": build("tisa", n_heads=4, d_head=4)}, "Tisa was built with n_heads = 4, this attention has n_heads = 3"),
        ({"position": Sum(build("shaw", n_heads=3, d_head=8))}, "Shaw was built with d_head = 8"),
        ({"position": build("learned", n_heads=3, d_head=5)}, "Learned was built with d_model = 15"),
        ({"position": "tisa", "add_zero_attn": True}, r"keys that stand nowhere.*sites: score"),
        ({"position": "learned+rope", "add_bias_kv": True}, r"sites: input, heads"),
        ({"position": "learned", "kdim": 5}, "adds to the input.*kdim 5"),
    ],
)  # fmt: skip
def test_a_bad_layer_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(**{"embed_dim": D, "num_heads": H, **options})


def test_extra_keys_go_with_a_position_at_the_input() -> None:
    layer = MultiheadAttention(D, H, add_bias_kv=True, add_zero_attn=True, position="sinusoidal")
    _, weights = layer(*(torch.randn(Q, B, D),) * 3)
    assert weights.shape == (B, Q, Q + 2)


def test_a_bad_call_is_refused() -> None:
    layer = MultiheadAttention(D, H)
    x = torch.randn(Q, B, D)
    with pytest.raises(ValueError, match=r"must all be 3-D, or all 2-D"):
        layer(x, x[:, 0], x)
    with pytest.raises(ValueError, match=r"must end in \(12, 12, 12\)"):
        layer(x[..., :5], x, x)
    with pytest.raises(ValueError, match="as many rows"):
        layer(x, x, x[:3])
    with pytest.raises(ValueError, match="as many sequences"):
        layer(x, x[:, :1], x[:, :1])
    with pytest.raises(
        ValueError, match=r"key_padding_mask must have shape \(2, 5\), got \(5, 2\)"
    ):
        layer(x, x, x, key_padding_mask=torch.zeros(Q, B, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attn_mask must have shape \(5, 5\) or \(6, 5, 5\)"):
        layer(x, x, x, attn_mask=torch.zeros(B, Q, Q, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"boolean .* or floating point"):
        layer(x, x, x, attn_mask=torch.zeros(Q, Q, dtype=torch.long))
    with pytest.raises(ValueError, match="Unknown backend 'fast'"):
        MultiheadAttention(D, H, backend="fast")(x, x, x)
    with pytest.raises(ValueError, match="causal=True, or call it with is_causal=True"):
        MultiheadAttention(D, H, position="cope+alibi")(x, x, x)


def test_a_bad_stack_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        TransformerEncoder(D, H, 0)
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads"):
        TransformerEncoder(D, 5, 2)
    with pytest.raises(ValueError, match=r"Unknown activation 'rel'\. Did you mean 'relu'"):
        TransformerEncoder(D, H, 2, activation="rel")
    with pytest.raises(ValueError, match="cross_position Learned adds to the input"):
        TransformerDecoder(D, H, 2, cross_position="learned")


def test_nested_tensors_are_refused_in_words() -> None:
    x = torch.nested.nested_tensor([torch.randn(n, D) for n in (3, 5)], layout=torch.jagged)
    plain = torch.randn(B, Q, D)
    options = {"batch_first": True, "position": "tisa"}
    for call in (
        lambda: MultiheadAttention(D, H, **options)(x, x, x),
        lambda: TransformerEncoderLayer(D, H, **options)(x),
        lambda: TransformerDecoderLayer(D, H, **options)(plain, x),
        lambda: TransformerEncoder(D, H, 1, **options)(x),
        lambda: TransformerDecoder(D, H, 1, **options)(x, plain),
    ):
        with pytest.raises(TypeError, match=r"is a nested tensor.*to_padded_tensor"):
            call()
