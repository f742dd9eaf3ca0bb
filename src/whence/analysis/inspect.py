"""Everything the instruments say about one model: its table, its heads, their fits, its profile."""

import dataclasses
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from whence.analysis.checkpoint import Progress, open_checkpoint
from whence.analysis.heads import head_reports
from whence.analysis.relative_curves import relative_reports
from whence.analysis.results import (
    HeadFits,
    HeadReport,
    Inspection,
    LagProfile,
    ModelFacts,
    TableReport,
)
from whence.analysis.stack_reader import StackReader, read_stack
from whence.analysis.table_file import is_table_file, read_table
from whence.analysis.toeplitz import table_report
from whence.checks import require
from whence.families import AlibiBias, DebertaBias, RopeBias, T5Bias

RULES = {T5Bias: "t5 bias", AlibiBias: "alibi", DebertaBias: "deberta relative", RopeBias: "rope"}
PACKAGES = ("whence", "torch", "numpy", "scipy", "safetensors")


def inspect(
    name_or_folder: str | Path,
    *,
    layer: int = 0,
    biases: bool = False,
    stack: str | None = None,
    text: str | None = None,
    fit: bool = True,
    profiles: bool | None = None,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """Read a model's files, by folder or hub name, and measure what it knows about position.

    A file, .npy or .safetensors with one tensor, is a bare table, which has no heads: the options
    for them say nothing about it.
    `stack` is "encoder" (the first, and so the default) or "decoder" of a model that has both.
    `profiles` builds the model and runs text through it to measure its logits by lag: True always,
    False never, None where the weights alone do not tell (no table, a deeper layer, or a `text`
    of one's own), and then a model that cannot be run gets a note instead of an error.
    progress(what, share) is called as the work goes on, share being of all of it.

        >>> found = inspect("tiny-bert", fit=False)
        >>> found.model.family, found.table.gram.shape, len(found.heads)
        ('bert', (24, 24), 4)
    """
    step = _Steps(progress)
    if is_table_file(name_or_folder):
        return _bare_table(name_or_folder, step.within(0.0, 1.0))
    checkpoint = open_checkpoint(name_or_folder, allow_pickle=allow_pickle)
    reader = read_stack(checkpoint, stack=stack)
    reader.check_layer(layer)
    reader.projections(layer)  # a model without attention stops here, before any long work
    table, heads, relative, notes = inspect_table_and_heads(
        reader, layer=layer, biases=biases, progress=step.within(0.0, 0.3)
    )
    sha256 = checkpoint.sha256(step.within(0.3, 0.4))
    fits = _fits(heads or relative, step.within(0.4, 0.8)) if fit else ()
    if fit and heads and relative:
        notes.append("the fits are of the positional attention, not of the curves stated by rule")
    wanted = profiles or text is not None
    measured: tuple[LagProfile, ...] = ()
    if wanted or (profiles is None and (table is None or layer > 0)):
        try:
            measured = _profiles(reader, layer, text, step.within(0.8, 1.0), notes)
        except (ImportError, ValueError, OSError) as error:
            if wanted:
                raise
            notes.append(f"no measured lag profile: {' '.join(str(error).split())}")
    step.within(0.8, 1.0)("done", 1.0)
    return Inspection(
        model=_facts(reader, table, sha256),
        table=table,
        heads=heads,
        relative=relative,
        profiles=measured,
        fits=fits,
        notes=tuple(notes),
        versions=_versions(),
    )


def inspect_layers(
    name_or_folder: str | Path,
    *,
    biases: bool = False,
    stack: str | None = None,
    text: str | None = None,
    fit: bool = True,
    profiles: bool | None = None,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """`inspect` of the first layer, and the heads, fits and profiles of all other layers.

    Profiles of deeper layers need the model run on text, once for all of them. Where `profiles` is
    None and it cannot be run, a note says why.
    """
    from whence.analysis.fit import fit_heads

    say = progress or (lambda what, share: None)
    first = inspect(
        name_or_folder,
        biases=biases,
        stack=stack,
        text=text,
        fit=fit,
        profiles=False,
        allow_pickle=allow_pickle,
        progress=lambda what, share: say(what, 0.2 * share),
    )
    if first.model.n_layers == 0:
        return first
    reader = read_stack(open_checkpoint(name_or_folder, allow_pickle=allow_pickle), stack=stack)
    heads, relative = list(first.heads), list(first.relative)
    fits, notes = list(first.fits), list(first.notes)
    deeper = range(1, first.model.n_layers)
    for layer in deeper:
        say(f"layer {layer}", 0.2 + 0.6 * layer / first.model.n_layers)
        own = head_reports(reader, layer=layer, biases=biases) if first.table is not None else ()
        stated = relative_reports(reader, layer=layer)
        heads += own
        relative += stated
        fits += fit_heads(own or stated) if fit else ()
    if heads and deeper:
        notes.append(
            "F of a deeper layer reads the table through that layer's weights, as if the layers "
            "before it passed it on unchanged"
        )
    measured = first.profiles
    if profiles is not False:
        from whence.analysis.profile import lag_profiles

        try:
            measured = lag_profiles(
                str(reader.checkpoint.folder),
                text=text,
                note=notes.append,
                progress=lambda done, every: say("logits of real text", 0.8 + 0.2 * done / every),
            )
        except (ImportError, ValueError, OSError) as error:
            if profiles or text is not None:
                raise
            notes.append(f"no measured lag profile: {' '.join(str(error).split())}")
    return dataclasses.replace(
        first,
        heads=tuple(heads),
        relative=tuple(relative),
        fits=tuple(fits),
        profiles=measured,
        notes=tuple(notes),
    )


def _bare_table(name: str | Path, progress: Progress) -> Inspection:
    progress("position table", 0.0)
    vectors, facts = read_table(name)
    return Inspection(facts, table_report(vectors), (), (), (), (), (), _versions())


def inspect_table_and_heads(
    reader: StackReader, *, layer: int = 0, biases: bool = False, progress: Progress | None = None
) -> tuple[TableReport | None, tuple[HeadReport, ...], tuple[HeadReport, ...], list[str]]:
    """What the weights alone tell: the table, the heads' F, the stated curves, and notes."""
    say = progress or (lambda what, share: None)
    say("position table", 0.0)
    vectors, report, notes = reader.table(), None, _notes(reader)
    heads: tuple[HeadReport, ...] = ()
    if vectors is not None:
        n, d = vectors.shape
        projected = reader.projection() is not None
        space = f"{d} dimensions" + (f", before the projection to {reader.d_model}" * projected)
        report = table_report(vectors, space=space, rows=reader.rows(n))
        say("positional attention of the heads", 0.6)
        heads = head_reports(reader, layer=layer, biases=biases)
        notes += _head_notes(reader, layer, biases)
        if reader.n_computed is not None:
            notes.append(f"positions are computed and have no end: the first {n:,} are read")
    say("curves that the model states", 0.9)
    relative = relative_reports(reader, layer=layer)
    if reader.own is not None and not relative and vectors is None:
        notes.append(
            f"what {reader.own.spec} adds depends on the content, so that its weights alone state "
            "no curve; a profile measures it"
        )
    if relative and relative[0].with_biases:
        notes.append("the stated curves are what the biases b_Q and b_K make without any content")
    return report, heads, relative, notes


def _notes(reader: StackReader) -> list[str]:
    others = [one.name for one in reader.family.stacks if one.name != reader.stack.name]
    if not others:
        return []
    return [
        f"this is the {reader.stack.name}; ask for the {others[0]} with stack={others[0]!r} "
        f"(--stack {others[0]})"
    ]


def _head_notes(reader: StackReader, layer: int, biases: bool) -> list[str]:
    added = "with" if biases else "without"
    notes = [
        f"F, the logits of positions alone, is made {added} the biases of the projections from the "
        "table P as stored: the LayerNorm between the two depends on the content and is left out, "
        "so logits have no absolute scale"
    ]
    if layer > 0:
        notes.append(
            f"F of layer {layer} reads the table through that layer's weights, as if the layers "
            "before it passed it on unchanged"
        )
    if reader.causal:
        notes.append("the model is causal: curves and R^2 of its heads are of the lags <= 0 alone")
    return notes


def _facts(reader: StackReader, table: TableReport | None, sha256: str) -> ModelFacts:
    own = reader.own
    parts = ["table"] if table is not None and (own is None or own.keeps_table) else []
    if own is not None:
        parts.append(own.spec)
    elif reader.stack.relative is not None:
        parts.append(RULES[type(reader.stack.relative)])
    return ModelFacts(
        name=reader.checkpoint.name,
        family=reader.family.name,
        position=" + ".join(parts),
        n_layers=reader.n_layers,
        n_heads=reader.n_heads,
        d_model=reader.d_model,
        d_head=reader.d_head,
        n_positions=None if table is None else len(table.gram),
        sha256=sha256,
    )


def _fits(heads: tuple[HeadReport, ...], progress: Progress) -> tuple[HeadFits, ...]:
    from whence.analysis.fit import fit_heads

    def done(some: int, every: int) -> None:
        progress("TISA fitted to the curves", some / every)

    done(0, 1)
    return fit_heads(heads, progress=done)


def _profiles(
    reader: StackReader, layer: int, text: str | None, progress: Progress, notes: list[str]
) -> tuple[LagProfile, ...]:
    from whence.analysis.profile import lag_profiles

    require(
        reader.stack.name != "decoder",
        f"the logits of the decoder of {reader.checkpoint.name} depend on what its encoder reads; "
        "profiles are measured on the encoder.",
    )

    def done(some: int, every: int) -> None:
        progress("logits of real text", some / every)

    done(0, 1)
    return lag_profiles(
        reader.checkpoint.folder, layers=(layer,), text=text, progress=done, note=notes.append
    )


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{p: metadata.version(p) for p in PACKAGES}}


class _Steps:
    """Shares of parts made shares of the whole."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress

    def within(self, start: float, stop: float) -> Callable[[str, float], None]:
        """The callback of a part that takes start..stop of all the work."""

        def say(what: str, share: float) -> None:
            if self.progress is not None:
                self.progress(what, start + (stop - start) * share)

        return say
