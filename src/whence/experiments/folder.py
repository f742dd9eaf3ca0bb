"""The folder of an experiment: refused where it is another's, and its data made ready."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from whence.analysis.json_result import Result
from whence.checks import require
from whence.experiments.config import LMConfig
from whence.experiments.job import full_disk_named
from whence.experiments.lock import only_one
from whence.experiments.source import Source
from whence.experiments.tasks import Task
from whence.experiments.text import Text
from whence.experiments.tokens import Corpus
from whence.experiments.training import check_runnable, join_processes, meet, processes

EXPERIMENT, TOKENIZER = "experiment.json", "tokenizer.json"


@dataclass(frozen=True, eq=False)
class Experiment(Result):
    """What a folder is for: what all of its jobs have in common."""

    fixed: dict[str, Any]
    data_sha256: str


def prepared(config: LMConfig, out: Path) -> Source:
    """The data, and the folder made ready for it; of several processes the first one writes."""
    from whence.experiments.corpus_file import load_corpus
    from whence.experiments.tokens import encoded, keep_tokenizer, read_texts, tokenizer_for

    check_runnable(config)
    join_processes(config)
    if config.task != "text":
        task = task_source(config)
        _claim(out, config, task.sha256)
        return task
    assert config.data is not None
    if config.tokenized:
        corpus, json = load_corpus(Path(config.data))
        source = text_source(config, corpus)
        _check(out, config, corpus.sha256)
        with full_disk_named(out), only_one(out):
            if processes()[0] == 0:
                keep_tokenizer(corpus, json, out / TOKENIZER, named=config.data)
            meet()
        _claim(out, config, corpus.sha256)
        return source
    texts = read_texts(config.data, config.valid, column=config.text_column)
    _check(out, config, texts.sha256)
    given = None if config.tokenizer is None else Path(config.tokenizer)
    size = config.vocab_size
    assert size is not None
    tokenizer = partial(tokenizer_for, texts, cache=out / TOKENIZER, given=given, vocab_size=size)
    with full_disk_named(out), only_one(out):
        if processes()[0] == 0:
            tokenizer()
        meet()
        stored = tokenizer()
    source = text_source(config, encoded(texts, stored))
    _claim(out, config, texts.sha256)
    return source


def text_source(config: LMConfig, corpus: Corpus) -> Text:
    """A corpus cut as the configuration wants it; several experiments may share the corpus."""
    require(
        not config.tokenized or config.vocab_size in (None, corpus.vocab_size),
        f"{config.data} has a vocabulary of {corpus.vocab_size} tokens, not of "
        f"{config.vocab_size}: leave out --vocab-size.",
    )
    return Text(
        corpus,
        train_length=config.train_length,
        longest=max(config.eval_lengths),
        masked=config.objective == "masked",
        eval_tokens=config.eval_tokens,
        tuning_tokens=config.tuning_tokens if config.tunes else 0,
    )


def task_source(config: LMConfig) -> Task:
    """The sequences of a task other than text."""
    return Task(
        config.task,
        distance=config.distance,
        train_length=config.train_length,
        eval_tokens=config.eval_tokens,
        tuning_tokens=config.tuning_tokens if config.tunes else 0,
    )


def job_folder(out: Path, method: str, seed: int, *, rate: float | None = None) -> Path:
    """Of one job; the name says which. A sign for a sign, so that x=-1 is not x=1."""
    at = "" if rate is None else f".rate-{rate}"
    return out / "jobs" / f"{re.sub(r'[^A-Za-z0-9.]', '-', method)}{at}.seed-{seed}"


def _check(out: Path, config: LMConfig, sha256: str) -> None:
    """Refuse a folder of another experiment, or of something else, before anything is written."""
    path = out / EXPERIMENT
    if not path.is_file():
        strange = [x.name for x in out.iterdir()] if out.is_dir() else []
        strange = [x for x in strange if not x.startswith(".") and x != TOKENIZER]
        require(
            not strange or path.is_file(),  # another process may just have claimed it
            f"{out} holds {', '.join(sorted(strange)[:3])} and no {EXPERIMENT}, so it is not of "
            "whence lm. Give an empty folder as --out.",
        )
        return
    there = Experiment.load(path)
    ours = config.fixed()
    differ = [
        f"{key} is {there.fixed.get(key)} there and {value} here"
        for key, value in ours.items()
        if there.fixed.get(key) != value
    ]
    if there.data_sha256 != sha256 and there.fixed.get("task") == ours["task"]:
        differ.append(f"its data has SHA-256 {there.data_sha256[:12]}, this data {sha256[:12]}")
    require(
        not differ,
        f"{out} holds another experiment: {'; '.join(differ)}. Give another --out.",
    )


def _claim(out: Path, config: LMConfig, sha256: str) -> None:
    """Say what the folder is for, before the first job."""
    _check(out, config, sha256)
    with full_disk_named(out), only_one(out):
        if processes()[0] == 0:
            _check(out, config, sha256)  # another experiment may have come in between
            if not (out / EXPERIMENT).is_file():
                Experiment(config.fixed(), sha256).save(out / EXPERIMENT)
        meet()
