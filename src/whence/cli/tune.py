"""`whence tune`: measure the kernels' tiles on this GPU, and keep the fastest in a file."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from whence.checks import one_of, require
from whence.cli.errors import one_line_errors
from whence.cli.progress import progress_bar
from whence.files import check_folder
from whence.kernels.fused.tiles_file import default_path, gpu_key

DTYPES = ("bfloat16", "float16", "float32")


def tune(
    head_sizes: Annotated[str, typer.Option(help="Up to which heads, for example 64,128.")] = (
        "64,128"
    ),
    dtypes: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = "bfloat16",
    length: Annotated[int, typer.Option(help="Tokens a sequence.")] = 4096,
    tokens: Annotated[int, typer.Option(help="Tokens a batch.")] = 16_384,
    heads: Annotated[int, typer.Option(help="Heads.")] = 12,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to add to; in the user's cache folder unless given, where the "
            "kernels look for it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure the fused kernels' tiles on this GPU; the next process that runs them reads the file.

    Takes minutes for each head size and dtype: every candidate is compiled. The file is written
    after each, so that what is done stays when the rest is stopped.
    """
    with one_line_errors():
        sizes, names = _sizes(head_sizes), [name.strip() for name in dtypes.split(",")]
        for name in names:
            one_of("dtype", name, DTYPES)
        require(min(length, tokens, heads) > 0, "--length, --tokens and --heads must be positive.")
        require(torch.cuda.is_available(), "tune needs an NVIDIA GPU, and there is none here.")
        from whence.bench import tune as tuning  # needs Triton
        from whence.kernels.fused.tiles import built_in, gpu_of

        path = out or default_path()
        check_folder(path.parent)
        gpu = gpu_of(torch.device("cuda"))
        key = gpu_key(gpu.name, gpu.capability)
        jobs = [(name, size) for name in names for size in sizes]
        for name, size in jobs:
            start = built_in(size, getattr(torch, name), gpu.capability, gpu.shared)
            total, done = tuning.count(start), 0
            with progress_bar() as bar:

                def say(
                    what: str, head: str = f"{name}, heads of {size}", total: int = total
                ) -> None:
                    nonlocal done
                    bar(f"{head}: {what}", done / total)
                    done += 1

                timer = tuning.on_this_gpu(size, name, length, tokens, heads)
                found = tuning.fastest(start, timer, say=say)
            tuning.write(path, key, {(name, size): found.tiles})
            typer.echo(
                f"{key}, {name}, heads of {size}: {found.ms_before:.3f} -> {found.ms:.3f} ms, "
                f"{len(found.failed)} candidates could not run"
            )
    typer.echo(f"wrote {path}")


def _sizes(text: str) -> list[int]:
    pieces = [piece.strip() for piece in text.split(",")]
    for piece in pieces:
        require(
            piece.isdigit() and 1 <= int(piece) <= 256,
            f"--head-sizes takes whole numbers from 1 to 256 such as 64,128, got {text!r}.",
        )
    return [int(piece) for piece in pieces]
