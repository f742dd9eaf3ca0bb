"""The data of a language-modelling experiment, made ready, and its folder claimed."""

from functools import partial
from pathlib import Path

from whence.checks import require
from whence.experiments.folder import Experiment, claim
from whence.experiments.lm.config import LMConfig
from whence.experiments.lm.source import Source
from whence.experiments.lm.tasks import Task
from whence.experiments.lm.text import Text
from whence.experiments.lm.tokens import Corpus, Texts
from whence.experiments.lm.training import check_runnable
from whence.experiments.processes import join_processes, named_device

TOKENIZER = "tokenizer.json"


def prepared(config: LMConfig, out: Path) -> Source:
    """The data, and the folder made ready for it; of several processes the first one writes."""
    from whence.experiments.lm.corpus_file import load_corpus
    from whence.experiments.lm.tokens import keep_tokenizer, read_texts

    check_runnable(config)
    join_processes(named_device(config.device))
    claimed = partial(claim, out, command="whence lm", allowed=(TOKENIZER,))
    if config.task != "text":
        task = task_source(config)
        claimed(Experiment(config.fixed(), task.sha256))
        return task
    assert config.data is not None
    cache = out / TOKENIZER
    if config.tokenized:
        corpus, json = load_corpus(Path(config.data))
        source = text_source(config, corpus)
        keep = partial(keep_tokenizer, corpus, json, cache, named=config.data)
        claimed(Experiment(config.fixed(), corpus.sha256), write=keep)
        return source
    texts = read_texts(config.data, config.valid, column=config.text_column)
    encoded = partial(_encoded, config, texts, cache)
    found: list[Text] = []
    claimed(Experiment(config.fixed(), texts.sha256), write=lambda: found.append(encoded()))
    return found[0] if found else encoded()


def _encoded(config: LMConfig, texts: Texts, cache: Path) -> Text:
    """The texts in tokens; the tokenizer is written once it is known that they can be used."""
    from whence.experiments.lm.tokens import encoded, tokenizer_for

    given = None if config.tokenizer is None else Path(config.tokenizer)
    assert config.vocab_size is not None
    stored = tokenizer_for(texts, cache=cache, given=given, vocab_size=config.vocab_size)
    source = text_source(config, encoded(texts, stored))
    if not cache.is_file():
        stored.save(cache)
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
