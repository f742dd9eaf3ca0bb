"""`whence translate`: an encoder-decoder trained with each position, and its BLEU (Shaw et al.)."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.checks import one_of, require
from whence.cli.errors import one_line_errors
from whence.cli.experiment import (
    BF16Option,
    ConfigOption,
    DeviceOption,
    FormatOption,
    JsonOption,
    OutOption,
    RayOption,
    SecondsOption,
    WorkersOption,
    check_options,
    learning_rates,
    print_tables,
    run_experiment,
    whole_numbers,
)
from whence.cli.figures import FiguresOption
from whence.cli.specs import read_spec

if TYPE_CHECKING:
    from whence.analysis.translation_results import Translation
    from whence.experiments.translation.config import TranslationConfig
    from whence.experiments.translation.sweep import TranslationSweep
    from whence.report.experiment_report import ExperimentReport

NEEDED = ("data", "source", "target")


def translate(
    sentences: Annotated[
        list[str] | None,
        typer.Argument(help="With --predict: what to translate; lines of stdin unless given."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|hub:NAME",
            help="Files SPLIT.LANGUAGE whose lines translate each other, or a data set.",
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Language to translate from, such as en.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Language to translate to.")] = None,
    position: Annotated[
        list[str] | None,
        typer.Option(
            help="A method; one for the encoder and one for the decoder: shaw:clip=16/sinusoidal. "
            "Give it several times; all are compared to the first."
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="clip|parts", help="Add the positions of the paper's Table 2 or 3."),
    ] = None,
    train: Annotated[
        str | None, typer.Option(help="Split to train on.", show_default="train")
    ] = None,
    valid: Annotated[
        str | None, typer.Option(help="Split to choose by.", show_default="val")
    ] = None,
    tests: Annotated[
        str | None, typer.Option(help="Splits to test on: a,b.", show_default="test")
    ] = None,
    test_joined: Annotated[
        str | None, typer.Option(help="Test on so many sentences in a row, too: 2,4,8.")
    ] = None,
    joined: Annotated[
        int | None, typer.Option(help="Copies of the training text with sentences joined.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs a position.", show_default="1")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Of the joint BPE.", show_default="8000")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens a side at most, in training.", show_default="100")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Of encoder and of decoder.", show_default="4")
    ] = None,
    heads: Annotated[int | None, typer.Option(show_default="4")] = None,
    d_model: Annotated[int | None, typer.Option(show_default="256")] = None,
    d_ff: Annotated[int | None, typer.Option(show_default="1024")] = None,
    post_norm: Annotated[
        bool | None, typer.Option("--post-norm/--pre-norm", show_default="pre-norm")
    ] = None,
    dropout: Annotated[float | None, typer.Option(show_default="0.3")] = None,
    label_smoothing: Annotated[float | None, typer.Option(show_default="0.1")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="A batch, on each side.", show_default="4096")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Batches a step.", show_default="1")
    ] = None,
    steps: Annotated[int | None, typer.Option(show_default="3000")] = None,
    learning_rate: Annotated[
        str | None,
        typer.Option(
            help="At its highest. Of several, 1e-3,2e-3, each position takes the best.",
            show_default="2e-3",
        ),
    ] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps.", show_default="1000")] = None,
    average: Annotated[
        int | None, typer.Option(help="Weights of the last steps averaged.", show_default="10")
    ] = None,
    average_every: Annotated[
        int | None, typer.Option(help="Steps between them.", show_default="50")
    ] = None,
    beams: Annotated[int | None, typer.Option(show_default="4")] = None,
    length_penalty: Annotated[float | None, typer.Option(show_default="0.6")] = None,
    bf16: BF16Option = None,
    tf32: Annotated[
        bool | None, typer.Option("--tf32/--no-tf32", help="Products in TF32 on a GPU.")
    ] = None,
    device: DeviceOption = None,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; none by default.")
    ] = None,
    keep_models: Annotated[
        bool | None,
        typer.Option(
            "--keep-models/--no-keep-models", help="For --predict.", show_default="keep-models"
        ),
    ] = None,
    predict: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Translate SENTENCES with the model of a job."),
    ] = None,
    config: ConfigOption = None,
    ray: RayOption = None,
    workers: WorkersOption = 1,
    seconds: SecondsOption = None,
    form: FormatOption = "text",
    figures: FiguresOption = ["png"],  # noqa: B006  typer copies it
    out: OutOption = Path("out/translate"),
    as_json: JsonOption = False,
) -> None:
    """Train a Transformer to translate with each position, and score it: Shaw et al.'s experiment.

    Every position with every rate and seed is a job of its own: one that is finished is not run
    again, one that was killed goes on. With --predict a trained model translates sentences.
    """
    with one_line_errors("translate", "plot"):
        check_options(form, figures, seconds)
        if predict is not None:
            _predict(predict, sentences, beams, length_penalty, device or "auto", as_json)
            return
        require(
            not sentences, "sentences are translated by a trained model: give --predict FOLDER."
        )
        flags: dict[str, Any] = {
            "data": data,
            "source": source,
            "target": target,
            "train": train,
            "valid": valid,
            "tests": None if tests is None else tuple(x.strip() for x in tests.split(",")),
            "test_joined": whole_numbers(test_joined, "--test-joined", such_as="2,4,8"),
            "joined": joined,
            "seeds": seeds,
            "vocab_size": vocab_size,
            "max_length": max_length,
            "n_layers": layers,
            "n_heads": heads,
            "d_model": d_model,
            "d_ff": d_ff,
            "norm_first": None if post_norm is None else not post_norm,
            "dropout": dropout,
            "label_smoothing": label_smoothing,
            "tokens": tokens,
            "accumulate": accumulate,
            "steps": steps,
            "learning_rates": learning_rates(learning_rate),
            "warmup": warmup,
            "average": average,
            "average_every": average_every,
            "beams": beams,
            "length_penalty": length_penalty,
            "bf16": bf16,
            "tf32": tf32,
            "device": device,
            "save_every": save_every,
            "keep_models": keep_models,
        }
        read = _read(config, flags, position, sweep)
        found, page = run_experiment(
            _load, read, out, seconds=seconds, ray=ray, workers=workers, figures=figures
        )
    if page is None:
        return
    show(found, form=form, as_json=as_json)
    if not as_json:
        typer.echo(f"wrote {page}")


def _read(
    config: Path | None, flags: dict[str, Any], positions: list[str] | None, sweep: str | None
) -> "TranslationConfig":
    from whence.experiments.config import read_options, typed_config
    from whence.experiments.translation.config import BETWEEN, SWEEPS, TranslationConfig

    options = read_options(config, flags)
    for name in NEEDED:
        require(
            name in options,
            f"--{name} is needed: --data FOLDER --source en --target de, with the files train.en, "
            "train.de and so on in FOLDER.",
        )
    named = list(positions or options.get("positions", ()))
    if sweep is not None:
        one_of("sweep", sweep, tuple(SWEEPS))
        named += [x for x in SWEEPS[sweep] if x not in named]
    if named:
        written = [BETWEEN.join(read_spec(x) for x in str(text).split(BETWEEN)) for text in named]
        options["positions"] = tuple(written)
    return typed_config(TranslationConfig, options, where=str(config))


def _load() -> "tuple[type[TranslationSweep], ExperimentReport[Translation]]":
    from whence.experiments.translation.sweep import TranslationSweep
    from whence.report.translation_report import TRANSLATION_REPORT

    return TranslationSweep, TRANSLATION_REPORT


def show(results: "Translation", *, form: str = "text", as_json: bool = False) -> None:
    """All tables, and why a job has no score."""
    from whence.report.translation_table import reasons, tables

    if as_json:
        typer.echo(results.to_json())
        return
    print_tables(tables(results), form, reasons=reasons(results))


def _predict(
    folder: Path,
    sentences: list[str] | None,
    beams: int | None,
    length_penalty: float | None,
    device: str,
    as_json: bool,
) -> None:
    """Print the translation of each sentence, a line each."""
    from whence.experiments.processes import named_device
    from whence.experiments.translation.predict import predicted, trained_model

    model, bpe = trained_model(folder, named_device(device))
    given = sentences or [line.rstrip("\n").removeprefix("\ufeff") for line in sys.stdin]
    require(len(given) > 0, "there is nothing to translate: give sentences, or lines on stdin.")
    options = {"beams": beams, "length_penalty": length_penalty}
    chosen: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
    found = predicted(model, bpe, given, **chosen)
    if as_json:
        rows = [{"source": a, "translation": b} for a, b in zip(given, found, strict=True)]
        typer.echo(json.dumps(rows, ensure_ascii=False, indent=1))
    else:
        typer.echo("\n".join(found))
