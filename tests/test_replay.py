"""Tapes: what is played gives what the function gives, and what cannot be played is not."""

import ctypes
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import whence
from shaking import gains
from whence.lag import CurveBias, QueryBias
from whence.nn import positioned_attention

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
    ),
]


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Any:
    from whence import replay
    from whence.kernels import triton_decode

    monkeypatch.setattr(replay, "WORTH", 1)
    monkeypatch.setattr(triton_decode, "LEAST", 64)
    replay.forget()
    yield replay
    replay.forget()


def found_by(replay: ModuleType, *arguments: Any) -> Any:
    """What `replayed` gives, without the tape."""
    return replay.replayed(*arguments)[0]


class Watched:
    """A function for `replayed` that counts its calls."""

    def __init__(self, does: Callable[..., Any]) -> None:
        self.does, self.calls = does, 0

    def __call__(self, given: Any, *settings: Any) -> Any:
        self.calls += 1
        return self.does(given, *settings)


def _scaled(given: Any, times: float) -> Any:
    """A launch on a transposed room, a view of it, a sum, zeros, a tensor as it was, and None."""
    from whence.kernels.triton_rows import copied

    x, other, _ = given
    b, h, n, d = x.shape
    unused = torch.empty(7)
    room = x.new_empty(b, n, h, d).transpose(1, 2)
    copied(x, 0, room, reverse=True)
    copied(other[:, :, 1:], 0, room[:, :, 1:])
    del unused
    return room, room.sum(dim=-1), torch.zeros(3), other, room[..., 0], None


def _inputs(shape: tuple[int, ...] = (2, 3, 5, 4)) -> tuple[Tensor, ...]:
    return torch.randn(shape), torch.randn(shape)


def test_the_third_call_is_played_and_gives_what_the_function_gives(replay: ModuleType) -> None:
    what = Watched(_scaled)
    for time in range(5):
        x, other = _inputs()
        found = found_by(replay, what, (x, other, None), 2.0)
        assert what.calls == min(time + 1, 2)
        wanted = _scaled((x, other, None), 2.0)
        for a, b in zip(found[:5], wanted[:5], strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        assert found[3] is other
        assert found[5] is None


def test_a_shape_that_each_of_two_layers_has_once_is_not_recorded(
    replay: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    what = Watched(lambda given: (given[0].clone(),))
    for time in range(6):
        found_by(replay, what, (torch.randn(2),))
        assert len(replay._tapes) == (time >= 2)
    assert what.calls == 3


def test_room_that_is_left_unused_is_not_taken_again(replay: ModuleType) -> None:
    what = Watched(_scaled)
    for _ in range(2):
        found_by(replay, what, (*_inputs(), None), 2.0)
    (tape,) = replay._tapes.values()
    taken = [room.size for room in tape._rooms if room is not None]
    assert (7,) not in taken
    assert (3,) in taken


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.double(),
        lambda x: x[:, :, :4].contiguous(),
        lambda x: torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape),
    ],
    ids=["strides", "dtype", "shape", "alignment"],
)
def test_tensors_that_lie_otherwise_have_a_tape_of_their_own(
    replay: ModuleType, change: Callable[[Tensor], Tensor]
) -> None:
    what = Watched(lambda given: (given[0].clone(),))
    for _ in range(3):
        found_by(replay, what, (torch.randn(2, 3, 5, 4),))
    assert what.calls == 2
    x = change(torch.randn(2, 3, 5, 4))
    (found,) = found_by(replay, what, (x,))
    assert what.calls == 3
    assert torch.equal(found, x)


def test_tensors_not_aligned_have_a_tape_for_each_distance(replay: ModuleType) -> None:
    what = Watched(
        lambda given: (given[0].clone(),)
    )  # part of one may be aligned where others' is not
    for start, calls in ((1, 1), (1, 2), (1, 2), (2, 3)):
        x = torch.randn(9)[start : start + 4]
        (found,) = found_by(replay, what, (x,))
        assert what.calls == calls
        assert torch.equal(found, x)


def test_other_settings_have_a_tape_of_their_own(replay: ModuleType) -> None:
    what = Watched(lambda given, dim: (given[0].sum(dim=dim),))
    x = torch.randn(3, 4)
    for _ in range(3):
        found_by(replay, what, (x,), 0)
    (found,) = found_by(replay, what, (x,), 1)
    torch.testing.assert_close(found, x.sum(1))


def test_what_no_tape_knows_is_run_every_time(replay: ModuleType) -> None:
    hidden = torch.randn(2)
    for does in (
        lambda given: (given[0] * 2,),  # an operation that is not known
        lambda given: (hidden,),  # a tensor that was not given
        lambda given: (hidden[:1].clone(),),
        lambda given: (given[0].clone().zero_(),),  # in place
        lambda given: (given[0].view(torch.int32),),  # the same bytes as other numbers
    ):
        what = Watched(does)
        for time in range(4):
            x = torch.randn(2)
            (found,) = found_by(replay, what, (x,))
            assert torch.equal(found, does((x,))[0])
            assert what.calls == time + 1


def test_a_tensor_given_twice_makes_no_tape(replay: ModuleType) -> None:
    what = Watched(lambda given: (given[0].clone(), given[1].clone()))
    x = torch.randn(4)
    for _ in range(3):
        found_by(replay, what, (x, x))
    for _ in range(3):
        a, b = torch.randn(4), torch.randn(4)
        found = found_by(replay, what, (a, b))
        assert torch.equal(found[0], a)
        assert torch.equal(found[1], b)


def test_an_error_while_recording_leaves_nothing_behind(replay: ModuleType) -> None:
    from whence.launcher import _listener

    def fails(given: Any) -> Any:
        raise ValueError("no")

    for _ in range(4):
        with pytest.raises(ValueError, match="no"):
            found_by(replay, fails, (torch.randn(2),))
    assert _listener.hears is None
    assert not replay._tapes


def test_tapes_do_not_grow_without_end(replay: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST", 8)
    what = Watched(lambda given: (given[0].clone(),))
    for n in range(1, 40):
        for _ in range(2):
            found_by(replay, what, (torch.zeros(n),))
        assert len(replay._tapes) <= len(replay._seen) <= 8


def test_tiles_that_are_tried_are_not_hidden_by_tapes(replay: ModuleType) -> None:
    from whence.kernels.tiles_table import INTERPRETED, trying

    what = Watched(lambda given: (given[0].clone(),))
    for _ in range(3):
        found_by(replay, what, (torch.randn(2),))
    assert what.calls == 2
    with trying(INTERPRETED):
        found_by(replay, what, (torch.randn(2),))
        found_by(replay, what, (torch.randn(2),))
    assert what.calls == 4
    found_by(replay, what, (torch.randn(2),))
    assert what.calls == 5


@pytest.mark.parametrize(
    ("hook", "direct"), [(None, True), (lambda _: None, False)], ids=["none", "a function"]
)
def test_a_launch_tells_whatever_hook_there_is(
    hook: Any, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    from whence import launcher

    class Compiled:
        function, packed_metadata = 7, ()
        ran: tuple[Any, ...] = ()

        def run(self, *arguments: Any) -> None:
            self.ran = arguments

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, stream: self.run("asked", *grid, stream, *arguments)

    monkeypatch.setattr(launcher, "DIRECT", True)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    compiled = Compiled()
    launcher.start(compiled, (1, 2, 3), 4, (5, 6))
    short = (1, 2, 3, 4, 7, (), None, None, None, 5, 6)
    assert compiled.ran == (short if direct else ("asked", 1, 2, 3, 4, 5, 6))


def test_a_curve_that_all_heads_share_is_that_of_the_reference() -> None:
    from whence.lag import Curve
    from whence.methods.tisa import Tisa
    from whence.methods.tisa_kernel import CURVE

    def make(given: Any, reach: int) -> Any:
        band, extent = CURVE.make(given, reach)
        extents = torch.zeros(3, dtype=torch.int32)  # zeros where a second head would look
        extents[0] = extent[0]
        return band, extents[:1]

    torch.manual_seed(0)
    method = Tisa(1, kernels=2)
    q, k, v = (torch.randn(1, 3, 20, 16, requires_grad=True) for _ in range(3))
    d_out, results = torch.randn(1, 3, 20, 16), []
    for backend in ("fused", "reference"):
        curve = Curve(make, CURVE.gradient, CURVE.at, CURVE.extent_of)
        bias = CurveBias(curve, 19, *method.parameters())
        out = whence.attend(q, k, v, bias=bias, backend=backend)
        found = torch.autograd.grad(out, [q, k, v, *method.parameters()], d_out)
        results.append([out, *found])
    for a, b, unit in zip(*results, [1, 1, 1, 1, *gains(method)], strict=True):
        torch.testing.assert_close(a / unit, b / unit, rtol=1e-4, atol=2e-5)


def test_a_whole_number_as_scale_is_launched_as_a_float(replay: ModuleType) -> None:
    q, k, v = (torch.randn(1, 1, 2, 16) for _ in range(3))
    bias = QueryBias(q, torch.randn(1, 3, 16), scale=2)
    whence.attend(q, k, v, bias=bias, backend="fused")
    ((_, (call, *_), _),) = replay._seen
    assert type(call.making.scale) is float


@pytest.mark.parametrize(
    "spec",
    [
        "tisa",
        "shaw:clip=4",
        pytest.param("t5", marks=pytest.mark.slow),
        pytest.param("alibi", marks=pytest.mark.slow),
        pytest.param("kerple", marks=pytest.mark.slow),
        "tisa + shaw",
    ],
)
@pytest.mark.parametrize("n_q", [1, 20])
def test_attention_from_a_tape_is_that_of_the_reference(
    replay: ModuleType, spec: str, n_q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    method = whence.build(spec, n_heads=2, d_head=16)
    if spec == "tisa":
        from whence.methods.tisa_kernel import CURVE

        def as_on_a_gpu(*_: Any, **__: Any) -> CurveBias:
            return CurveBias(CURVE, 99, *method.parameters())

        monkeypatch.setattr(method, "score_term", as_on_a_gpu)
    n_k = n_q if n_q > 1 else 80  # one query: its keys are shared out
    played: list[str] = []
    play = replay.Tape.play
    monkeypatch.setattr(
        replay.Tape, "play", lambda self, *rest: played.append("") or play(self, *rest)
    )
    for time in range(3):
        q = torch.randn(2, n_q, 2, 16).transpose(1, 2).requires_grad_()
        k, v = (torch.randn(2, 2, n_k, 16, requires_grad=True) for _ in range(2))
        d_out = torch.randn(2, 2, n_q, 16)
        keys = torch.rand(2, n_k) < 0.9
        of = [q, k, v, *method.parameters()]
        results = []
        for backend in ("fused", "reference"):
            out = positioned_attention(method, q, k, v, backend=backend, causal=True, mask=keys)
            found = torch.autograd.grad(out, of, d_out, allow_unused=True)
            results.append([out.detach(), *found])
        units = [1, 1, 1, 1, *gains(method)]
        for a, b, unit in zip(*results, units, strict=True):
            torch.testing.assert_close(a / unit, b / unit, rtol=1e-4, atol=2e-5)
        assert len(played) == (0 if time < 2 else 2), "forward and backward"


class Compiled:
    """Stands for a kernel that a GPU's tape starts by addresses; runs it in the interpreter."""

    function, packed_metadata, starts = 1, (), 0

    def __init__(self, kernel: Any, tensors: Any, options: dict[str, object]) -> None:
        self.kernel, self.options = kernel, options
        self.kinds = [None if x is None else (x.dtype, x.data_ptr() & 15 == 0) for x in tensors]

    def run(self, *arguments: Any) -> None:
        Compiled.starts += 1
        grid, given, count = arguments[:3], arguments[9:], len(self.kinds)
        tensors = []
        for address, kind in zip(given[:count], self.kinds, strict=True):
            assert (address is None) == (kind is None)
            if kind is not None:
                assert (address % 16 == 0) == kind[1], "compiled for another alignment"
                one = (ctypes.c_char * kind[0].itemsize).from_address(address)
                tensors.append(torch.frombuffer(one, dtype=kind[0]))
            else:
                tensors.append(None)
        names = [name for name in self.kernel.arg_names if name in self.options]
        numbers, constants = (
            given[count : len(given) - len(names)],
            given[len(given) - len(names) :],
        )
        assert [self.options[name] for name in names] == list(constants)
        self.kernel[grid](*tensors, *numbers, **self.options)


@pytest.mark.parametrize(
    "spec", ["tisa", "shaw:clip=4", pytest.param("t5", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("n_q", [1, 20])
def test_started_by_addresses_as_on_a_gpu_it_is_that_of_the_reference(
    replay: ModuleType, spec: str, n_q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whence import launcher

    def launched(kernel: Any, grid: Any, tensors: Any, numbers: Any, options: Any) -> Any:
        kernel[grid](*tensors, *numbers, **options)
        names = [name for name in kernel.arg_names if name in options]
        return Compiled(kernel, tensors, options), tuple(options[name] for name in names)

    monkeypatch.setattr(launcher, "_launched", launched)
    monkeypatch.setattr(Compiled, "starts", 0)
    torch.manual_seed(0)
    method = whence.build(spec, n_heads=2, d_head=16)
    if spec == "tisa":
        from whence.methods.tisa_kernel import CURVE

        def as_on_a_gpu(*_: Any, **__: Any) -> CurveBias:
            return CurveBias(CURVE, 79, *method.parameters())

        monkeypatch.setattr(method, "score_term", as_on_a_gpu)
    n_k = n_q if n_q > 1 else 80
    for time in range(4):
        q = torch.randn(1, n_q, 2, 16).transpose(1, 2).requires_grad_()
        k, v = (torch.randn(1, 1, n_k, 16, requires_grad=True) for _ in range(2))
        d_out, of = torch.randn(1, 2, n_q, 16), [q, k, v, *method.parameters()]
        results = []
        for backend in ("fused", "reference"):
            out = positioned_attention(method, q, k, v, backend=backend, causal=True)
            results.append([out.detach(), *torch.autograd.grad(out, of, d_out)])
        units = [1, 1, 1, 1, *gains(method)]
        for a, b, unit in zip(*results, units, strict=True):
            torch.testing.assert_close(a / unit, b / unit, rtol=1e-4, atol=2e-5)
        assert (Compiled.starts > 0) == (time >= 2)
    taken = [room for tape in replay._tapes.values() for room in tape._rooms]
    assert any(isinstance(room, int) for room in taken), "what only kernels see is taken at once"
