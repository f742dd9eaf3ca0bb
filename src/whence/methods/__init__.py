"""Building methods: the one that a text names, for a layer or for a whole stack."""

from whence.checks import at_least
from whence.method import PositionMethod
from whence.methods.registry import METHODS, named
from whence.methods.spec import check_sizes, instantiate
from whence.methods.sum import Sum

__all__ = ["METHODS", "Sum", "build", "build_layers", "counts_once"]

# What a model tells its methods, by the names that their constructors use.
CONTEXT = ("n_heads", "d_head", "d_model", "max_length", "causal", "n_layers")


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

    "tisa" · "tisa:kernels=5" · "shaw:clip=16,values=false" · "tisa+rope" (a Sum) · a class of your
    own in an imported module, "my_module:Wave" or "my_module:Wave:waves=3". An option in the text
    wins over the same name given here: "learned:max_length=1024". d_model defaults to
    n_heads * d_head.

        >>> build("tisa:kernels=5", n_heads=12, d_head=64).n_parameters()
        180
    """
    context = _context(n_heads, d_head, d_model, max_length, causal, n_layers)
    return _sum([instantiate(*part, context) for part in named(spec)])


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
    for part in named(spec):
        whole = instantiate(*part, context)
        if counts_once(part.cls):
            column = [whole.layer(index) for index in range(n_layers)]
        else:
            more = (instantiate(*part, context) for _ in range(n_layers - 1))
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


def _context(
    n_heads: int, d_head: int, d_model: int | None, max_length: int, causal: bool, n_layers: int
) -> dict[str, int]:
    """CONTEXT, checked."""
    at_least(1, n_heads=n_heads, d_head=d_head, max_length=max_length, n_layers=n_layers)
    context = {
        "n_heads": n_heads,
        "d_head": d_head,
        "d_model": n_heads * d_head if d_model is None else d_model,
        "max_length": max_length,
        "causal": causal,
        "n_layers": n_layers,
    }
    check_sizes(context)
    return context


def _sum(parts: list[PositionMethod]) -> PositionMethod:
    return parts[0] if len(parts) == 1 else Sum(*parts)
