"""Every positional method by name. A new one is one file here and one line in METHODS."""

from whence.checks import at_least, require, unknown
from whence.method import PositionMethod
from whence.methods.alibi import Alibi
from whence.methods.content_band import ContentBand
from whence.methods.cope import Cope
from whence.methods.deberta import Deberta
from whence.methods.fire import Fire
from whence.methods.floater import Floater
from whence.methods.forget import Forget
from whence.methods.kerple import Kerple
from whence.methods.learned import Learned
from whence.methods.nope import Nope
from whence.methods.rope import Rope
from whence.methods.sandwich import Sandwich
from whence.methods.shaw import Shaw
from whence.methods.sinusoidal import Sinusoidal
from whence.methods.spec import instantiate, parse
from whence.methods.sum import Sum
from whence.methods.synthesizer import Synthesizer
from whence.methods.t5 import T5
from whence.methods.table2d import Table2d
from whence.methods.tisa import Tisa
from whence.methods.tisa2 import Tisa2
from whence.methods.tisa2d import Tisa2d
from whence.methods.transformer_xl import TransformerXL
from whence.methods.tupe import Tupe
from whence.methods.xpos import Xpos

__all__ = ["METHODS", "Sum", "build", "build_layers", "counts_once"]

METHODS: dict[str, type[PositionMethod]] = {
    # the nine of Table 1, in its order
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "shaw": Shaw,
    "t5": T5,
    "floater": Floater,
    "synthesizer": Synthesizer,
    "tupe": Tupe,
    "rope": Rope,
    "tisa": Tisa,
    # their successors
    "tisa2": Tisa2,
    "alibi": Alibi,
    "kerple": Kerple,
    "sandwich": Sandwich,
    "fire": Fire,
    "xpos": Xpos,
    "nope": Nope,
    "cope": Cope,
    "forget": Forget,
    "content_band": ContentBand,
    "deberta": Deberta,
    "transformer_xl": TransformerXL,
    "tisa2d": Tisa2d,
    "table2d": Table2d,
}


def build(
    spec: str,
    *,
    n_heads: int,
    d_head: int,
    d_model: int | None = None,
    max_length: int = 512,
    causal: bool = False,
    n_layers: int = 1,
) -> PositionMethod:
    """The method that a text names, for one attention layer of this shape.

    "tisa" · "tisa:kernels=5" · "shaw:clip=16,values=false" · "tisa+rope" (a Sum). An option in the
    text wins over the same name given here: "learned:max_length=1024". d_model defaults to
    n_heads * d_head.

        >>> build("tisa:kernels=5", n_heads=12, d_head=64).n_parameters()
        180
    """
    context = _context(n_heads, d_head, d_model, max_length, causal, n_layers)
    return _sum([instantiate(name, METHODS[name], o, context) for name, o in _named(spec)])


def build_layers(
    spec: str,
    n_layers: int,
    *,
    n_heads: int,
    d_head: int,
    d_model: int | None = None,
    max_length: int = 512,
    causal: bool = False,
) -> tuple[PositionMethod, list[PositionMethod]]:
    """The method that a text names for a whole stack, and what each of its layers sees of it.

    Every layer has parameters of its own, except of a part that `counts_once`: all layers see the
    one instance, or their views of it. The owner of the stack calls `begin` on the whole and adds
    its input term, once. A view has no parameters, so where layer 0 is not the whole itself the
    owner registers the whole too.

        >>> whole, layers = build_layers("t5+tisa", 12, n_heads=12, d_head=64)
        >>> layers[0].parts[0] is layers[1].parts[0], layers[0].parts[1] is layers[1].parts[1]
        (True, False)
    """
    context = _context(n_heads, d_head, d_model, max_length, causal, n_layers)
    wholes, columns = [], []
    for name, options in _named(spec):
        cls = METHODS[name]
        whole = instantiate(name, cls, options, context)
        if counts_once(cls):
            column = [whole.layer(index) for index in range(n_layers)]
        else:
            more = (instantiate(name, cls, options, context) for _ in range(n_layers - 1))
            column = [whole, *more]
        wholes.append(whole)
        columns.append(column)
    layers = [_sum(list(parts)) for parts in zip(*columns, strict=True)]
    if all(whole is column[0] for whole, column in zip(wholes, columns, strict=True)):
        return layers[0], layers
    return _sum(wholes), layers


def counts_once(cls: type[PositionMethod]) -> bool:
    """Whether one instance serves all layers: it is shared, or it enters at the input only.

    >>> [name for name, method in METHODS.items() if counts_once(method)]
    ['sinusoidal', 'learned', 't5', 'floater', 'tupe']
    """
    return cls.shared_by_layers or cls.sites() == ("input",)


def _named(spec: str) -> list[tuple[str, dict[str, str]]]:
    parts = parse(spec)
    for name, _ in parts:
        require(name in METHODS, unknown("method", name, METHODS))
    return parts


def _context(
    n_heads: int, d_head: int, d_model: int | None, max_length: int, causal: bool, n_layers: int
) -> dict[str, int]:
    """What a model tells its methods, by the names that their constructors use."""
    at_least(1, n_heads=n_heads, d_head=d_head, max_length=max_length, n_layers=n_layers)
    return {
        "n_heads": n_heads,
        "d_head": d_head,
        "d_model": n_heads * d_head if d_model is None else d_model,
        "max_length": max_length,
        "causal": causal,
        "n_layers": n_layers,
    }


def _sum(parts: list[PositionMethod]) -> PositionMethod:
    return parts[0] if len(parts) == 1 else Sum(*parts)
