"""FLOATER: the flow, what a layer sees of it, and when it is solved."""

import copy
import io
import sys

import pytest
import torch
import torchdiffeq
from scipy.integrate import solve_ivp
from torch.testing import assert_close

from whence import Sum, build
from whence.kernels import attend
from whence.methods.floater import Floater
from whence.methods.nope import Nope
from whence.methods.sinusoidal import Sinusoidal
from whence.methods.tisa import Tisa
from whence.nn import positioned_attention

H, D, L = 3, 4, 2


def floater(n_layers=L, **options):
    """A flow that moves: the initial one is nearly still."""
    method = Floater(H, D, n_layers, **options).double()
    with torch.no_grad():
        for p in method.parameters():
            p.copy_(0.5 * torch.randn_like(p))
    return method


def heads(n, dtype=torch.float64):
    return torch.randn(2, H, n, D, dtype=dtype)


def derivative(method, t, p):
    t = torch.full((*p.shape[:-1], 1), t, dtype=p.dtype)
    return method.outer(torch.cat([method.inner(torch.cat([p, t], -1)).relu(), t], -1))


def by_hand(method, n):
    """Runge-Kutta of order 4 by the 3/8 rule, one state after the other."""
    rows, step = [], 0.002
    for layer in range(method.n_layers):
        for part in range(3):
            p, track = method.start[layer, part], []
            for i in range(5 * (n - 1) + 1):
                if i % 5 == 0:
                    track.append(p)
                t = i * step
                a = derivative(method, t, p)
                b = derivative(method, t + step / 3, p + step * a / 3)
                c = derivative(method, t + step * 2 / 3, p + step * (b - a / 3))
                d = derivative(method, t + step, p + step * (a - b + c))
                p = p + step / 8 * (a + 3 * b + 3 * c + d)
            rows.append(torch.stack(track))
    return torch.stack(rows, 1).view(n, method.n_layers, 3, -1)


@pytest.fixture
def solves(monkeypatch):
    """The number of solver calls so far."""
    calls = []
    real = torchdiffeq.odeint

    def counted(*args, **kwargs):
        calls.append(args[2][[0, -1]].tolist())
        return real(*args, **kwargs)

    monkeypatch.setattr(torchdiffeq, "odeint", counted)
    return calls


def added(view, n):
    """What a view adds to q, k and v at the first n positions, [3, n, width]."""
    x, pos = torch.zeros(1, H, n, D, dtype=torch.float64), torch.arange(n)
    parts = (view.query_heads(x, pos), view.key_heads(x, pos), view.value_heads(x, pos))
    return torch.stack([part[0].transpose(0, 1).reshape(n, H * D) for part in parts])


def test_the_flow_equals_a_runge_kutta_loop_for_every_layer_and_each_of_q_k_v():
    method, n = floater(), 8
    expected = by_hand(method, n)
    for layer in range(L):
        ours = added(method.layer(layer), n)
        assert_close(ours, expected[:, layer].transpose(0, 1), atol=1e-10, rtol=1e-9)
    assert float((expected[-1] - expected[0]).detach().abs().max()) > 0.01


def test_the_flow_is_near_an_adaptive_solution():
    method = floater(1)

    def rate(t, p):
        with torch.no_grad():
            return derivative(method, t, torch.from_numpy(p)).numpy()

    start = method.start[0, 1].detach().numpy()
    theirs = solve_ivp(rate, (0, 0.3), start, t_eval=[0.3], rtol=1e-9, atol=1e-9)
    ours = added(method, 31)[1, -1]
    assert_close(ours.detach(), torch.from_numpy(theirs.y[:, 0]), atol=1e-5, rtol=1e-5)


def test_gradients_equal_those_through_the_loop():
    method, n = floater(1), 4
    weight = torch.randn(3, n, H * D, dtype=torch.float64)
    ours = torch.autograd.grad((added(method, n) * weight).sum(), list(method.parameters()))
    loop = by_hand(method, n)[:, 0].transpose(0, 1)
    theirs = torch.autograd.grad((loop * weight).sum(), list(method.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, atol=1e-9, rtol=1e-8)


def test_without_flow_and_states_it_is_a_plain_transformer():
    method = Floater(H, D)
    for p in method.parameters():
        torch.nn.init.zeros_(p)
    q, k, v = (heads(6, torch.float32) for _ in range(3))
    plain = positioned_attention(Nope(), q, k, v, causal=True)
    assert_close(positioned_attention(method, q, k, v, causal=True), plain, rtol=0, atol=0)
    assert_close(method.input_term(torch.arange(6)), Sinusoidal(H * D).input_term(torch.arange(6)))


def test_it_starts_near_a_plain_transformer():
    method = Floater(8, 32)
    with torch.no_grad():
        method.begin(100)
        moved = method.query_heads(torch.zeros(1, 8, 100, 32), torch.arange(100))
    assert float(moved.abs().max()) < 0.2


def test_q_k_and_v_are_biased_before_attention():
    method, n = floater(1), 5
    q, k, v = heads(n), heads(n), heads(n)
    bias = added(method, n).view(3, n, H, D).transpose(1, 2)
    expected = attend(q + bias[0], k + bias[1], v + bias[2], causal=True)
    assert_close(positioned_attention(method, q, k, v, causal=True), expected)


def test_cached_shifted_and_batched_positions_read_the_same_flow():
    method, n = floater(1), 9
    q, pos = heads(n), torch.arange(n)
    whole = method.query_heads(q, pos)
    assert_close(method.query_heads(q[:, :, 6:], pos[6:]), whole[:, :, 6:])
    assert_close(method.query_heads(q[:, :, -1:], pos[-1:]), whole[:, :, -1:])
    assert_close(method.query_heads(q, pos.expand(2, n)), whole)
    assert_close(method.query_heads(q[:, :, :1], pos[:1]), whole[:, :, :1])
    assert method.query_heads(q[:, :, :0], pos[:0]).shape == (2, H, 0, D)


def test_one_solve_serves_all_layers_of_a_pass(solves):
    method, n = floater(), 7
    alone = torch.stack([added(method.layer(i), n) for i in range(L)])
    assert len(solves) == 3 * L
    solves.clear()
    method.begin(n)
    shared = torch.stack([added(method.layer(i), n) for i in range(L)])
    assert len(solves) == 1
    assert_close(shared, alone, rtol=0, atol=0)


def test_gradients_do_not_depend_on_begin():
    method, n = floater(), 5
    weight = torch.randn(L, 3, n, H * D, dtype=torch.float64)

    def gradients():
        out = torch.stack([added(method.layer(i), n) for i in range(L)])
        return torch.autograd.grad((out * weight).sum(), list(method.parameters()))

    alone = gradients()
    method.begin(n)
    for a, b in zip(alone, gradients(), strict=True):
        assert_close(a, b)


def test_a_pass_that_outruns_begin_goes_on_from_it(solves):
    method = floater(1)
    expected = added(method, 12)
    method.begin(4)
    solves.clear()
    assert_close(added(method, 12), expected, rtol=0, atol=0)
    assert [round(t, 6) for t in solves[0]] == [0.03, 0.11]


def test_a_step_of_an_optimizer_is_noticed():
    for options in ({}, {"foreach": True}, {"fused": True}):
        method = floater(1)
        optimizer = torch.optim.AdamW(method.parameters(), lr=0.1, **options)
        method.begin(5)
        added(method, 5).sum().backward()
        method.begin(5)
        before = added(method, 5).detach()
        optimizer.step()
        fresh = copy.deepcopy(method)
        assert_close(added(method, 5), added(fresh, 5), rtol=0, atol=0)
        assert not torch.allclose(added(method, 5), before)


def test_a_second_backward_without_begin_does_not_meet_a_spent_graph():
    method = floater(1)
    method.begin(5)
    added(method, 5).sum().backward()
    first = method.start.grad.clone()
    added(method, 5).sum().backward()
    assert_close(method.start.grad, 2 * first)


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_a_solution_without_gradients_does_not_serve_a_pass_with_them(no_grad):
    method = floater(1)
    with no_grad():
        method.begin(5)
    out = added(method, 5)
    assert out.requires_grad
    method.begin(5)
    with no_grad():
        assert not added(method, 5).requires_grad


def test_unfreezing_is_noticed():
    method = floater(1).requires_grad_(False)
    method.begin(5)
    method.requires_grad_(True)
    assert added(method, 5).requires_grad


def test_changed_dtype_loaded_and_swapped_weights_are_noticed():
    method, other = floater(1), floater(1)
    with torch.no_grad():
        method.begin(5)
        before = added(method, 5)
        method.load_state_dict(other.state_dict())
        assert_close(added(method, 5), added(other, 5), rtol=0, atol=0)
        method.begin(5)
        assigned = {name: p.clone() for name, p in floater(1).state_dict().items()}
        method.load_state_dict(assigned, assign=True)
        assert not torch.allclose(added(method, 5), added(other, 5))
        method.begin(5)
        method.float()
        narrow = method.query_heads(torch.zeros(1, H, 5, D), torch.arange(5))
        assert narrow.dtype == torch.float32
    assert before.dtype == torch.float64


def test_begin_without_gradients_continues_and_sees_weights_written_behind_its_back(solves):
    method = floater(1)
    with torch.no_grad():
        method.begin(6)
        method.begin(6)
        method.begin(3)
        assert len(solves) == 1
        method.begin(7)
        assert [round(t, 6) for t in solves[-1]] == [0.05, 0.06]
        assert_close(added(method, 7), added(copy.deepcopy(method), 7), rtol=0, atol=0)
        method.start.data.mul_(2.0)  # counts as no change for autograd
        assert_close(added(method, 7), added(copy.deepcopy(method), 7), rtol=0, atol=0)
        method.begin(7)
        assert_close(added(method, 7), added(copy.deepcopy(method), 7), rtol=0, atol=0)


def test_views_share_the_parameters_and_own_none():
    method = floater()
    views = [method.layer(i) for i in range(L)]
    assert [view.n_parameters() for view in views] == [0, 0]
    assert views[0].sites() == ("heads",)
    stack = torch.nn.ModuleList([method, *views])
    assert len(stack.state_dict()) == len(method.state_dict()) == 5
    twin = copy.deepcopy(stack)
    assert twin[1].whole is twin[0]
    with torch.no_grad():
        twin[0].start.zero_()
    assert_close(added(twin[1], 1), torch.zeros(3, 1, H * D, dtype=torch.float64))
    views[0].begin(4)
    assert_close(added(views[1], 4), added(copy.deepcopy(method).layer(1), 4))


def test_a_method_in_the_middle_of_a_pass_can_be_copied_and_saved():
    method = floater(1)
    method.begin(5)
    file = io.BytesIO()
    torch.save(method, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_close(added(loaded, 5), added(method, 5))
    assert_close(added(copy.deepcopy(method), 5), added(method, 5))


def test_a_layer_of_a_sum_is_the_sum_of_layers():
    flow, tisa = floater(), Tisa(H)
    both = Sum(flow, tisa)
    assert both.sites() == ("input", "heads", "score")
    view = both.layer(1)
    assert_close(added(view, 4), added(flow.layer(1), 4))
    plain = Sum(tisa, Nope())
    assert plain.layer(1) is plain
    assert tisa.layer(3) is tisa


def test_half_precision_weights_are_solved_in_float32():
    method = Floater(H, D).bfloat16()
    out = method.query_heads(torch.zeros(1, H, 9, D, dtype=torch.bfloat16), torch.arange(9))
    assert out.dtype == torch.bfloat16
    exact = copy.deepcopy(method).double()
    wide = exact.query_heads(torch.zeros(1, H, 9, D, dtype=torch.float64), torch.arange(9))
    assert_close(out.double(), wide, atol=1e-3, rtol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        cast = exact.float().query_heads(torch.zeros(1, H, 9, D), torch.arange(9))
    assert_close(cast.double(), wide, atol=1e-6, rtol=1e-5)


def test_parameters_are_counted_by_the_formula_and_built_from_text():
    method = build(
        "floater:hidden=7,steps=2,interval=0.1", n_heads=H, d_head=D, n_layers=4, d_model=10
    )
    assert method.n_parameters() == method.n_parameters_by_formula()
    assert (method.hidden, method.steps, method.n_layers) == (7, 2, 4)
    assert method.input_term(torch.arange(3)).shape == (3, 10)
    assert method.sites() == ("input", "heads")


def test_steps_are_steps_to_a_position(solves):
    method, coarse = floater(1), floater(1, steps=1)
    coarse.load_state_dict(method.state_dict())
    assert_close(added(coarse, 20), added(method, 20), atol=1e-3, rtol=1e-3)
    assert not torch.equal(added(coarse, 20), added(method, 20))


def test_it_is_differentiable_in_its_heads_and_states():
    method, pos = floater(1, steps=2), torch.arange(2)
    q = heads(2).requires_grad_()

    def run(x, start):
        weights = {**dict(method.named_parameters()), "start": start}
        return torch.func.functional_call(Hook(method), prefixed(weights), (x, pos))

    assert torch.autograd.gradcheck(run, (q, method.start.detach().requires_grad_()))


class Hook(torch.nn.Module):
    def __init__(self, method):
        super().__init__()
        self.method = method

    def forward(self, x, pos):
        return self.method.query_heads(x, pos)


def prefixed(weights):
    return {f"method.{name}": p for name, p in weights.items()}


def test_grouped_heads_other_layers_and_negative_positions_are_refused():
    method, pos = floater(), torch.arange(4)
    with pytest.raises(ValueError, match=r"3 heads of 4 in q, k and v, got 1 of 4.*grouped"):
        method.layer(0).key_heads(torch.zeros(1, 1, 4, D), pos)
    with pytest.raises(ValueError, match=r"states of 2 layers.*method.layer\(i\)"):
        method.query_heads(heads(4), pos)
    with pytest.raises(ValueError, match=r"layers 0..1, got layer 2.*larger n_layers"):
        method.layer(2)
    with pytest.raises(ValueError, match="got position -1"):
        method.layer(0).query_heads(heads(4), pos - 1)
    with pytest.raises(ValueError, match="interval, the time"):
        Floater(H, D, interval=0.0)


def test_without_torchdiffeq_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ImportError, match=r"pip install 'whence\[flow\]'"):
        Floater(H, D)
