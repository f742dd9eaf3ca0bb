"""The tab *Methods*: one method with any of its numbers moved, as curve, matrix and attention."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.analysis.catalogue import Option, description, options, summary
from whence.analysis.lag_curves import QUANTITIES, curves_of, position_matrix
from whence.app.cards import cards, note, plot_card
from whence.app.svg import Line, draw_lines, draw_matrix
from whence.app.words import D_HEAD, MOST_HEADS, MiniLMWords, RandomWords, Sentence
from whence.checks import require
from whence.colours import INK, SERIES
from whence.method import PositionMethod
from whence.methods import build
from whence.methods.registry import named
from whence.nn.positioned import positioned_attention_with_weights

MOST_POSITIONS, MOST_NUMBERS, MOST_TEXT = 128, 20, 300
MODEST, LARGEST = 1024, 4_000_000  # an option that is no size to count; numbers in a method
DRAWS = 8
LAG = "lag = key \N{MINUS SIGN} query"
RANGES = {"deviation": (0.2, 64.0), "slope": (0.0, 1.0), "p": (0.01, 8.0), "a": (0.01, 8.0)}
WORDS = {"deviation": "width"}
HEADS_LAST = ("table",)  # T5's: buckets first


@dataclass(frozen=True)
class Choice:
    """All that the user set: the method's text, numbers moved, and what to show of it."""

    spec: str
    moved: Mapping[str, Any]  # "1:amplitude:2" -> value: head, name, place; see `Control`
    n_heads: Any = 4  # whole numbers, which are checked here
    head: Any = 1
    n: Any = 48
    causal: bool = False

    def __post_init__(self) -> None:
        check_text(self.spec)
        for name, value, most in (
            ("number of heads", self.n_heads, MOST_HEADS),
            ("number of positions", self.n, MOST_POSITIONS),
        ):
            require(
                _whole(value) and 1 <= value <= most,
                f"the {name} must be a whole number from 1 to {most}, got {value!r}.",
            )
        require(
            _whole(self.head) and 1 <= self.head <= self.n_heads,
            f"there is no head {self.head!r}: the method has {self.n_heads}.",
        )


def check_text(spec: str) -> None:
    """A method's text must not be empty or long."""
    require(
        0 < len(spec) <= MOST_TEXT,
        f"a method is a text of at most {MOST_TEXT} letters, such as tisa:kernels=5.",
    )


@dataclass(frozen=True)
class Control:
    """One thing to move: a slider, a box to tick, a list to choose from or a text."""

    key: str  # the name of an option, or head:name:place of a number of a head
    label: str
    kind: str  # slider, power (a slider of the exponent), tick, list or text
    value: Any
    low: int | float = 0.0
    high: int | float = 1.0
    step: int | float = 1.0
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """A method by its name, who published it, its formula, and its options."""

    name: str
    paper: str
    formula: str
    controls: tuple[Control, ...]
    defaults: Mapping[str, str]


def form(spec: str) -> Form:
    """What a method is, and its options as controls, at the values that the text gives them.

    A sum of methods has no controls: its options are part of its text.
    """
    check_text(spec)
    parts = named(spec)
    if len(parts) > 1:
        return Form(spec, "the terms of its parts add up", "", (), {})
    ((name, cls, given),) = parts
    known = options(cls)
    formula = description(cls).partition("\n\n")[0]
    return Form(
        name,
        summary(cls).partition(": ")[0],
        " ".join(formula.split()),
        tuple(_control(option, given.get(option.name, option.default)) for option in known),
        {option.name: option.default for option in known},
    )


def written(name: str, chosen: Mapping[str, Any], defaults: Mapping[str, str]) -> str:
    """The text of a method with these options, those left out that have their default."""
    shown = {key: _plain(value) for key, value in chosen.items()}
    listed = [
        f"{key}={text}" for key, text in shown.items() if not _same(text, defaults.get(key, ""))
    ]
    return f"{name}:{','.join(listed)}" if listed else name


def number_controls(choice: Choice) -> tuple[str, tuple[Control, ...]]:
    """The learned or fixed numbers of the chosen head as sliders; or why there are none."""
    method = built(choice)
    controls: list[Control] = []
    for name, value in numbers(method, choice.n_heads).items():
        own = _of_head(name, value, choice.head)
        for place, each in enumerate(own.flatten().tolist()):
            low, high = RANGES.get(name, (0.0, 0.0))
            size = max(4.0, math.ceil(2.0 * abs(each)))
            low, high = (low, max(high, math.ceil(each))) if high > low else (-size, size)
            if "offset" in name:
                low, high = -float(choice.n), float(choice.n)
            count = f" {place + 1}" if own.numel() > 1 else ""
            label = f"{WORDS.get(name, name).replace('_', ' ')}{count}"
            step = 0.01 if high - low < 40 else 0.1
            controls.append(
                Control(
                    f"{choice.head}:{name}:{place}",
                    label,
                    "slider",
                    round(each, 3),
                    low,
                    high,
                    step,
                )
            )
    if not controls:
        return "This method has no numbers of a head to move.", ()
    if len(controls) > MOST_NUMBERS:
        why = f"A head has {len(controls)} numbers here, too many for sliders: {MOST_NUMBERS} fit."
        return why, ()
    return "", tuple(controls)


def built(choice: Choice) -> PositionMethod:
    """The method as chosen, with the numbers of the chosen head moved."""
    length = 2 * choice.n + 1
    shape = {"n_heads": choice.n_heads, "d_head": D_HEAD, "max_length": length}
    if any(_large(text) for part in named(choice.spec) for text in part.options.values()):
        with torch.device("meta"):  # takes a second the first time, for it imports a compiler
            sketch = build(choice.spec, causal=choice.causal, **shape)
        held = sum(x.numel() for x in (*sketch.parameters(), *sketch.buffers()))
        require(
            held <= LARGEST,
            f"{choice.spec} would hold {held:,} numbers; at most {LARGEST:,} can be shown.",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = build(choice.spec, causal=choice.causal, **shape)
    return _moved(method, choice)


def numbers(method: PositionMethod, n_heads: int) -> dict[str, Tensor]:
    """The numbers that a method has for each head, or for all of them, by their attributes.

    They are in the units of the method's formula. Vectors that meet content are left out.
    """
    found = {}
    held: dict[str, Tensor] = dict(method.named_parameters(recurse=False))
    slope = dict(method.named_buffers(recurse=False)).get("slope")
    if slope is not None:
        held["slope"] = slope
    for stored, parameter in held.items():
        name = stored.removeprefix("raw_").removeprefix("held_")
        if not hasattr(method, name) or parameter.ndim > 2:
            continue
        if name in HEADS_LAST:
            fits = parameter.ndim == 2 and parameter.shape[-1] == n_heads and stored != name
        else:
            fits = parameter.ndim == 0 or parameter.shape[0] == n_heads
        if fits:
            found[name] = getattr(method, name).detach().clone()
    return found


def drawn(choice: Choice, text: str, words: MiniLMWords | RandomWords) -> str:
    """Curve, matrix, and the attention of a sentence without and with the method."""
    method = built(choice)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # Once for all that follows, in the grad mode and with the numbers of what follows: FLOATER
        # solves its equation here, and would else solve it again for every curve and matrix.
        method.begin(2 * choice.n + 1)
        curve, site = _curve(method, choice)
        matrix = _matrix(method, choice)
        torch.manual_seed(0)
        sentence = words.read(text)
        attention = _attention(method, choice, sentence, words)
    remarks = note(f"Site: {site or 'none'}. {words.about}")
    return cards(curve, matrix, *attention) + _repetition(sentence.tokens) + remarks


def _curve(method: PositionMethod, choice: Choice) -> tuple[str, str]:
    reach = choice.n - 1 or 1
    curves = curves_of(
        method,
        name=choice.spec,
        n_heads=choice.n_heads,
        d_head=D_HEAD,
        reach=reach,
        draws=DRAWS,
        causal=choice.causal,
    )
    lag, mean = curves.lag.numpy(), curves.mean.expand(choice.n_heads, -1)
    require(not bool(mean.isinf().any()), f"{choice.spec} is infinite at some lags: move less.")
    alike = bool(torch.allclose(mean, mean[:1].expand_as(mean), equal_nan=True))
    lines = []
    for head in range(1 if alike else choice.n_heads):
        colour, _, dash = SERIES[head % len(SERIES)]
        chosen = head + 1 == choice.head or alike
        values = mean[head].numpy()
        low = high = None
        if chosen and curves.spread is not None:
            spread = curves.spread.expand(choice.n_heads, -1)[head].numpy()
            low, high = values - spread, values + spread
        lines.append(
            Line(
                "every head" if alike else f"head {head + 1}",
                lag,
                values,
                colour=INK if alike else colour,
                dash="-" if chosen else dash,
                width=2.8 if chosen else 1.1,
                low=low,
                high=high,
            )
        )
    detail = "band: spread over random content" if curves.spread is not None else ""
    drawing = draw_lines(
        lines,
        title=f"By lag: {curves.quantity}",
        detail=detail,
        x_name=LAG,
        y_name="logits" if curves.site in ("score", "replace") else "value",
        height=370,
    )
    return plot_card(drawing, name="lag-curve"), curves.site


def _matrix(method: PositionMethod, choice: Choice) -> str:
    site, every = position_matrix(
        method, n_heads=choice.n_heads, d_head=D_HEAD, n=choice.n, causal=choice.causal
    )
    drawing = draw_matrix(
        every[choice.head - 1].numpy(),
        title=f"Position by position, head {choice.head}",
        detail=QUANTITIES.get(site, "no positional term"),
        what="logits" if site in ("score", "replace") else "value",
    )
    return plot_card(drawing, name="matrix")


def _repetition(tokens: tuple[str, ...]) -> str:
    """Why attention needs position, where the sentence shows it."""
    for token in tokens:
        places = [place for place, other in enumerate(tokens) if other.lower() == token.lower()]
        if len(places) > 1:
            first, second = places[0] + 1, places[1] + 1
            return note(
                f"\N{LEFT DOUBLE QUOTATION MARK}{token}\N{RIGHT DOUBLE QUOTATION MARK} is word "
                f"{first} and word {second}. Without position both rows are the same: attention "
                "cannot tell them apart. (Under a causal mask they see other keys.)"
            )
    return ""


def _attention(
    method: PositionMethod,
    choice: Choice,
    sentence: Sentence,
    words: MiniLMWords | RandomWords,
) -> tuple[str, str]:
    n = len(sentence.tokens)
    pos, causal = torch.arange(n), choice.causal or method.causal_only
    nope = build("nope", n_heads=choice.n_heads, d_head=D_HEAD)
    maps = []
    for each in (nope, method):
        x = sentence.x[..., : choice.n_heads * D_HEAD]
        added = each.input_term(pos)
        full = sentence.x.clone()
        if added is not None:
            full[..., : added.shape[-1]] += added
            x = full[..., : choice.n_heads * D_HEAD]
        q, k = (part[:, : choice.n_heads] for part in words.heads(full))
        _, weights = positioned_attention_with_weights(
            each, q, k, torch.zeros_like(k), x_q=x, x_k=x, causal=causal
        )
        maps.append(weights[0, choice.head - 1].numpy())
    top = max(float(each.max()) for each in maps)
    titles = ("Attention without position", f"Attention with {choice.spec}")
    bare, with_position = (
        plot_card(
            draw_matrix(
                each,
                title=title,
                detail=f"head {choice.head}, rows add up to 1",
                what="weight",
                names=sentence.tokens,
                limits=(0.0, top),
            ),
            name=name,
        )
        for each, title, name in zip(
            maps, titles, ("attention-without", "attention-with"), strict=True
        )
    )
    return bare, with_position


def _moved(method: PositionMethod, choice: Choice) -> PositionMethod:
    """The method itself, some of its numbers replaced; those of another method do not matter."""
    known = numbers(method, choice.n_heads) if choice.moved else {}
    for key, value in choice.moved.items():
        head, name, place = key.split(":")
        require(
            isinstance(value, int | float) and math.isfinite(value) and abs(value) <= 1e6,
            f"{WORDS.get(name, name)} must be a number of at most a million, got {value!r}.",
        )
        if name in known and int(head) <= choice.n_heads:
            own = _of_head(name, known[name], int(head))
            if int(place) < own.numel():
                own[int(place)] = value
    for name, changed in known.items():
        _assign(method, name, changed)
    return method


def _assign(method: PositionMethod, name: str, value: Tensor) -> None:
    """By the method's own attribute, where its numbers are held in other units."""
    held = dict([*method.named_parameters(recurse=False), *method.named_buffers(recurse=False)])
    if name not in held:
        setattr(method, name, value)
        return
    with torch.no_grad():
        held[name].copy_(value)


def _of_head(name: str, value: Tensor, head: int) -> Tensor:
    """The part of a method's numbers that is one head's: a view, by which it can be changed."""
    if value.ndim == 0:
        return value[None]
    return value[:, head - 1] if name in HEADS_LAST else value[head - 1 : head].flatten()


def _control(option: Option, value: str) -> Control:
    key, kind = option.name, option.kind
    if kind == "true|false":
        return Control(key, key, "tick", value == "true")
    if "|" in kind:
        return Control(key, key, "list", value, choices=tuple(kind.split("|")))
    try:
        number = float(value)
    except ValueError:
        return Control(key, f"{key} ({kind})", "text", value)
    if kind == "whole number":
        high = max(4 * float(option.default), number, 8.0)
        return Control(key, key, "slider", int(number), 0, high, 1)
    if kind == "number" and number >= 1000:
        return Control(key, f"{key}, as a power of ten", "power", math.log10(number), 1, 7, 0.05)
    if kind == "number":
        high = max(4 * abs(float(option.default)), abs(number))
        return Control(key, key, "slider", number, 0.0, high, _nice(high / 200))
    return Control(key, f"{key} ({kind})", "text", value)


def _nice(size: float) -> float:
    return float(10.0 ** math.floor(math.log10(size))) if size > 0 else 0.01


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value).strip()


def _same(text: str, default: str) -> bool:
    try:
        return float(text) == float(default)
    except ValueError:
        return text == default


def _large(text: str) -> bool:
    """Whether an option may be a size that asks for much memory."""
    try:
        return float(text) > MODEST
    except ValueError:
        return False


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
