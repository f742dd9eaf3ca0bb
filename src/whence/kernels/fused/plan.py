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
from typing import Any, NamedTuple

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


# step(values, tensors, handle of a stream). `values` holds what kernels get for each slot (on a GPU
# an address) and, from the end backwards, the constants of the plan.
Step = Callable[[list[Any], list[Any], int], None]


class Plan:
    """The memory and the launches of one kind of call."""

    def __init__(self, device: torch.device, n_given: int) -> None:
        self.device = device
        self.launches: list[Launch] = []
        self._on_gpu = device.type == "cuda"  # else kernels get tensors, in Triton's interpreter
        self._n_given = n_given
        self._rooms: list[Room | None] = []  # memory of each made slot; None if a step allocates it
        self._steps: list[tuple[str, Step]] = []  # (stream, step)
        self._constants: list[object] = []
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
        slot = Slot(self._n_given + len(self._rooms), shape, _packed(shape), x.dtype)
        self._rooms.append(None)
        self._as_tensor.add(x.index)
        source, target, on_gpu = x.index, slot.index, self._on_gpu

        def step(values: list[Any], tensors: list[Any], handle: int) -> None:
            made = tensors[source].sum_to_size(shape)
            tensors[target], values[target] = made, made.data_ptr() if on_gpu else made

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
        options = {"num_warps": warps, "num_stages": stages}
        if registers is not None:
            options["maxnreg"] = registers
        self.launches.append(
            Launch(kernel.fn.__name__, tuple(grid), warps, stages, constants, side)
        )
        arguments = [self._argument(group) for group in groups]
        if not self._on_gpu:

            def interpreted(values: list[Any], tensors: list[Any], handle: int) -> None:
                kernel[whole](*[get(values) for get in arguments], **constants, **options)

            self._steps.append((stream, interpreted))
            return
        compiled = kernel.warmup(*groups, grid=whole, **constants, **options)
        start = compiled[whole]
        rest = [constants[name] for name in kernel.arg_names[len(groups) :]]

        def started(values: list[Any], tensors: list[Any], handle: int) -> None:
            start(*[get(values) for get in arguments], *rest, stream=handle)

        self._steps.append((stream, started))

    def returns(self, *results: Slot | None) -> None:
        """End the plan: `run` returns these slots; all other memory becomes one workspace."""
        self.results = results
        self._as_tensor.update(x.index for x in results if x is not None)
        for index, room in enumerate(self._rooms, self._n_given):
            if room is None or index in self._as_tensor or not self._on_gpu:
                self._offsets.append(-1)
            else:
                self._offsets.append(self._workspace)
                size = math.prod(room.shape) * room.dtype.itemsize
                self._workspace += -(-size // ALIGNMENT) * ALIGNMENT

    # Running it.

    def run(self, given: Tensors) -> tuple[Tensor | None, ...]:
        """Allocate the memory and start the kernels; the tensors are laid out as their slots."""
        device, tensors = self.device, list[Any](given)
        on_gpu, workspace = self._on_gpu, 0
        if on_gpu and torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return self.run(given)
        values = list[Any](given)
        if on_gpu:
            values = [None if x is None else x.data_ptr() for x in given]
        if self._workspace:
            held = torch.empty(self._workspace, dtype=torch.uint8, device=device)
            workspace = held.data_ptr()
        for room, offset in zip(self._rooms, self._offsets, strict=True):
            if offset >= 0:
                tensors.append(None)
                values.append(workspace + offset)
                continue
            x = None
            if room is not None:
                x = torch.empty_strided(room.shape, room.strides, dtype=room.dtype, device=device)
                if room.zeros:
                    x.zero_()
            tensors.append(x)
            values.append(x.data_ptr() if on_gpu and x is not None else x)
        values += self._constants
        if not on_gpu:
            for _, step in self._steps:
                step(values, tensors, 0)
        else:
            self._start(values, tensors)
        return tuple([None if x is None else tensors[x.index] for x in self.results])

    def _start(self, values: list[Any], tensors: list[Any]) -> None:
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
        return [*found, f"{self._workspace:,} bytes of workspace"]

    def _new(self, room: Room) -> Slot:
        index = self._n_given + len(self._rooms)
        self._rooms.append(room)
        return Slot(index, room.shape, room.strides, room.dtype)

    def _argument(self, group: Any) -> Callable[[list[Any]], Any]:
        """A function from the values of a run to one group of a kernel's arguments."""
        if isinstance(group, tuple):
            if any(isinstance(part, tuple) for part in group):
                parts = [self._argument(part) for part in group]
                kind = type(group)._make  # type: ignore[attr-defined]
                return lambda values: kind([get(values) for get in parts])
            pick = itemgetter(*[self._place(part) for part in group], -1)
            if self._on_gpu:  # a compiled kernel takes any tuple
                return lambda values: pick(values)[:-1]
            made = type(group)._make  # type: ignore[attr-defined]
            return lambda values: made(pick(values)[:-1])
        return itemgetter(self._place(group))

    def _place(self, part: object) -> int:
        """The index of a slot or of a constant among the values of a run."""
        if isinstance(part, Slot):
            return part.index
        self._constants.insert(0, part)
        return -len(self._constants)


class Plans:
    """The plans made so far, by signature. Beyond a maximum the oldest is dropped."""

    def __init__(self, most: int = MOST_PLANS) -> None:
        self.most = most
        self._kept: dict[Hashable, Plan] = {}
        self._lock = threading.Lock()  # autograd runs backward in threads of its own

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, signature: Hashable, make: Callable[[], Plan]) -> Plan:
        """The plan with this signature, which is made on first use."""
        plan = self._kept.get(signature)
        if plan is None:
            plan = make()
            with self._lock:
                if len(self._kept) >= self.most:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[signature] = plan
        return plan

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


def _tile(constants: dict[str, object]) -> str:
    tile: Any = constants.get("TILE")
    return "" if tile is None else f"{tile.ROWS} rows x {tile.KEYS} keys, "
