"""Doing again what a function of tensors did, without its Python.

A fused attention takes room for its results and launches a few kernels; which, follows from the
shapes. To find it out takes Python longer than the GPU needs at small sizes. So the third call
with the same shapes is recorded on a tape, and later ones play it: the same room, the same
launches, other addresses. A tape knows room, views, launches and a few operations of PyTorch; a
function that does anything else is run as it is.
"""

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from whence.launcher import Launch, launch, launching, listening, start, stream_of, unwatched

MOST = 4096  # kept tapes
ALIGNED = 512  # bytes, as PyTorch's own room
WORTH = 2  # calls before one is recorded: a decoder has each shape once a layer
aten = torch.ops.aten
EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default}
EMPTY |= {aten.new_empty.default, aten.new_empty_strided.default}
ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
AGAIN = {aten.sum.dim_IntList, aten._to_copy.default, aten.clone.default}

Tensors = tuple[Tensor | None, ...]
# Of values, their addresses, a stream, and whether nobody has to be told of a launch.
Step = Callable[[list[Any], list[Any], int, bool], None]


def replayed(
    what: Callable[..., Tensors], given: Tensors, *settings: object, after: "Tape | None" = None
) -> tuple[Tensors, "Tape | None"]:
    """what(given, *settings), from its tape if there is one, and that tape.

    `given` holds all of its tensors, which it does not change, the first always there, and the
    settings, hashable, all else that it depends on: what it does follows from them and from how the
    tensors lie in memory. With `after`, the tape of what was done before, settings and sizes follow
    from that and are not asked for again.
    """
    first = given[0]
    assert first is not None
    if first.is_cuda and first.get_device() != torch.cuda.current_device():
        return what(given, *settings), None
    places = [None if x is None else x.data_ptr() for x in given]
    pairs = zip(given, places, strict=True)
    lies: list[object]
    if after is not None:
        lies = [
            None if x is None or place is None else (x.stride(), x.get_device(), place & 15)
            for x, place in pairs
        ]
    else:
        lies = [
            None
            if x is None or place is None
            else (x.shape, x.stride(), x.dtype, x.get_device(), place & 15)
            for x, place in pairs
        ]
    key = (what, after or settings, tuple(lies))
    tape = _tapes.get(key)
    if tape is not None:
        return tape.play(given, places), tape
    times = _seen.get(key, 0)
    if len(_seen) >= MOST:
        forget()
    _seen[key] = times + 1
    there = [id(x) for x in given if x is not None]
    worth = WORTH if after is None else 0
    if times != worth or len(set(there)) < len(there):  # of one tensor given twice, which is meant?
        return what(given, *settings), None
    recorder = Recorder(given)
    with recorder, listening(recorder.launched):
        found = what(given, *settings)
    results = tuple([None if x is None else recorder.part(x) for x in found])
    if recorder.sound:
        tape = _tapes[key] = Tape(recorder, results)
    return found, tape


def forget() -> None:
    """Drop all tapes, as when functions begin to do otherwise."""
    _tapes.clear()
    _seen.clear()


class Part(NamedTuple):
    """A tensor as part of a root, one of those given or one made: offset in elements."""

    root: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, values: list[Any]) -> Tensor:
        """The tensor, from the values of the roots."""
        root: Tensor = values[self.root]
        if self.offset == 0 and root.shape == self.size and root.stride() == self.stride:
            return root
        return root.as_strided(self.size, self.stride, root.storage_offset() + self.offset)


class Room(NamedTuple):
    """Memory to take, filled with zeros or not."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zeros: bool


class Start(NamedTuple):
    """A launch, and what its tensors are."""

    launch: Launch
    parts: tuple[Part | None, ...]


class Again(NamedTuple):
    """An operation of PyTorch, and the root that its result is."""

    operation: Any
    arguments: tuple[object, ...]
    options: dict[str, object]
    root: int


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears what a function does with its tensors."""

    def __init__(self, given: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert given[0] is not None
        self.sound, self.device = True, given[0].device
        self.given = len(given)
        self.rooms: list[Room | None] = []  # of the roots beyond those given; None: by Again
        self.bytes = [0 if x is None else x.element_size() for x in given]  # of an element of each
        self.steps: list[Start | Again] = []
        self._parts: dict[int, Part] = {}  # by identity, while the tensors are kept
        self._kept = [x for x in given if x is not None]
        for root, x in enumerate(given):
            if x is not None:
                self._parts[id(x)] = Part(root, tuple(x.shape), x.stride(), 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do it, and write down what it was."""
        options = kwargs or {}
        out = func(*args, **options)
        if launching() or not self.sound:
            return out
        if not isinstance(out, Tensor):
            self.spoil()
            return out
        self._kept.append(out)
        if func in EMPTY or func in ZEROS:
            room = Room(tuple(out.shape), out.stride(), out.dtype, func in ZEROS)
            self._add(out, room)
            if out.device != self.device or (room.zeros and not out.is_contiguous()):
                self.spoil()
        elif func.is_view:
            base = self.part(args[0])
            if base is None or out.dtype != args[0].dtype:  # offsets are in elements
                self.spoil()
            else:
                offset = base.offset + out.storage_offset() - args[0].storage_offset()
                self._parts[id(out)] = Part(base.root, tuple(out.shape), out.stride(), offset)
        elif func in AGAIN:
            parts = tuple([self.part(x) if isinstance(x, Tensor) else x for x in args])
            self.steps.append(Again(func, parts, options, self.given + len(self.rooms)))
            self._add(out, None)
        else:
            self.spoil()
        return out

    def spoil(self) -> None:
        """There was something that no tape can do: listen no more, and keep nothing alive."""
        self.sound = False
        self._parts.clear()
        self._kept.clear()

    def launched(self, done: Launch) -> None:
        """Write down a launch."""
        if not self.sound:
            return
        parts = tuple([None if x is None else self.part(x) for x in done.tensors])
        for part in parts:  # the address of what PyTorch is to make is not known beforehand
            made = part is not None and part.root >= self.given
            if part and part.offset and made and self.rooms[part.root - self.given] is None:
                self.spoil()
        self.steps.append(Start(done._replace(tensors=()), parts))

    def part(self, x: Tensor) -> Part | None:
        """What is known of a tensor; one that came from elsewhere spoils the tape."""
        if id(x) not in self._parts:
            self.spoil()
        return self._parts.get(id(x))

    def _add(self, x: Tensor, room: Room | None) -> None:
        self._parts[id(x)] = Part(self.given + len(self.rooms), tuple(x.shape), x.stride(), 0)
        self.rooms.append(room)
        self.bytes.append(x.element_size())


class Tape:
    """Room to take, and steps to do with it and with the tensors given."""

    def __init__(self, heard: Recorder, results: tuple[Part | None, ...]) -> None:
        shown = {part.root for part in results if part is not None}
        used = set(shown)
        for step in heard.steps:
            parts = step.parts if isinstance(step, Start) else step.arguments
            roots = {part.root for part in parts if isinstance(part, Part)}
            used |= roots
            if isinstance(step, Again) or step.launch.compiled is None:
                shown |= roots  # PyTorch and the interpreter want a tensor
        rooms = dict(enumerate(heard.rooms, heard.given))
        for root in rooms.keys() - used:  # what a try with too large tiles had taken
            rooms[root] = None
        for part in results:  # room of which a view is a result is taken as that view
            room = None if part is None else rooms.get(part.root)
            if part is not None and room is not None and _covers(part, room):
                rooms[part.root] = room._replace(size=part.size, stride=part.stride)
        self._results = [self._result(part, rooms) for part in results]
        self._device, self._inner = heard.device, list[tuple[int, int]]()
        self._steps = [self._step(step, heard) for step in heard.steps]
        # What only kernels see is taken at once: a place in it stands for such a room.
        self._rooms: list[Room | int | None] = []
        self._scratch = 0
        for root, room in rooms.items():
            if room is None or room.zeros or root in shown:
                self._rooms.append(room)
            else:
                self._rooms.append(self._scratch)
                self._scratch += -(-_bytes(room) // ALIGNED) * ALIGNED

    def play(self, given: Tensors, places: list[int | None]) -> Tensors:
        """Do it with these tensors, whose addresses are `places`."""
        values, device, base = list(given), self._device, 0
        if self._scratch:
            scratch = torch.empty(self._scratch, dtype=torch.uint8, device=device)
            base = scratch.data_ptr()
        for room in self._rooms:
            if room is None:
                values.append(None)
                places.append(None)
            elif isinstance(room, int):
                values.append(None)
                places.append(base + room)
            else:
                size, stride, dtype, zeros = room
                if zeros:
                    x = torch.zeros(size, dtype=dtype, device=device)
                else:
                    x = torch.empty_strided(size, stride, dtype=dtype, device=device)
                values.append(x)
                places.append(x.data_ptr())
        for root, distance in self._inner:
            places.append((places[root] or 0) + distance)
        values.append(None)
        places.append(None)
        on_gpu = device.type == "cuda"
        stream, direct = stream_of(given[0]) if on_gpu else 0, on_gpu and unwatched()
        for step in self._steps:
            step(values, places, stream, direct)
        return tuple(
            [values[root] if part is None else part.of(values) for root, part in self._results]
        )

    def _result(self, part: Part | None, rooms: dict[int, Room | None]) -> tuple[int, Part | None]:
        """A root, and how it is to be seen if not as it is; values end with None."""
        if part is None:
            return -1, None
        room = rooms.get(part.root)
        whole = room is not None and (part.size, part.stride, part.offset) == (*room[:2], 0)
        return part.root, None if whole else part

    def _step(self, step: Start | Again, heard: Recorder) -> Step:
        if isinstance(step, Again):
            return _again(step)
        if step.launch.compiled is None:
            return _interpreted(step)
        roots = heard.given + len(heard.rooms)
        places = []
        for part in step.parts:
            if part is None:
                places.append(-1)
            elif part.offset == 0:
                places.append(part.root)
            else:
                place = (part.root, part.offset * heard.bytes[part.root])
                if place not in self._inner:
                    self._inner.append(place)
                places.append(roots + self._inner.index(place))
        return _started(step.launch, places)


def _covers(part: Part, room: Room) -> bool:
    """Whether a view is all of the room, its axes in another order or cut in another way."""
    last = sum((n - 1) * step for n, step in zip(part.size, part.stride, strict=True))
    return not room.zeros and math.prod(part.size) == math.prod(room.size) == last + 1


def _bytes(room: Room) -> int:
    if 0 in room.size:
        return 0
    last = sum((n - 1) * step for n, step in zip(room.size, room.stride, strict=True))
    return (last + 1) * room.dtype.itemsize


def _started(done: Launch, order: list[int]) -> Step:
    pick: Callable[[list[Any]], tuple[object, ...]] = itemgetter(*order, -1)
    compiled, grid = done.compiled, (*done.grid, 1, 1)[:3]
    rest = (*done.numbers, *done.constants)
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def step(values: list[Any], places: list[Any], stream: int, direct: bool) -> None:
        addresses = pick(places)[:-1]
        if direct:  # as in `start`, which looks all of it up
            run(*grid, stream, function, metadata, None, None, None, *addresses, *rest)
        else:
            start(compiled, grid, stream, (*addresses, *rest))

    return step


def _interpreted(done: Start) -> Step:
    kernel, grid, _, numbers, options, *_ = done.launch

    def step(values: list[Any], places: list[Any], stream: int, direct: bool) -> None:
        tensors = tuple([None if part is None else part.of(values) for part in done.parts])
        launch(kernel, grid, tensors, numbers, **options)

    return step


def _again(done: Again) -> Step:
    def step(values: list[Any], places: list[Any], stream: int, direct: bool) -> None:
        arguments = [x.of(values) if isinstance(x, Part) else x for x in done.arguments]
        made = done.operation(*arguments, **done.options)
        values[done.root], places[done.root] = made, made.data_ptr()

    return step


_tapes: dict[tuple[object, ...], Tape] = {}
_seen: dict[tuple[object, ...], int] = {}  # how often what has no tape was called
