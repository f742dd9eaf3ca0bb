"""The data of a language-modelling experiment, made ready, and its folder claimed."""

from functools import partial
from pathlib import Path

from whence.checks import require
from whence.experiments.folder import Experiment, check_claim, claim
from whence.experiments.full_disk import full_disk_named
from whence.experiments.lm.config import LMConfig
from whence.experiments.lm.source import Source
from whence.experiments.lm.tasks import Task
from whence.experiments.lm.text import Text
from whence.experiments.lm.tokens import Corpus
from whence.experiments.lm.training import check_runnable
from whence.experiments.lock import only_one
from whence.experiments.processes import join_processes, meet, named_device, processes

TOKENIZER = "tokenizer.json"

_check = partial(check_claim, command="whence lm", allowed=(TOKENIZER,))
_claim = partial(claim, command="whence lm", allowed=(TOKENIZER,))


def prepared(config: LMConfig, out: Path) -> Source:
    """The data, and the folder made ready for it; of several processes the first one writes."""
    from whence.experiments.lm.corpus_file import load_corpus
    from whence.experiments.lm.tokens import encoded, keep_tokenizer, read_texts, tokenizer_for

    check_runnable(config)
    join_processes(named_device(config.device))
    if config.task != "text":
        task = task_source(config)
        _claim(out, Experiment(config.fixed(), task.sha256))
        return task
    assert config.data is not None
    if config.tokenized:
        corpus, json = load_corpus(Path(config.data))
        source = text_source(config, corpus)
        _check(out, Experiment(config.fixed(), corpus.sha256))
        with full_disk_named(out), only_one(out):
            if processes()[0] == 0:
                keep_tokenizer(corpus, json, out / TOKENIZER, named=config.data)
            meet()
        _claim(out, Experiment(config.fixed(), corpus.sha256))
        return source
    texts = read_texts(config.data, config.valid, column=config.text_column)
    _check(out, Experiment(config.fixed(), texts.sha256))
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
    _claim(out, Experiment(config.fixed(), texts.sha256))
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
