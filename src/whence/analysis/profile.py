"""The measured lag profile: logits of real text averaged over content as a function of lag."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, no_type_check

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import t as student
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whence.analysis.own_models import NATIVE, SEQ2SEQ
from whence.analysis.results import LagProfile
from whence.analysis.tokenized_text import SHORTEST, TokenizedText, tokenized_text
from whence.checks import at_least, require

Floats = np.ndarray[Any, np.dtype[np.float64]]

CONFIDENCE = 0.95


def lag_profiles(
    model: str | Path,
    *,
    layers: Sequence[int] | None = None,
    text: str | None = None,
    length: int = 256,
    pieces: int = 8,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> tuple[LagProfile, ...]:
    """A profile of every head of the layers (None: all), over `pieces` of `length` tokens of text.

    `model` is a folder or a name on the hub, safetensors alone; of an encoder with a decoder, the
    encoder. Without a `text` a built-in sample is read, without a tokenizer random tokens.
    progress(done, pieces) is called after each piece; note(sentence) says what a reader must know.
    """
    at_least(2, pieces=pieces)
    at_least(SHORTEST, length=length)
    say = note or (lambda sentence: None)
    with quiet():
        stack = _loaded(str(model))
        check_layers(layers, n_layers(stack))
        most = _longest(stack)
        if length > most:
            say(f"the model has {most} positions, so pieces are that long and not {length}")
        tokens = tokenized_text(
            str(model),
            stack.get_input_embeddings(),
            text,
            length=min(length, most),
            pieces=pieces,
            note=say,
        )
        return measure(stack, tokens, layers=layers, progress=progress)


def measure(
    stack: nn.Module,
    text: TokenizedText,
    *,
    layers: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[LagProfile, ...]:
    """The profiles of a stack of transformers layers (eager attention) on these tokens.

    The logits are those that the model hands to its softmax: scaled, with every bias, whatever the
    family. A softmax does not see a constant of a whole row, so the model behind a profile is
    logit[i, j] = row[i] + mean[j - i] + content, by least squares over rows and lags together.
    (The mean of centred rows would not do: a row near the left end holds other lags than one near
    the right.) The mean over all entries is 0. The band is Student's, over pieces. `explained` is
    the share of the variance within rows that the mean takes up, None where nothing varies; about
    lags / logits of it is chance. A lag that the model masks (a later key of a causal model) is
    not there.
    """
    kept = slice(text.before, text.ids.shape[1] - text.after)
    depth = n_layers(stack)
    check_layers(layers, depth)
    wanted = set(range(depth) if layers is None else layers)
    found: dict[int, list[_ByLag]] = {layer: [] for layer in sorted(wanted)}

    def see(layer: int, logits: Float[Tensor, "h n n"]) -> None:
        if layer in wanted:
            found[layer].append(_by_lag(logits[:, kept, kept], layer))

    for piece, ids in enumerate(text.ids):
        # The first piece goes through all layers, to see that they are as many as announced.
        softmaxes = Softmaxes(len(ids), see, depth if piece == 0 else max(wanted, default=0))
        with torch.inference_mode(), softmaxes, suppress(Enough):
            stack(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]))
        require(
            piece > 0 or softmaxes.seen == depth,
            f"this model has {depth} layers and {softmaxes.seen} softmaxes of self-attention over "
            "the text, so its logits cannot be told by layer. Load it with eager attention.",
        )
        if progress is not None:
            progress(piece + 1, len(text.ids))
    tokens = text.ids[:, kept].numel()
    inverse: dict[bytes, Floats] = {}
    return tuple(
        profile
        for layer, sums in found.items()
        for profile in _profiles(layer, sums, tokens, inverse)
    )


def n_layers(stack: Any) -> int:
    """Layers of a stack as its config says."""
    count = getattr(stack.config, "num_hidden_layers", 0)
    require(count > 0, "this model's config names no layers: it has no self-attention.")
    return int(count)


def check_layers(layers: Sequence[int] | None, depth: int) -> None:
    """Every layer asked for must be one of 0..depth-1."""
    for layer in layers or ():
        require(
            0 <= layer < depth, f"there is no layer {layer}: the model has layers 0..{depth - 1}."
        )


@dataclass(frozen=True, eq=False)
class _ByLag:
    """What is kept of one layer's logits on one piece: rows centred, then summed by lag."""

    sums: Floats  # [h, lag]
    squares: Floats  # [h]
    entries: Floats  # [row, lag] 1 where there is a logit


def _by_lag(logits: Float[Tensor, "h n n"], layer: int) -> _ByLag:
    require(
        not bool((logits.isnan() | logits.isposinf()).any()),
        f"layer {layer} has NaN or infinite logits: the weights are damaged or the text overflows "
        "them.",
    )
    there = (logits > torch.finfo(logits.dtype).min / 4).all(dim=0)  # a mask is -3e38 or -inf
    filled = logits.double().where(there, 0)
    mean = filled.sum(dim=2, keepdim=True) / there.sum(dim=1, keepdim=True).clamp(min=1)
    centred = (filled - mean).where(there, 0)
    squares = centred.square().sum(dim=(1, 2))
    rounding = (1e-6 * filled.abs().amax(dim=(1, 2))).square() * there.sum()
    squares = squares.where(squares > rounding, 0)  # what float32 leaves of a constant varies not
    return _ByLag(
        skewed(centred).sum(dim=1).numpy(),
        squares.numpy(),
        skewed(there[None].double())[0].numpy(),
    )


def skewed(x: Float[Tensor, "h n n"]) -> Float[Tensor, "h n lag"]:
    """Row i, column lag + n - 1: each row moved so that one lag is one column, zeros around."""
    h, n, _ = x.shape
    flat = nn.functional.pad(x.flip(-1), (0, n)).reshape(h, -1)[:, : n * (2 * n - 1)]
    return flat.reshape(h, n, 2 * n - 1).flip(-1)


def _profiles(
    layer: int, pieces: list[_ByLag], tokens: int, inverse: dict[bytes, Floats]
) -> Iterator[LagProfile]:
    entries = pieces[0].entries
    count = entries.sum(axis=0)
    seen = count > 0
    key = entries.tobytes()
    if key not in inverse:  # most layers share one mask, and with it the system
        inverse[key] = _inverse(entries[:, seen])
    sums = np.stack([piece.sums[:, seen] for piece in pieces])  # [piece, h, lag]
    curves = sums @ inverse[key]
    curves -= (curves @ count[seen] / count.sum())[..., None]
    mean = curves.mean(axis=0)
    error = curves.std(axis=0, ddof=1) / math.sqrt(len(pieces))
    band = student.ppf((1 + CONFIDENCE) / 2, len(pieces) - 1) * error
    squares = np.sum([piece.squares for piece in pieces], axis=0)
    taken = (mean * sums.sum(axis=0)).sum(axis=1)
    lag = np.flatnonzero(seen) - (len(entries) - 1)
    for head in range(len(mean)):
        yield LagProfile(
            layer=layer,
            head=head,
            lag=lag.astype(np.float32),
            mean=mean[head].astype(np.float32),
            low=(mean - band)[head].astype(np.float32),
            high=(mean + band)[head].astype(np.float32),
            explained=float(taken[head] / squares[head]) if squares[head] > 0 else None,
            n_tokens=tokens,
        )


def _inverse(entries: Floats) -> Floats:
    """From the sums by lag of centred rows to the mean by lag, rows and lags fitted together.

    The system is what is left of the lags' counts once every row has a constant of its own. It
    does not see a constant of all lags, which the ones settle: the sums are at right angles to it.
    """
    row = np.maximum(entries.sum(axis=1), 1)
    system = np.diag(entries.sum(axis=0)) - entries.T @ (entries / row[:, None])
    alone = 1e-9 * np.eye(len(system))  # a mask may leave a lag without any other to compare with
    inverse: Floats = np.linalg.inv(system + 1 + alone)
    return inverse


class Enough(Exception):  # noqa: N818 - nothing went wrong
    """The last layer of interest has been seen."""


class Softmaxes(TorchFunctionMode):
    """Hands the input of each softmax over n x n logits to `see`, numbered in order of layers.

    Every eager attention of transformers calls softmax once a layer, so no module is touched and
    no family needs code of its own. Reading the logits back from the attention weights would lose
    those below -103, where the weights are 0, and ALiBi's reach that.
    """

    def __init__(self, n: int, see: Callable[[int, Tensor], None], last: int) -> None:
        super().__init__()
        self.n, self.see, self.last, self.seen = n, see, last, 0

    @no_type_check  # it is asked for each shape that a check reads
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (nn.functional.softmax, torch.softmax, Tensor.softmax):
            logits = args[0]
            if logits.ndim == 4 and logits.shape[-2:] == (self.n, self.n):
                self.see(self.seen, logits[0])
                self.seen += 1
                if self.seen > self.last:
                    raise Enough
        return func(*args, **(kwargs or {}))


def _loaded(name: str) -> Any:
    """The stack of layers that reads text, with eager attention, in float32, from safetensors."""
    import transformers

    import whence.models  # noqa: F401  which the Auto classes then know

    try:
        # Ours must hand logits to a softmax, as eager attention of transformers does.
        own = transformers.AutoConfig.from_pretrained(name).model_type in (NATIVE, SEQ2SEQ)
        with torch.random.fork_rng(devices=[]):  # an absent pooler is filled with random numbers
            model, report = transformers.AutoModel.from_pretrained(
                name,
                **({"backend": "reference"} if own else {"attn_implementation": "eager"}),
                dtype=torch.float32,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} cannot be loaded by transformers: {reason}") from error
    missing = {key for key in report["missing_keys"] if "pooler" not in key}
    if hasattr(model, "encoder") and hasattr(model, "decoder"):
        missing = {key for key in missing if not key.startswith("decoder.")}
        model = model.get_encoder()
    require(
        not missing,
        f"{name} has no weights for {', '.join(sorted(missing)[:3])}: that part would be random. "
        "Give a checkpoint that has them.",
    )
    require(
        model.main_input_name == "input_ids",
        f"{name} reads {model.main_input_name}, not tokens, so no text can be put through it.",
    )
    return model.eval()


def _longest(stack: Any) -> int:
    """Positions that a piece may take up; RoBERTa and MPNet start counting after the padding's."""
    limit = getattr(stack.config, "max_position_embeddings", None)
    if limit is None or limit < 1:  # relative positions alone
        return 1 << 30
    for name, module in stack.named_modules():
        if "position" in name and getattr(module, "padding_idx", None) is not None:
            return int(limit) - int(module.padding_idx) - 1
    return int(limit)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no advice from transformers, whose settings are put back after."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
