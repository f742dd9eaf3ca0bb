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

import functools
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from whence.checks import require

ALIGNMENT = 512  # bytes between parts of the workspace, as PyTorch's allocator places tensors
MOST_PLANS = 4096  # a model has a few dozen signatures; a decoder has a new one for each token

Tensors = Sequence[Tensor | None]


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """A tensor of a plan, given by the caller or made by the plan: its layout without its numbers.

    It has the attributes that Triton reads from a tensor in order to choose a compiled kernel.
    """

    index: int  # its place among the plan's tensors: first the given ones, then those it makes
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
    """Memory that a plan takes for a slot."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    zeros: bool


class Launch(NamedTuple):
    """One kernel of a plan, as `explain` prints it."""

    kernel: str
    grid: tuple[int, ...]
    warps: int
    stages: int
    constants: dict[str, object]
    side: bool  # on a second stream, beside the launches that follow


# step(arguments, tensors, handle of a stream). `arguments` holds what kernels get: constants and
# groups of the plan, in the order in which its launches named them.
Step = Callable[[list[Any], list[Any], int], None]
# What a run puts in one place of `arguments`, from what kernels get for each slot (on a GPU an
# address): a group of arguments with a slot in it.
Getter = Callable[[list[Any]], Any]


class Plan:
    """The memory and the launches of one kind of call."""

    def __init__(self, device: torch.device, n_given: int) -> None:
        self.device = device
        self.launches: list[Launch] = []
        self._on_gpu = device.type == "cuda"  # else kernels get tensors, in Triton's interpreter
        self._n_given = n_given
        self._rooms: list[Room] = []  # memory of each made slot
        self._steps: list[tuple[str, Step]] = []  # (stream, step)
        self._sided = False  # whether a step is on the second stream
        self._arguments: list[object] = []  # constants of the plan; None in the place of a getter
        self._getters: dict[object, tuple[int, Getter]] = {}  # by group: its place, and the getter
        self._as_tensor = set[int]()  # slots that are returned or given to PyTorch
        self.results: tuple[Slot | None, ...] = ()
        self._workspace = 0  # bytes for all slots that only kernels use
        self._offsets: list[int] = []  # of each slot in the workspace; -1 if it is its own tensor

    # Writing a plan.

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, tokens: bool = False) -> Slot:
        """Memory without contents; with `tokens`, [b, h, n, d] lies as [b, n, h, d] in memory."""
        strides = _packed(shape)
        if tokens:
            _, h, n, d = shape
            strides = (n * h * d, d, h * d, 1)
        return self._new(Room(tuple(shape), strides, dtype, zeros=False))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Slot:
        """Memory filled with zeros."""
        slot = self._new(Room(tuple(shape), _packed(shape), dtype, zeros=True))
        self._as_tensor.add(slot.index)
        return slot

    def summed(self, x: Slot, shape: Sequence[int]) -> Slot:
        """x summed by PyTorch over the axes that have size 1 in `shape`; x itself if it fits."""
        shape = tuple(shape)
        if x.shape == shape:
            return x
        slot = self._new(Room(shape, _packed(shape), x.dtype, zeros=False))
        self._as_tensor.update((x.index, slot.index))
        source, target = x.index, slot.index
        more = x.ndim - len(shape)  # axes of x before those of `shape`
        whole = (1,) * more + shape
        axes = [axis for axis in range(x.ndim) if axis < more or whole[axis] != x.shape[axis]]

        def step(arguments: list[Any], tensors: list[Any], handle: int) -> None:
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
        side: bool = False,
        **constants: object,
    ) -> None:
        """Start a kernel with its groups of arguments, in order, and its constants, by name.

        `registers` limits the registers of a thread. Constants may also be options of Triton's
        compiler, such as enable_fp_fusion. With `side` the kernel runs on a second stream beside
        the launches that follow, and the plan waits for it at its end.
        """
        whole, stream = (*grid, 1, 1)[:3], "side" if side else "main"
        self._sided = self._sided or side
        options = {"num_warps": warps, "num_stages": stages}
        if registers is not None:
            options["maxnreg"] = registers
        self.launches.append(
            Launch(kernel.fn.__name__, tuple(grid), warps, stages, constants, side)
        )
        places = [self._place(group) for group in groups]
        if not self._on_gpu:

            def interpreted(arguments: list[Any], tensors: list[Any], handle: int) -> None:
                kernel[whole](*[arguments[i] for i in places], **constants, **options)

            self._steps.append((stream, interpreted))
            return
        start = _starter(kernel.warmup(*groups, grid=whole, **constants, **options), whole)
        rest = [constants[name] for name in kernel.arg_names[len(groups) :]]
        pick = itemgetter(*places, *[self._constant(x) for x in rest])

        def started(arguments: list[Any], tensors: list[Any], handle: int) -> None:
            start(handle, pick(arguments))

        self._steps.append((stream, started))

    def returns(self, *results: Slot | None) -> None:
        """End the plan: `run` returns these slots; all other memory becomes one workspace."""
        self.results = results
        self._as_tensor.update(x.index for x in results if x is not None)
        for index, room in enumerate(self._rooms, self._n_given):
            if index in self._as_tensor or not self._on_gpu:
                self._offsets.append(-1)
            else:
                self._offsets.append(self._workspace)
                size = math.prod(room.shape) * room.dtype.itemsize
                self._workspace += -(-size // ALIGNMENT) * ALIGNMENT

    # Running it.

    def run(self, given: Tensors) -> tuple[Tensor | None, ...]:
        """Allocate the memory and start the kernels; the tensors are laid out as their slots."""
        device, on_gpu, workspace = self.device, self._on_gpu, 0
        if on_gpu and torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return self.run(given)
        tensors: list[Any] = list(given)
        values: list[Any] = list(given)
        if on_gpu:
            values = [None if x is None else x.data_ptr() for x in given]
        if self._workspace:
            held = torch.empty(self._workspace, dtype=torch.uint8, device=device)
            workspace = held.data_ptr()
        for (shape, strides, dtype, zeros), offset in zip(self._rooms, self._offsets, strict=True):
            if offset >= 0:
                tensors.append(None)
                values.append(workspace + offset)
                continue
            x = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            if zeros:
                x.zero_()
            tensors.append(x)
            values.append(x.data_ptr() if on_gpu else x)
        arguments = self._arguments.copy()
        for place, get in self._getters.values():
            arguments[place] = get(values)
        if not on_gpu:
            for _, step in self._steps:
                step(arguments, tensors, 0)
        else:
            self._start(arguments, tensors)
        return tuple([None if x is None else tensors[x.index] for x in self.results])

    def _start(self, arguments: list[Any], tensors: list[Any]) -> None:
        if not self._sided:
            handle = torch._C._cuda_getCurrentRawStream(self.device.index)
            for _, step in self._steps:
                step(arguments, tensors, handle)
            return
        main, side = torch.cuda.current_stream(), None
        handle = main.cuda_stream
        for stream, step in self._steps:
            if stream == "side":
                if side is None:
                    side = second_stream(self.device)
                    side.wait_stream(main)
                step(arguments, tensors, side.cuda_stream)
                continue
            if stream == "joined" and side is not None:
                main.wait_stream(side)
            step(arguments, tensors, handle)
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
        return [*found, f"{self._workspace:,} bytes of workspace"]

    def _new(self, room: Room) -> Slot:
        index = self._n_given + len(self._rooms)
        self._rooms.append(room)
        return Slot(index, room.shape, room.strides, room.dtype)

    def _place(self, group: Any) -> int:
        """The place of one group of arguments, or of a single one, in the list that a run makes.

        A group that several kernels take is made once in a run, and one without slots never.
        """
        if not _has_slot(group):
            return self._constant(group)
        if group not in self._getters:
            self._getters[group] = (len(self._arguments), self._getter(group))
            self._arguments.append(None)
        return self._getters[group][0]

    def _constant(self, value: object) -> int:
        self._arguments.append(value)
        return len(self._arguments) - 1

    def _getter(self, group: Any) -> Getter:
        """A function from the values of a run to a group of a kernel's arguments."""
        if isinstance(group, Slot):
            return itemgetter(group.index)
        parts = [(i, self._getter(part)) for i, part in enumerate(group) if _has_slot(part)]
        made_of = tuple if self._on_gpu else type(group)._make  # a compiled kernel takes any tuple

        def get(values: list[Any]) -> Any:
            filled = list(group)
            for i, part in parts:
                filled[i] = part(values)
            return made_of(filled)

        return get


Found = TypeVar("Found")


class Plans:
    """What was made for each signature so far. Beyond a maximum the oldest is dropped."""

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


def lies(x: Tensor | None) -> Hashable:
    """Shape, strides, dtype and alignment of a tensor: its part of a call's signature."""
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


def _packed(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of this shape without gaps."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@functools.cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for launches that run beside those of the current stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _has_slot(group: object) -> bool:
    """Whether a group of arguments, or a single one, differs between the runs of a plan."""
    if isinstance(group, tuple):
        return any(_has_slot(part) for part in group)
    return isinstance(group, Slot)


def _starter(compiled: Any, grid: tuple[int, ...]) -> Callable[[int, tuple[Any, ...]], None]:
    """start(handle of a stream, arguments), for a kernel that Triton has compiled.

    compiled[grid] calls Triton's hooks, with a dictionary made for them, also where there are none.
    Here that is left out until somebody adds a hook.
    """
    import triton  # a Linux package; there is no compiled kernel without it

    public = compiled[grid]  # which also loads the kernel
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    runtime, (x, y, z) = triton.knobs.runtime, grid

    def start(handle: int, arguments: tuple[Any, ...]) -> None:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            public(*arguments, stream=handle)
        else:
            run(x, y, z, handle, function, metadata, None, None, None, *arguments)

    return start


def _tile(constants: dict[str, object]) -> str:
    tile: Any = constants.get("TILE")
    return "" if tile is None else f"{tile.ROWS} rows x {tile.KEYS} keys, "
