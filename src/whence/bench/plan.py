"""Which points a benchmark measures, and in which order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from whence.bench.contenders import CONTENDERS, PEERS
from whence.bench.point import DTYPES, MODES, Point
from whence.checks import at_least, one_of, require
from whence.kernels import BACKENDS

METHODS = ("tisa:kernels=5", "t5", "alibi", "kerple", "shaw:clip=16")


@dataclass(frozen=True)
class Plan:
    """The product of all lists; a batch has `tokens` tokens, at least one sequence.

    Decoding is measured with one sequence and with `tokens` / 1,024 of them, at least two.
    """

    device: str
    methods: tuple[str, ...] = METHODS
    backends: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = tuple(PEERS)
    modes: tuple[str, ...] = tuple(MODES)
    lengths: tuple[int, ...] = (512, 2048, 8192, 16_384)
    head_sizes: tuple[int, ...] = (64,)
    n_heads: int = 12
    tokens: int = 16_384
    dtype: str = "bfloat16"
    causal: bool = False

    def __post_init__(self) -> None:
        for name, values, allowed in (
            ("backend", self.backends, ("auto", *BACKENDS)),
            ("peer", self.peers, tuple(PEERS)),
            ("mode", self.modes, tuple(MODES)),
            ("dtype", (self.dtype,), tuple(DTYPES)),
        ):
            for value in values:
                one_of(name, value, allowed)
        at_least(1, n_heads=self.n_heads, tokens=self.tokens)
        for n, d in product(self.lengths, self.head_sizes):
            at_least(1, length=n, head_size=d)
        require(
            bool(self.methods and self.modes and self.lengths and self.head_sizes),
            "there is nothing to measure: methods, modes, lengths and head sizes need one each.",
        )

    def points(self) -> Iterator[Point]:
        """Problem by problem, so that contenders run one after another; short ones first."""
        for n, d, mode in product(sorted(self.lengths), self.head_sizes, self.modes):
            for batch in self._batches(mode, n):
                for method, names in self._problems():
                    for name in names:
                        yield Point(
                            name,
                            method,
                            n,
                            mode=mode,
                            d_head=d,
                            n_heads=self.n_heads,
                            batch=batch,
                            dtype=self.dtype,
                            causal=self.causal,
                            device=self.device,
                        )

    def _problems(self) -> Iterator[tuple[str, Sequence[str]]]:
        here = [name for name in self.peers if self.device in CONTENDERS[name].devices]
        limits = [name for name in here if not CONTENDERS[name].positioned]
        if limits:
            yield "nope", limits
        ours = [f"whence:{name}" for name in self.backends]
        rivals = [name for name in here if CONTENDERS[name].positioned]
        for method in self.methods:
            yield method, [*ours, *rivals]  # one that cannot says so in its record

    def _batches(self, mode: str, n: int) -> tuple[int, ...]:
        if mode == "decode":
            return 1, max(2, self.tokens // 1024)
        return (max(1, self.tokens // n),)


def quick(device: str) -> Plan:
    """A minute's worth: one method, two lengths."""
    whole = usual(device)
    on_gpu = device == "cuda"
    return replace(
        whole,
        methods=("tisa:kernels=5",),
        peers=("flash", "cudnn", "eager") if on_gpu else ("plain", "eager"),
        modes=("both",),
        lengths=whole.lengths[:2],
    )


def usual(device: str) -> Plan:
    """What is measured unless options say otherwise: a CPU has less time and memory to give."""
    if device == "cuda":
        return Plan(device)
    return Plan(device, lengths=(256, 512, 1024), tokens=1024, dtype="float32")
