"""All layers of a model in one inspection: the table once, heads and profiles for each layer."""

import dataclasses
from pathlib import Path

from whence.analysis.checkpoint import Progress, open_checkpoint
from whence.analysis.fit import fit_heads
from whence.analysis.heads import head_reports
from whence.analysis.inspect import inspect
from whence.analysis.relative import relative_reports
from whence.analysis.results import Inspection
from whence.analysis.stack_reader import read_stack


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
    """`inspect` of the first layer, with the heads, fits and profiles of all others beside it.

    Profiles of deeper layers need the model run on text, once for all of them. Where `profiles` is
    None and it cannot be run, a note says why.
    """
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
