"""A launch plan: the memory that a call takes and the kernels that it starts, decided beforehand.

Everything that a fused call does on the GPU follows from its signature: shapes, strides, dtypes and
options. Deciding it takes Python longer than the GPU needs at small sizes. So the functions of
launch.py write the decisions down once, in terms of `Slot`s, which are tensors without numbers, and
every call with the same signature runs the same `Plan` on its own tensors.

    q, k = slots_of([q_tensor, k_tensor])               # 1. the given tensors become slots;
    plan = Plan(q_tensor.device, 2)
    out = plan.empty(q.shape, torch.float32)            # 2. launch.py asks for memory
    plan.launch(kernel, grid, q, k, out, ROWS=64)       #    and starts kernels, in order;
    plan.returns(out)                                   # 3. the caller gets these;
    (found,) = plan.run([q_tensor, k_tensor])           # 4. as often as there are such tensors.
"""

import copy
import ctypes
import functools
import itertools
import math
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from whence.checks import require

ALIGNMENT = 512  # bytes between parts of the workspace, as PyTorch's allocator places tensors
DEFAULT_SHARED = 48 << 10  # bytes of shared memory that a kernel may use without an opt-in
MAX_DYNAMIC_SHARED_SIZE = 8  # of CUDA's attributes of a function
# What assembly reserves of shared memory; Triton's own is declared without a size.
RESERVED = re.compile(r"\.shared \.align 16 \.b8 \w+\[(\d+)\]")
# Held while a kernel is loaded. Triton 3.6 imports a C module for each signature, all under the
# same name, so that Python may return a module object whose functions another import has replaced:
# of two threads that load at once, one may get the other's launcher.
LOADING = threading.Lock()
MOST_PLANS = 4096  # a model has a few dozen signatures; a decoder has a new one for each token

Tensors = Sequence[Tensor | None]


def _public_empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# torch.compile's code allocates with `_empty_strided_cuda`, which bypasses the dispatcher and takes
# half the time. It is private to PyTorch, so a public function replaces it where it is missing.
_ALLOCATOR: Any = torch._C._dynamo.guards
if not hasattr(_ALLOCATOR, "_empty_strided_cuda"):
    _ALLOCATOR = SimpleNamespace(_empty_strided_cuda=_public_empty)


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """A tensor of a plan, given by the caller or made by the plan: its layout without its numbers.

    It has the attributes that Triton reads from a tensor in order to choose a compiled kernel.
    """

    index: int  # its place in the plan's lists; those of the given tensors come first
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool = True  # its address is a multiple of 16

    def stride(self, axis: int | None = None) -> Any:
        """The strides, or that of one axis, as of a tensor."""
        return self.strides if axis is None else self.strides[axis]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def data_ptr(self) -> int:
        """An address of the same alignment, which is all that Triton's compiler reads of it."""
        return 0 if self.aligned else 1


class Room(NamedTuple):
    """Memory for a tensor; with `tokens`, [b, h, n, d] lies as [b, n, h, d] in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tokens: bool = False
    zeros: bool = False  # filled with them

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of a tensor without gaps."""
        if self.tokens:
            _, h, n, d = self.shape
            return (n * h * d, d, h * d, 1)
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= max(size, 1)
        return tuple(reversed(strides))

    @property
    def size(self) -> int:
        """Its bytes, rounded up to a multiple of ALIGNMENT."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Launch(NamedTuple):
    """One kernel of a plan, as `explain` prints it."""

    kernel: str
    grid: tuple[int, ...]
    warps: int
    stages: int
    constants: dict[str, object]
    side: bool  # on a second stream, beside the launches that follow


# step(values, tensors, handle of a stream). Both lists have a place for every slot, constant and
# group of arguments. `values` holds what kernels get, on a GPU addresses; `tensors` is for PyTorch.
Step = Callable[[list[Any], list[Any], int], None]
Getter = Callable[[list[Any]], Any]  # a group of arguments, from `values`
Compile = Callable[[], Any]  # the kernel that Triton compiles, or has compiled


class Plan:
    """The memory and the launches of one kind of call."""

    def __init__(self, device: torch.device, n_given: int) -> None:
        self.device = device
        self.launches: list[Launch] = []
        self._on_gpu = device.type == "cuda"  # else kernels get tensors, in Triton's interpreter
        self._n_given = n_given
        self._constants: list[Any] = [None] * n_given  # by place; None for what a run puts there
        self._rooms: dict[int, Room] = {}  # by place: slots that have memory of their own
        self._parts: list[tuple[int, int, int, Room]] = []  # slots in others: place, whole, offset
        self._groups: dict[object, tuple[int, Getter]] = {}  # groups with slots: place and getter
        self._allocated: list[tuple[Any, ...]] = []  # place, and what `empty_strided` takes
        # (stream, step): "main", "side", or "joined", the main stream after it waited for the side
        self._steps: list[tuple[str, Step]] = []
        # By the place of a step: the kernel that it starts, the grid and what picks the arguments.
        self._compiled: dict[int, tuple[Compile, tuple[int, ...], Getter]] = {}
        self._sided = False  # whether a step is on the second stream
        self._as_tensor = set[int]()  # places of slots that are given to PyTorch
        self.results: tuple[Slot | None, ...] = ()
        self._result_places: list[int] = []
        self.workspace = 0  # bytes for all slots that only kernels use

    # Writing a plan.

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, tokens: bool = False) -> Slot:
        """Memory without contents; with `tokens`, [b, h, n, d] lies as [b, n, h, d] in memory."""
        return self.reserved(Room(tuple(shape), dtype, tokens))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, *, tokens: bool = False) -> Slot:
        """Memory filled with zeros; `tokens` as in `empty`."""
        slot = self.reserved(Room(tuple(shape), dtype, tokens, zeros=True))
        self._as_tensor.add(slot.index)
        return slot

    def reserved(self, room: Room) -> Slot:
        """Memory as a room describes it."""
        slot = self._slot(room)
        self._rooms[slot.index] = room
        return slot

    def together(self, slots: Sequence[Slot | None], *, at_least: int = 0) -> Slot | None:
        """One tensor of at least so many bytes that holds these slots; None if it would be empty.

        Another plan finds them in it by `apart`.
        """
        return self._merged([x.index for x in slots if x is not None], at_least)

    def apart(self, whole: Slot | None, rooms: Sequence[Room | None]) -> list[Slot | None]:
        """The slots that `together` put into one, given their rooms in the same order."""
        found = [None if room is None else self._slot(room) for room in rooms]
        if whole is not None:
            pairs = zip(found, rooms, strict=True)
            self._lay(whole, {slot.index: room for slot, room in pairs if slot and room})
        return found

    def summed(self, x: Slot, shape: Sequence[int]) -> Slot:
        """x summed by PyTorch over the axes that have size 1 in `shape`; x itself if it fits."""
        shape = tuple(shape)
        if x.shape == shape:
            return x
        slot = self.reserved(Room(shape, x.dtype))
        self._as_tensor.update((x.index, slot.index))
        source, target = x.index, slot.index
        more = x.ndim - len(shape)  # axes of x before those of `shape`
        whole = (1,) * more + shape
        axes = [axis for axis in range(x.ndim) if axis < more or whole[axis] != x.shape[axis]]

        def step(values: list[Any], tensors: list[Any], handle: int) -> None:
            torch.sum(tensors[source], axes, keepdim=True, out=tensors[target].view(whole))

        self._steps.append(("joined", step))
        return slot

    def launch(
        self,
        kernel: Any,
        grid: Sequence[int],
        *groups: Any,
        warps: int = 4,
        stages: int = 3,
        registers: int | None = None,
        fusion: bool = True,
        chained: bool = False,
        side: bool = False,
        **constants: object,
    ) -> None:
        """Start a kernel with its groups of arguments, in order, and its constants, by name.

        `registers` limits the registers of a thread. `fusion` lets the compiler fuse a product and
        a sum into one FMA; Triton's default for it is about to change. A `chained` kernel may start
        before the previous one has ended (pdl_wait in device/tile.py). With `side` a kernel runs
        on a second stream beside the launches that follow, and the plan waits for it at its end.
        """
        whole, stream = (*grid, 1, 1)[:3], "side" if side else "main"
        self._sided = self._sided or side
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fusion}
        if registers is not None:
            options["maxnreg"] = registers
        if chained:
            options["launch_pdl"] = True
        self.launches.append(
            Launch(kernel.fn.__name__, tuple(grid), warps, stages, constants, side)
        )
        places = [self._place(group) for group in groups]
        if not self._on_gpu:

            def interpreted(values: list[Any], tensors: list[Any], handle: int) -> None:
                kernel[whole](*[values[i] for i in places], **constants, **options)

            self._steps.append((stream, interpreted))
            return
        rest = [constants[name] for name in kernel.arg_names[len(groups) :]]
        pick = itemgetter(*places, *[self._new_place(x) for x in rest])
        compiled = functools.partial(kernel.warmup, *groups, grid=whole, **constants, **options)
        self._compiled[len(self._steps)] = (compiled, whole, pick)
        self._steps.append((stream, _not_compiled))

    def returns(self, *results: Slot | None) -> None:
        """End the plan: `run` returns these slots; all other memory becomes one workspace."""
        self.results = results
        self._result_places = [self._new_place(None) if x is None else x.index for x in results]
        if self._on_gpu:
            kept = self._as_tensor.union(self._result_places)
            workspace = self._merged([place for place in self._rooms if place not in kept])
            self.workspace = 0 if workspace is None else workspace.shape[0]
            self._compile()
        self._allocated = [
            (place, room.shape, room.strides, room.dtype, room.zeros)
            for place, room in self._rooms.items()
        ]

    def _compile(self) -> None:
        """Compile all kernels side by side, and load one at a time (LOADING).

        Threads help, since most of the work is done by ptxas, a process, and by C++ code.
        """
        import triton  # a Linux package; there is no compiled kernel without it

        def compile_all(pool: ThreadPoolExecutor) -> list[Any]:
            with triton.AsyncCompileMode(pool):
                return [compiled() for compiled, _, _ in self._compiled.values()]

        with torch.cuda.device(self.device), ThreadPoolExecutor() as pool:
            # In its own context, because Triton 3.6 does not leave the mode after an error.
            found = copy_context().run(compile_all, pool)
            new = [each.result() for each in found if isinstance(each, triton.FutureKernel)]
            with LOADING:
                # Triton 3.6 compiles a launcher in C for every kernel that it loads, which takes
                # about 0.4 s and is kept on disk. So all launchers are first made side by side.
                list(pool.map(_launcher_of, new))
                for (place, (_, grid, pick)), each in zip(
                    self._compiled.items(), found, strict=True
                ):
                    kernel = each.result() if isinstance(each, triton.FutureKernel) else each
                    step = _started(kernel, grid, pick)
                    self._steps[place] = (self._steps[place][0], step)

    # Running it.

    def run(self, given: Tensors) -> tuple[Tensor | None, ...]:
        """Allocate the memory and start the kernels; the tensors are laid out as their slots."""
        if not self._on_gpu:
            return self._interpreted(given)
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.run(given)
        tensors, values = self._constants.copy(), self._constants.copy()
        tensors[: self._n_given] = given
        values[: self._n_given] = [None if x is None else x.data_ptr() for x in given]
        for place, shape, strides, dtype, zeros in self._allocated:
            tensors[place] = x = _ALLOCATOR._empty_strided_cuda(shape, strides, dtype)
            values[place] = x.data_ptr()
            if zeros:
                x.zero_()
        for place, whole, offset, _ in self._parts:
            values[place] = values[whole] + offset
        for place, get in self._groups.values():
            values[place] = get(values)
        self._start(values, tensors)
        return tuple([tensors[place] for place in self._result_places])

    def _interpreted(self, given: Tensors) -> tuple[Tensor | None, ...]:
        """Run the plan in Triton's interpreter, whose kernels take tensors."""
        values = self._constants.copy()
        values[: self._n_given] = given
        for place, shape, strides, dtype, zeros in self._allocated:
            x = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
            values[place] = x.zero_() if zeros else x
        for place, whole, offset, room in self._parts:
            values[place] = part(values[whole], offset, room)
        for place, get in self._groups.values():
            values[place] = get(values)
        for _, step in self._steps:
            step(values, values, 0)
        return tuple([values[place] for place in self._result_places])

    def _start(self, values: list[Any], tensors: list[Any]) -> None:
        if not self._sided:
            handle = torch._C._cuda_getCurrentRawStream(self.device.index)
            for _, step in self._steps:
                step(values, tensors, handle)
            return
        main, side = torch.cuda.current_stream(), None
        handle = main.cuda_stream
        for stream, step in self._steps:
            if stream == "side":
                if side is None:
                    side = second_stream(self.device)
                    side.wait_stream(main)
                step(values, tensors, side.cuda_stream)
                continue
            if stream == "joined" and side is not None:
                main.wait_stream(side)
            step(values, tensors, handle)
        if side is not None:  # memory is reused in the order of the main stream, so it waits here
            main.wait_stream(side)

    def lines(self) -> list[str]:
        """The launches and the memory, as `explain` prints them."""
        found = [
            f"{each.kernel} in {' x '.join(f'{n:,}' for n in each.grid)} programs of "
            f"{_tile(each.constants)}{each.warps} warps and {each.stages} stages"
            f"{', beside the next' if each.side else ''}"
            for each in self.launches
        ]
        return [*found, f"{self.workspace:,} bytes of workspace"]

    def _slot(self, room: Room) -> Slot:
        return Slot(self._new_place(None), room.shape, room.strides, room.dtype)

    def _merged(self, places: Sequence[int], at_least: int = 0) -> Slot | None:
        """A slot of at least so many bytes that holds the slots at these places; None for 0.

        They then have no memory of their own any more.
        """
        rooms = {place: self._rooms.pop(place) for place in places}
        if not rooms and not at_least:
            return None
        whole = self.empty((max(size_of(rooms.values()), at_least),), torch.uint8)
        self._lay(whole, rooms)
        return whole

    def _lay(self, whole: Slot, rooms: dict[int, Room]) -> None:
        for (place, room), offset in zip(rooms.items(), offsets(rooms.values()), strict=True):
            self._parts.append((place, whole.index, offset, room))

    def _place(self, argument: Any) -> int:
        """The place of an argument of a kernel: a slot, a constant, or a group of arguments.

        A group with slots is built once in each run; one without slots is a constant of the plan.
        """
        if isinstance(argument, Slot):
            return argument.index
        if not _has_slot(argument):
            return self._new_place(argument)
        if argument not in self._groups:
            get = _tuple_of([self._place(part) for part in argument])
            if not self._on_gpu:  # a compiled kernel takes a tuple; the interpreter needs names
                get = _named(type(argument), get)
            self._groups[argument] = (self._new_place(None), get)
        return self._groups[argument][0]

    def _new_place(self, value: object) -> int:
        self._constants.append(value)
        return len(self._constants) - 1


Found = TypeVar("Found")


class Plans:
    """What was made for each signature so far. Beyond a maximum the oldest is dropped.

    The first entry of a signature says what was made:

    "attend"               Ready, for arguments of `attend` (backend.py)
    "call"                 Ready, for a call that was checked (lag_attention in function.py)
    "output"               the plan of the output
    "near output"          the same, with a plain kernel's results for the far keys
    "gradients"            the plan of the gradients
    "gradients elsewhere"  the same, of tensors that were copied or with a plain kernel's gradients
    "turn"                 the plan of a rotation (kernels/rotary.py)
    """

    def __init__(self, most: int = MOST_PLANS) -> None:
        self.most = most
        self._kept: dict[Hashable, Any] = {}
        self._lock = threading.Lock()  # autograd runs backward in threads of its own

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, signature: Hashable) -> Any:
        """What was made for this signature, or None."""
        return self._kept.get(signature)

    def keep(self, signature: Hashable, made: Any) -> None:
        """Return this for the signature from now on."""
        with self._lock:
            if len(self._kept) >= self.most:
                self._kept.pop(next(iter(self._kept)))
            self._kept[signature] = made

    def find(self, signature: Hashable, make: Callable[[], Found]) -> Found:
        """What belongs to this signature, which is made on first use."""
        found: Found | None = self._kept.get(signature)
        if found is None:
            found = make()
            self.keep(signature, found)
        return found

    def forget(self) -> None:
        """Drop all plans, as is needed when tile sizes change."""
        with self._lock:
            self._kept.clear()


PLANS = Plans()  # those of this process


def layout_of(x: Tensor | None) -> Hashable:
    """Shape, strides, dtype, device and alignment of a tensor: its part of a call's signature."""
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15 == 0


def slots_of(given: Tensors) -> list[Slot | None]:
    """The slots of the given tensors, all on one device, since kernels get bare addresses."""
    devices = dict.fromkeys(str(x.device) for x in given if x is not None)
    require(
        len(devices) <= 1,
        lambda: f"the tensors of a call must be on one device, got {' and '.join(devices)}.",
    )
    return [
        None
        if x is None
        else Slot(index, tuple(x.shape), x.stride(), x.dtype, x.data_ptr() & 15 == 0)
        for index, x in enumerate(given)
    ]


def size_of(rooms: Iterable[Room | None]) -> int:
    """The bytes of all that `Plan.together` puts into one tensor."""
    return sum(room.size for room in rooms if room is not None)


def offsets(rooms: Iterable[Room]) -> list[int]:
    """The byte at which each part begins in a tensor that `Plan.together` makes."""
    return [0, *itertools.accumulate(room.size for room in rooms)][:-1]


def parts_of(whole: Tensor, rooms: Sequence[Room | None]) -> list[Tensor | None]:
    """The tensors that `Plan.together` put into one."""
    there = [room for room in rooms if room is not None]
    found = map(part, itertools.repeat(whole), offsets(there), there)
    return [None if room is None else next(found) for room in rooms]


def part(whole: Tensor, offset: int, room: Room) -> Tensor:
    """The tensor that lies in a tensor of bytes."""
    size = math.prod(room.shape) * room.dtype.itemsize
    typed = whole[offset : offset + size].view(room.dtype)
    return typed.as_strided(room.shape, room.strides, typed.storage_offset())


@functools.cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for launches that run beside those of the current stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _tuple_of(places: Sequence[int]) -> Getter:
    if len(places) == 1:
        return lambda values: (values[places[0]],)
    return itemgetter(*places)


def _named(kind: Any, get: Getter) -> Getter:
    return lambda values: kind._make(get(values))


def _has_slot(group: object) -> bool:
    """Whether a group of arguments, or a single one, differs between the runs of a plan."""
    if isinstance(group, tuple):
        return any(_has_slot(part) for part in group)
    return isinstance(group, Slot)


def _not_compiled(values: list[Any], tensors: list[Any], handle: int) -> None:
    raise AssertionError("a plan must be ended by `returns` before it is run.")


def _launcher_of(compiled: Any) -> Any:
    """The launcher that Triton makes when it loads this kernel."""
    import triton  # a Linux package; there is no compiled kernel without it

    return triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


def _started(compiled: Any, grid: tuple[int, ...], pick: Getter) -> Step:
    """The step that starts a compiled kernel with the arguments that `pick` selects.

    Triton's own compiled[grid] makes a dictionary for launch hooks, even if there are none, and
    collects again what its C function takes besides the arguments. The step calls that function
    directly, unless a hook was added.
    """
    import triton  # a Linux package; there is no compiled kernel without it

    public = compiled[grid]  # which also loads the kernel
    if needs_more_memory(compiled.metadata.shared, compiled.asm["ptx"]):
        driver = ctypes.CDLL("libcuda.so.1")
        function = ctypes.c_void_p(compiled.function)
        size = compiled.metadata.shared
        error = driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE, size)
        require(error == 0, f"the GPU refused {size} bytes of shared memory: CUDA error {error}.")
    runtime, (x, y, z) = triton.knobs.runtime, grid
    if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
        return lambda values, tensors, handle: public(*pick(values), stream=handle)
    launch, rest = compiled.run.launch, _given_to_c(compiled, grid)
    as_one = rest[-1] == ()  # newer versions of Triton pass the kernel's arguments as one tuple
    rest = rest[:-1] if as_one else rest

    def step(values: list[Any], tensors: list[Any], handle: int) -> None:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            public(*pick(values), stream=handle)
        elif as_one:
            launch(x, y, z, handle, *rest, pick(values))
        else:
            launch(x, y, z, handle, *rest, *pick(values))

    return step


def needs_more_memory(shared: int, ptx: str) -> bool:
    """Whether a kernel needs an opt-in to more shared memory that Triton does not make.

    Triton opts in where its own memory, `shared` bytes, exceeds the default. It does not count what
    our inline assembly reserves besides (`reserve` in device/tile.py).
    """
    reserved = sum(int(size) for size in RESERVED.findall(ptx))
    return shared <= DEFAULT_SHARED < shared + reserved


def _given_to_c(compiled: Any, grid: tuple[int, ...]) -> tuple[Any, ...]:
    """What Triton's launcher passes to its C function between the stream and the arguments."""
    found: list[tuple[Any, ...]] = []
    launcher = copy.copy(compiled.run)
    launcher.launch = lambda *given: found.append(given)
    launcher(*grid, 0, compiled.function, compiled.packed_metadata, None, None, None)
    return found[0][4:]


def _tile(constants: dict[str, object]) -> str:
    tile: Any = constants.get("TILE")
    return "" if tile is None else f"{tile.ROWS} rows x {tile.KEYS} keys, "
