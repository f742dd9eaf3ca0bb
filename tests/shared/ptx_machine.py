"""A GPU for PTX without a GPU: it runs a kernel's programs, and finds what a real one would hide.

    memory = GlobalMemory([tensor, ...])
    Machine(kernel, memory, shared=bytes, grid=(x, y, z), params=[...]).run()

All threads go in step, as arrays (ptx.py). Threads that branch differently wait for each other where
the program goes on: the block that comes first in the text runs first. What is an error here and
nothing, or chance, on a GPU:

- an address outside of the elements of the given tensors or of shared memory, or not aligned;
- a race: a number that two warps read and write without a barrier between them, or two programs at
  all, unless both write the same;
- memory that an asynchronous copy or product still uses: a copy's target that is read or written,
  or a product's operand that is written, before it was waited for;
- an operand of the tensor cores that was stored without the fence that shows it to them (copied
  operands have none in Triton 3.6);
- global memory that is touched before the wait for the kernel before, if there is such a wait, or
  that is read as constant after this kernel wrote it;
- shared memory that nobody wrote;
- an instruction of a warp, or of four, that not all of their threads run.

What it does not see: a race between threads of one warp, or between halves of a word that two warps
write; a register that nobody wrote, or that a product in flight still uses, which the driver's
compiler looks after; global memory that nobody wrote; kernels that run at once; what plan.py does
on a GPU alone (one workspace, its launcher). Sums of tensor cores are rounded towards 0 once an
instruction; on a GPU each addition in it may be. A logarithm near 1 is exact to its last digits; on
a GPU its absolute error may be 2^-22.
"""

import ctypes
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from ptx import END, WORDS, Kernel, from_bf16

BASE = 1 << 33  # the address at which global memory begins
GAP = 4096  # bytes that belong to nobody, between tensors
POISON = np.uint32(0x7FC17FC1)  # not a number in float32, and twice not one in half precision
ALL_LANES = np.uint32(0xFFFFFFFF)  # an instruction's mask of the threads that take part
MOST_THREADS = 1 << 14  # of all programs that run at once
MANY_WARPS, MANY_PROGRAMS = 255, np.int64(1 << 62)  # in a use: several warps, several programs


class GpuError(Exception):
    """A fault of the kernel: on a GPU an error, or a result that depends on chance."""


class Space:
    """Memory of bytes, with what each of its words was last used for.

    A use is a number: program, barriers of the program so far, and warp (`Machine.who`).
    """

    def __init__(self, n_bytes: int, *, written: bool) -> None:
        self._written = written  # it has its contents before the kernel starts
        self.words = np.full(-(-n_bytes // 16) * 4, POISON, np.uint32)
        self.writers = np.zeros(len(self.words), np.int64)
        self.readers = np.zeros(len(self.words), np.int64)
        # How many unfinished products read a word; -1 if an unfinished copy writes it.
        self.in_flight = np.zeros(len(self.words), np.int16)
        self.unfenced = np.zeros(len(self.words), bool)  # tensor cores may not see what was written

    def read(self, at: Any, size: int, count: int, who: Any | None) -> list[Any]:
        """`count` numbers of so many bytes from each of these offsets on."""
        whole = self.words.view(WORDS[size])
        first = at // size
        found = [whole[first + i] for i in range(count)]
        if who is not None:
            for word in range(max(size * count // 4, 1)):
                self.note_read(at // 4 + word, who)
        return found

    def write(self, at: Any, size: int, values: Sequence[Any], who: Any | None) -> None:
        """Put these numbers at each of these offsets."""
        whole = self.words.view(WORDS[size])
        first = at // size
        for i, value in enumerate(values):
            if who is not None:
                for word in range(max(size // 4, 1)):
                    cell = (at + i * size) // 4 + word
                    same = whole[first + i] == value
                    self._note_write(cell, who, same, apart=size >= 4)
            whole[first + i] = value
            if who is not None:
                lost = (whole[first + i] != value) & (self.writers[(at + i * size) // 4] != who)
                if lost.any() and not agreed(first + i, value, who):
                    raise GpuError("two warps write different numbers to one address at once")

    def note_read(self, cell: Any, who: Any) -> None:
        """These words are read, each by this warp."""
        if conflicts(self.writers[cell], who).any():
            raise GpuError("a number is read that another warp writes, without a barrier between")
        if (self.in_flight[cell] < 0).any():
            raise GpuError("the target of a copy is read that was not waited for")
        if not self._written and not self.writers[cell].all():
            raise GpuError("memory is read that nobody wrote")
        seen = merged(self.readers[cell], who)
        self.readers[cell] = seen
        # Of several warps that read one word at once, NumPy keeps the last. Repeat for the others.
        while (missing := merged(kept := self.readers[cell], seen) != kept).any():
            self.readers[cell[missing]] = merged(kept, seen)[missing]

    def _note_write(self, cell: Any, who: Any, same: Any, apart: bool) -> None:
        if (conflicts(self.readers[cell], who) & ~same).any():
            raise GpuError("a number is written that another warp reads, without a barrier between")
        if apart and (conflicts(self.writers[cell], who) & ~same).any():
            raise GpuError("two warps write a number, without a barrier between")
        if self.in_flight[cell].any():
            raise GpuError("memory is written that a copy or a product in flight uses")
        self.writers[cell] = who
        self.unfenced[cell] = True


def agreed(at: Any, value: Any, who: Any) -> bool:
    """Whether all warps that write to an address write the same, each by its last thread.

    Of the threads of one warp, which hold the same sum rounded differently, a GPU takes one.
    """
    pairs = np.stack([at, who])[:, ::-1]
    _, last = np.unique(pairs, axis=1, return_index=True)
    places, numbers = at[::-1][last], value[::-1][last]
    order = np.argsort(places, kind="stable")
    places, numbers = places[order], numbers[order]
    return not ((places[1:] == places[:-1]) & (numbers[1:] != numbers[:-1])).any()


def conflicts(old: Any, new: Any) -> Any:
    """Whether a use of memory was by another program, or by another warp since the last barrier.

    0 stands for no use yet.
    """
    other_program = (old >> 40) != (new >> 40)
    same_time = (old >> 8) == (new >> 8)
    return (old != 0) & (old != new) & (other_program | same_time)


def merged(old: Any, new: Any) -> Any:
    """Who has read a word, after one more has."""
    both = np.where((old >> 8) == (new >> 8), new | MANY_WARPS, new)
    other = (old != 0) & ((old >> 40) != (new >> 40))
    return np.where(old == new, new, np.where(other, MANY_PROGRAMS, both))


class GlobalMemory:
    """The tensors of a launch, side by side with gaps between them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        spans = sorted(span_of(x) for x in tensors if x.numel())
        joined: list[list[int]] = []
        for start, stop in spans:
            if joined and start < joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], stop)
            else:
                joined.append([start, stop])
        self._parts: list[tuple[int, int, int]] = []  # real address, bytes, offset here
        end = GAP
        for start, stop in joined:
            end += start % 512
            self._parts.append((start, stop - start, end))
            end = -(-(end + stop - start + GAP) // 512) * 512
        self.space = Space(end, written=True)
        valid = np.zeros(4 * len(self.space.words), bool)
        for start, size, offset in self._parts:
            self._bytes(offset, size)[:] = real(start, size)
        for x in tensors:
            if x.numel():
                size = x.element_size()
                strides = [*(size * stride for stride in x.stride()), 1]
                first = valid[self.address(x) - BASE :]
                as_strided(first, (*x.shape, size), strides)[...] = True
        # Whether all bytes of a place belong to tensors, for each size of an aligned access.
        self.valid = {size: valid.reshape(-1, size).all(1) for size in (1, 2, 4, 8, 16)}

    def address(self, x: Tensor) -> int:
        """Where a tensor is."""
        for start, size, offset in self._parts:
            if start <= x.data_ptr() < start + size:
                return BASE + offset + x.data_ptr() - start
        return BASE  # of a tensor without elements

    def give_back(self) -> None:
        """Write everything into the tensors."""
        for start, size, offset in self._parts:
            real(start, size)[:] = self._bytes(offset, size)

    def offsets(self, address: Any, size: int, what: str) -> Any:
        """Checked offsets of addresses."""
        at = address.astype(np.int64) - BASE
        if ((at < 0) | (at + size > len(self.valid[1]))).any():
            raise GpuError(f"{what} far outside of all tensors")
        if (at % size).any():
            raise GpuError(f"{what} of {size} bytes at an address that is no multiple of them")
        if not self.valid[size][at // size].all():
            raise GpuError(f"{what} outside of all tensors")
        return at

    def _bytes(self, offset: int, size: int) -> Any:
        return self.space.words.view(np.uint8)[offset : offset + size]


def span_of(x: Tensor) -> tuple[int, int]:
    """The addresses that a tensor lies between."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def real(address: int, size: int) -> Any:
    """The bytes at an address of this process."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


class Port:
    """How threads reach one of the two memories."""

    def __init__(self, machine: "Machine", space: Space) -> None:
        self._machine, self._space = machine, space

    def load(
        self, address: Any, mask: Any, size: int, count: int, constant: bool = False
    ) -> list[Any]:
        """`count` numbers from each address; 0 for a thread that the mask leaves out."""
        machine = self._machine
        all_ = mask.all()
        there = slice(None) if all_ else np.flatnonzero(mask)
        at = self.offsets(address, there, size * count, "a load")
        if constant and self._space.writers[cells_of(at, size * count)].any():
            raise GpuError("a number is read as constant that this kernel wrote")
        found = self._space.read(at, size, count, machine.who(there))
        if all_:
            return found
        results = []
        for x in found:
            whole = np.zeros(machine.lanes, x.dtype)
            whole[there] = x
            results.append(whole)
        return results

    def store(self, address: Any, mask: Any, size: int, values: Sequence[Any]) -> None:
        """Store these numbers side by side at each address of the mask."""
        there = np.flatnonzero(mask)
        at = self.offsets(address, there, size * len(values), "a store")
        given = [np.broadcast_to(x, self._machine.lanes)[there] for x in values]
        self._space.write(at, size, given, self._machine.who(there))

    def offsets(self, address: Any, there: Any, size: int, what: str) -> Any:
        """The places of addresses in the memory."""
        raise NotImplementedError


class GlobalPort(Port):
    def offsets(self, address: Any, there: Any, size: int, what: str) -> Any:
        whole = np.broadcast_to(address, self._machine.lanes)
        if not self._machine.may_touch[there].all():
            raise GpuError(f"{what} before the wait for the kernel before")
        return self._machine.memory.offsets(whole[there], size, what)


class SharedPort(Port):
    def offsets(self, address: Any, there: Any, size: int, what: str) -> Any:
        machine = self._machine
        at = np.broadcast_to(address, machine.lanes)[there].astype(np.int64)
        if (at + size > machine.shared_bytes).any():
            raise GpuError(f"{what} beyond {machine.shared_bytes} bytes of shared memory")
        if (at % size).any():
            raise GpuError(
                f"{what} of {size} bytes at a shared address that is no multiple of them"
            )
        return at + machine.first_byte[there]


class Machine:
    """The programs of one launch."""

    def __init__(
        self,
        kernel: Kernel,
        memory: GlobalMemory,
        *,
        shared: int,
        threads: int,
        grid: tuple[int, int, int],
        params: Sequence[Any],
        checked: bool = True,
    ) -> None:
        self.kernel, self.memory, self.grid, self.threads = kernel, memory, grid, threads
        self.checked = checked
        self.params = dict(zip(kernel.params, params, strict=True))
        self.places, end = {}, 0
        for name, size in kernel.shared.items():
            self.places[name] = end
            end = -(-(end + size) // 16) * 16
        self.places[""] = -(-end // 128) * 128  # Triton's own
        self.shared_bytes = -(-(self.places[""] + shared) // 16) * 16

    def run(self) -> None:
        """Run all programs, some of them side by side."""
        x, y, z = self.grid
        numbers = np.arange(x * y * z)
        at_once = max(1, MOST_THREADS // self.threads)
        for start in range(0, len(numbers), at_once):
            self._run(numbers[start : start + at_once])

    def _run(self, programs: Any) -> None:
        threads, (x, y, _) = self.threads, self.grid
        self.lanes = len(programs) * threads
        self.all, self.none = np.ones(self.lanes, bool), np.zeros(self.lanes, bool)
        program = np.repeat(programs, threads)
        tid = np.tile(np.arange(threads), len(programs))
        self.special: dict[str, Any] = {"%tid.y": tid * 0, "%tid.z": tid * 0, "%tid.x": tid}
        self.special |= {"%ctaid.x": program % x, "%ctaid.y": program // x % y}
        self.special |= {"%ctaid.z": program // (x * y), "%laneid": tid % 32, "%warpid": tid // 32}
        for axis, count in zip("xyz", self.grid, strict=True):
            self.special[f"%nctaid.{axis}"] = tid * 0 + count
        self.special["%ntid.x"] = tid * 0 + threads
        self.special = {name: value.astype(np.uint32) for name, value in self.special.items()}
        self.first_byte = np.repeat(np.arange(len(programs)) * self.shared_bytes, threads)
        self._program = (program.astype(np.int64) + 1) << 40
        self._warp = (tid // 32 + 1).astype(np.int64)
        self._epoch = np.ones(self.lanes, np.int64)  # barriers of the program, so far
        self._shared = Space(len(programs) * self.shared_bytes, written=False)
        self.of_shared = SharedPort(self, self._shared)
        self.of_global = GlobalPort(self, self.memory.space)
        self._copies: list[tuple[Any, Any, Any, Any, int]] = []
        self._committed = np.zeros(self.lanes, np.int64)
        self._products: list[tuple[Any, Any, Any]] = []  # in flight: groups, their numbers, words
        self._products_committed = np.zeros(self.lanes // 128, np.int64)
        self.may_touch = self.none.copy() if self.kernel.waits else self.all  # global memory
        self.waiting = self.none.copy()
        sizes = {0: bool, **WORDS}
        registers = [np.zeros(self.lanes, sizes[size]) for size in self.kernel.registers]
        place = np.zeros(self.lanes, np.int64)
        blocks = self.kernel.blocks
        with np.errstate(all="ignore"):
            while True:
                ready = ~self.waiting & (place < END)
                if not ready.any():
                    if not self.waiting.any():
                        return self._end()
                    self._release(place)
                    continue
                number = place[ready].min()
                active = ready & (place == number)
                whole = bool(active.all())
                try:
                    following = blocks[number](registers, self, active, whole)
                except GpuError as error:
                    raise GpuError(f"{self.kernel.name}, block {number}: {error}") from None
                place[active] = following if isinstance(following, int) else following[active]

    def _end(self) -> None:
        if self._copies or self._products:
            raise GpuError(f"{self.kernel.name} ends with a copy or a product in flight")

    def _release(self, place: Any) -> None:
        """Let all go on that wait, which are all that have not ended."""
        places = place.reshape(-1, self.threads)
        if (places != places[:, :1]).any():
            raise GpuError(f"{self.kernel.name}: threads of a program wait at different barriers")
        self._epoch[self.waiting] += 1
        self.waiting[:] = False

    def who(self, there: Any) -> Any | None:
        """Program, barriers so far and warp of these threads, in one number."""
        if not self.checked:
            return None
        return (self._program | (self._epoch << 8) | self._warp)[there]

    # What instructions call.

    def everywhere(self, value: Any) -> Any:
        """The number in every thread."""
        return np.full(self.lanes, value)

    def param(self, name: str, dtype: Any) -> Any:
        """An argument of the kernel in every thread."""
        value = self.params[name]
        bits = np.dtype(dtype).itemsize * 8
        if isinstance(value, int) and np.dtype(dtype).kind != "f":
            return np.full(self.lanes, np.array(value % (1 << bits), f"uint{bits}").view(dtype))
        if np.dtype(dtype).kind != "f":  # a float32 that is loaded as bits
            value = np.float32(value).view(np.uint32)
        return np.full(self.lanes, value, dtype)

    def reserved(self, name: str, dtype: Any) -> Any:
        """The address of shared memory that assembly reserved, or of Triton's own."""
        return np.full(self.lanes, self.places[name], dtype)

    def arrive(self, mask: Any) -> None:
        """Wait for all threads of the program."""
        self.whole_warps(mask)
        self.waiting |= mask

    def whole_warps(self, mask: Any, members: Any = ALL_LANES) -> None:
        """All threads of a warp, or none, must run an instruction, and it must name them all."""
        if (np.broadcast_to(members, self.lanes)[mask] != ALL_LANES).any():
            raise GpuError("an instruction for a part of a warp")
        warps = mask.reshape(-1, 32)
        if (warps.any(1) != warps.all(1)).any():
            raise GpuError("some threads of a warp miss an instruction of the whole warp")

    def commit(self, mask: Any) -> None:
        """The copies so far are a group."""
        self._committed[mask] += 1

    def copy(self, to: Any, source: Any, mask: Any, size: int, count: Any) -> None:
        """Copy later; until it is waited for, what is there is not a number."""
        there = np.flatnonzero(mask)
        at = self.of_shared.offsets(to, there, size, "a copy")
        words = np.zeros((size // 4, len(there)), np.uint32)
        some = np.arange(len(there))
        if count is not None:
            given = np.broadcast_to(count, self.lanes)[there]
            if ((given != 0) & (given != size)).any():
                raise GpuError("a copy of a part")
            some = np.flatnonzero(given)
        if len(some):
            origin = self.of_global.offsets(source, there[some], size, "a copy")
            who = self.who(there[some])
            words[:, some] = self.memory.space.read(origin, 4, size // 4, who)
        poison = [np.full(len(there), POISON)] * (size // 4)
        self._shared.write(at, 4, poison, self.who(there))
        if self.checked:
            self._shared.in_flight[cells_of(at, size)] = -1
        self._copies.append((there, self._committed[there], at, words, size))

    def wait_copies(self, mask: Any, but: int) -> None:
        """Wait for all groups of copies but the last ones."""
        left = []
        for there, group, at, words, size in self._copies:
            done = mask[there] & (group < self._committed[there] - but)
            if done.any():
                who = self.who(there[done])
                self._shared.in_flight[cells_of(at[done], size)] = 0
                self._shared.write(at[done], 4, list(words[:, done]), who)
                self._shared.unfenced[cells_of(at[done], size)] = False
            if not done.all():
                left.append((there[~done], group[~done], at[~done], words[:, ~done], size))
        self._copies = left

    def shuffled(self, mask: Any, how: str, x: Any, lane: Any, members: Any) -> Any:
        """Every thread gets the number of another one of its warp."""
        self.whole_warps(mask, members)
        x = np.broadcast_to(x, self.lanes)
        lane = np.broadcast_to(lane, self.lanes).astype(np.int64)
        own = self.special["%laneid"].astype(np.int64)
        of = {"bfly": own ^ lane, "idx": lane}[how] & 31
        return x[np.arange(self.lanes) // 32 * 32 + of]

    def reduced(self, mask: Any, how: str, x: Any, members: Any) -> Any:
        """Every thread gets the sum, or the like, of its warp."""
        self.whole_warps(mask, members)
        functions = {"min": np.min, "max": np.max, "add": np.sum}
        warps = np.broadcast_to(x, self.lanes).reshape(-1, 32)
        return np.repeat(functions[how](warps, axis=1), 32).astype(x.dtype)

    # Matrices of 8 x 8 numbers of 16 bits, and tensor cores.

    def _rows(self, address: Any, mask: Any, count: int) -> tuple[Any, Any]:
        """The warps of a mask, and [warp, matrix, row]: offsets in shared memory."""
        self.whole_warps(mask)
        warps = np.flatnonzero(mask.reshape(-1, 32).any(1))
        there = (warps[:, None] * 32 + np.arange(8 * count)).ravel()
        at = self.of_shared.offsets(address, there, 16, "a matrix")
        return warps, at.reshape(len(warps), count, 8)

    def matrices(self, mask: Any, address: Any, count: int, turned: bool) -> list[Any]:
        """Each matrix as pairs: thread t has two neighbours of row t / 4, or of column t / 4."""
        warps, at = self._rows(address, mask, count)
        lane = np.arange(32)
        results = []
        for i in range(count):
            flat = at[:, i].ravel()
            who = self.who(np.repeat(warps * 32, 8))
            words = self._shared.read(flat, 4, 4, who)  # [word][warp, row]
            matrix = np.stack(words, -1).view(np.uint16).reshape(len(warps), 8, 8)
            if turned:
                matrix = matrix.transpose(0, 2, 1)
            pairs = np.ascontiguousarray(matrix).view(np.uint32)[:, lane // 4, lane % 4]
            whole = np.zeros((self.lanes // 32, 32), np.uint32)
            whole[warps] = pairs
            results.append(whole.ravel())
        return results

    def store_matrices(self, mask: Any, address: Any, values: list[Any], turned: bool) -> None:
        """The reverse of `matrices`."""
        warps, at = self._rows(address, mask, len(values))
        for i, value in enumerate(values):
            pairs = np.ascontiguousarray(np.broadcast_to(value, self.lanes)).reshape(-1, 32)[warps]
            matrix = pairs.reshape(len(warps), 8, 4).view(np.uint16)
            if turned:
                matrix = np.ascontiguousarray(matrix.transpose(0, 2, 1))
            words = np.ascontiguousarray(matrix).view(np.uint32).reshape(-1, 4)
            who = self.who(np.repeat(warps * 32, 8))
            self._shared.write(at[:, i].ravel(), 4, list(words.T), who)

    def product(self, mask: Any, kind: str, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
        """Tensor cores: [16, k] times [k, 8], plus what is there, in each warp."""
        self.whole_warps(mask)
        first, second = tile_of(a, kind, self.lanes), tile_of(b, kind, self.lanes)
        depth = 8 * len(b) * (2 if kind != "tf32" else 1) // 2
        left = np.zeros((self.lanes // 32, 16, depth))
        right = np.zeros((self.lanes // 32, depth, 8))
        lane, per = np.arange(32), 2 if kind != "tf32" else 1
        for i, x in enumerate(first):  # registers go down the rows, then to the right
            for j in range(per):
                column = lane % 4 * per + j + i // 2 * 4 * per
                left[:, lane // 4 + i % 2 * 8, column] = x[..., j]
        for i, x in enumerate(second):
            for j in range(per):
                right[:, lane % 4 * per + j + i * 4 * per, lane // 4] = x[..., j]
        total = left @ right
        results = []
        for i, x in enumerate(c):
            row, column = lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2
            results.append(chopped(x.reshape(-1, 32) + total[:, row, column]).ravel())
        return results

    def fence(self, mask: Any) -> None:
        """Show the tensor cores what these warps wrote, and what was written before the barrier.

        The barrier is the last one that their program passed.
        """
        if not self.checked:
            return
        fencing = np.zeros((self.lanes // self.threads, 256), bool)  # [program, warp]
        fencing[np.flatnonzero(mask) // self.threads, self._warp[mask]] = True
        cells = np.flatnonzero(self._shared.unfenced)
        program, writers = cells // (self.shared_bytes // 4), self._shared.writers[cells]
        earlier = (writers >> 8) < ((self._program | (self._epoch << 8)) >> 8)[
            program * self.threads
        ]
        shown = (earlier & fencing.any(1)[program]) | fencing[program, writers & 255]
        self._shared.unfenced[cells[shown]] = False

    def commit_products(self, mask: Any) -> None:
        """The products so far are a group."""
        self._products_committed[whole_groups(mask)] += 1

    def wait_products(self, mask: Any, but: int) -> None:
        """Wait for all groups of products but the last ones. Their numbers are there already."""
        waits = np.zeros(len(self._products_committed), bool)
        waits[whole_groups(mask)] = True
        left = []
        for groups, numbers, cells in self._products:
            done = waits[groups] & (numbers < self._products_committed[groups] - but)
            np.subtract.at(self._shared.in_flight, cells[done], 1)
            if not done.all():
                left.append((groups[~done], numbers[~done], cells[~done]))
        self._products = left

    def warpgroup_product(
        self,
        mask: Any,
        shape: str,
        kind: str,
        a: Any,
        b: Any,
        turns: list[int],
        c: list[Any],
        on: Any,
    ) -> list[Any]:
        """Tensor cores of four warps: [64, k] times [k, n], with the operands in shared memory."""
        whole_groups(mask)
        n, depth = (int(x) for x in re.findall(r"[nk](\d+)", shape))
        count = self.lanes // 128
        per = 2 if kind != "tf32" else 1
        lane = np.arange(128)
        if isinstance(a, list):
            left = np.zeros((count, 64, depth))
            for i, x in enumerate(tile_of(a, kind, self.lanes)):
                x = x.reshape(count, 128, per)
                for j in range(per):
                    row = lane // 32 * 16 + lane % 32 // 4 + i % 2 * 8
                    left[:, row, lane % 4 * per + j + i // 2 * 4 * per] = x[..., j]
        else:
            left = self._operand(a, mask, kind, 64, depth, bool(turns[0]))
        right = self._operand(b, mask, kind, n, depth, bool(turns[1]))
        total = left @ right.transpose(0, 2, 1)
        results = []
        for i, x in enumerate(c):
            row = lane // 32 * 16 + lane % 32 // 4 + i % 4 // 2 * 8
            column = i // 4 * 8 + lane % 4 * 2 + i % 2
            before = np.where(on, x, np.float32(0)).reshape(count, 128)
            results.append(chopped(before + total[:, row, column]).ravel())
        return results

    def _operand(
        self, descriptor: Any, mask: Any, kind: str, rows: int, depth: int, turned: bool
    ) -> Any:
        """A matrix [group, row, depth] in shared memory, laid out as a descriptor says."""
        size = 2 if kind != "tf32" else 4
        given = np.broadcast_to(descriptor, self.lanes).reshape(-1, 128)
        descriptor = given[:, 0].astype(np.uint64)
        groups = whole_groups(mask)
        if (given[groups] != given[groups, :1]).any():
            raise GpuError("threads of four warps give different operands")

        def bits(first: int, count: int) -> Any:
            return ((descriptor >> np.uint64(first)) & np.uint64((1 << count) - 1)).astype(np.int64)

        start, leading, stride = (bits(x, 14)[:, None, None] * 16 for x in (0, 16, 32))
        swizzle = bits(62, 2)
        width = {0: 16, 1: 128, 2: 64, 3: 32}
        found = set(swizzle[groups].tolist())
        if len(found) != 1 or bits(49, 3)[groups].any():
            raise GpuError("programs lay out an operand in different ways, or from an offset on")
        (how,) = found
        pitch = width[how]  # bytes of a row of the pattern
        row, k = np.arange(rows)[None, :, None], np.arange(depth)[None, None, :]
        if how == 0:
            if turned:
                raise GpuError("a turned operand without a pattern")
            at = row // 8 * stride + row % 8 * 16 + k * size // 16 * leading + k * size % 16
        elif turned:
            per = pitch // size
            at = row // per * leading + k // 8 * stride + k % 8 * pitch + row % per * size
        else:
            at = row // 8 * stride + row % 8 * pitch + k * size
        at = start + at
        if how:
            at = at ^ ((at >> 7 & (pitch // 16 - 1)) << 4)
        at = at[groups]
        if (at + size > self.shared_bytes).any() or (at < 0).any():
            raise GpuError("an operand beyond shared memory")
        at = at + self.first_byte[groups * 128][:, None, None]
        if self.checked:
            words = at if size == 4 else at[:, ::2] if turned else at[:, :, ::2]
            self._reads_until_waited(groups, words.reshape(len(groups), -1) // 4)
        (numbers,) = self._shared.read(at.ravel(), size, 1, None)
        whole = np.zeros((self.lanes // 128, rows, depth))
        whole[groups] = as_numbers(numbers, kind).reshape(len(groups), rows, depth)
        return whole

    def _reads_until_waited(self, groups: Any, cells: Any) -> None:
        """All four warps of each group read these words until the product is waited for."""
        who = self.who(groups * 128)
        assert who is not None
        self._shared.note_read(cells.ravel(), np.repeat(who | MANY_WARPS, cells.shape[1]))
        if self._shared.unfenced[cells].any():
            raise GpuError("tensor cores read what was written without a fence since")
        np.add.at(self._shared.in_flight, cells, 1)
        self._products.append((groups, self._products_committed[groups], cells))


def cells_of(at: Any, size: int) -> Any:
    """The words of so many bytes from each offset on."""
    return (at // 4)[:, None] + np.arange(max(size // 4, 1))


def whole_groups(mask: Any) -> Any:
    """The groups of four warps in a mask, of which no thread may be missing."""
    groups = mask.reshape(-1, 128)
    if (groups.any(1) != groups.all(1)).any():
        raise GpuError("some threads of four warps miss an instruction of them all")
    return np.flatnonzero(groups[:, 0])


def chopped(x: Any) -> Any:
    """As float32, rounded towards 0."""
    found = x.astype(np.float32)
    return np.where(np.abs(found) > np.abs(x), np.nextafter(found, np.float32(0)), found)


def as_numbers(x: Any, kind: str) -> Any:
    """Bits as numbers of a type of tensor cores."""
    if kind == "bf16":
        return from_bf16(x).astype(np.float64)
    if kind == "f16":
        return x.view(np.float16).astype(np.float64)
    return (x & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def tile_of(registers: list[Any], kind: str, lanes: int) -> list[Any]:
    """Registers as numbers [warp, thread, 2 or 1]."""
    found = []
    for x in registers:
        x = np.ascontiguousarray(np.broadcast_to(x, lanes))
        x = x if kind == "tf32" else x.view(np.uint16)
        found.append(as_numbers(x, kind).reshape(lanes // 32, 32, -1))
    return found
