"""One job: a model with one position trained with one seed, and the tests translated by it."""

import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from whence.analysis.translation_results import VALID, TestScores, TranslationJob
from whence.experiments.folder import as_file_name
from whence.experiments.processes import processes
from whence.experiments.progress import Say
from whence.experiments.training import quiet
from whence.experiments.translation.batches import rows_of
from whence.experiments.translation.bpe import Bpe
from whence.experiments.translation.config import TranslationConfig
from whence.experiments.translation.data import TOKENIZER, StoredBpe, TranslationData
from whence.experiments.translation.decoding import mean_loss, translated
from whence.experiments.translation.model import new_model, positional_parameters
from whence.experiments.translation.scoring import scored
from whence.experiments.translation.text import Pairs
from whence.experiments.translation.training import train
from whence.files import replace_folder

MODEL = "model"
TRAINING = 0.85  # share of a job's time, about; the rest is translating


class Run(NamedTuple):
    """Which job."""

    position: str
    seed: int
    learning_rate: float

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{as_file_name(self.position)}.rate-{self.learning_rate}.seed-{self.seed}"


def runs(config: TranslationConfig) -> list[Run]:
    """All jobs. A seed of all comes before the next, so that a run that is ended early has rows."""
    return [
        Run(position, seed, rate)
        for seed in range(max(map(config.n_seeds, config.positions)))
        for position in config.positions
        if seed < config.n_seeds(position)
        for rate in config.rates(position)
    ]


def run_translation_job(
    config: TranslationConfig,
    run: Run,
    data: TranslationData,
    folder: Path,
    *,
    device: torch.device,
    fingerprint: str,
    say: Say,
    deadline: float | None,
    side_by_side: int,
) -> TranslationJob | None:
    """The result of a job; of several processes the first one has it, the others None."""
    start = time.perf_counter()
    model = new_model(config, run.position, seed=run.seed, vocab_size=data.bpe.vocab_size)
    trained = train(
        config,
        model,
        data.source,
        data.target,
        folder,
        learning_rate=run.learning_rate,
        seed=run.seed,
        device=device,
        title=run.name,
        say=lambda what, share: say(what, TRAINING * share),
        deadline=deadline,
        side_by_side=side_by_side,
    )
    if processes()[0] > 0:
        return None
    model = trained.model
    scores: tuple[TestScores, ...] = ()
    loss = None
    if not trained.stopped:
        say("translating", TRAINING)
        scores = tuple(tested(config, model, data))
        sides = (data.text.valid.source, data.text.valid.target)
        loss = mean_loss(model, *(rows_of(data.bpe.encode(side)) for side in sides))
        if config.keep_models:
            with replace_folder(folder / MODEL) as kept, quiet():
                model.save_pretrained(kept)
                StoredBpe(data.bpe.json).save(kept / TOKENIZER)
    logged = [entry for entry in trained.log if "loss" in entry]
    peaks = [entry["peak_bytes"] for entry in logged if entry.get("peak_bytes") is not None]
    a_step = config.tokens * config.accumulate * processes()[1]
    speeds = [entry["tokens_a_second"] / a_step for entry in logged if "tokens_a_second" in entry]
    return TranslationJob(
        **run._asdict(),
        fingerprint=fingerprint,
        stopped=trained.stopped,
        scores=scores,
        valid_loss=loss,
        steps=np.asarray([entry["step"] for entry in logged], np.float32),
        train_loss=np.asarray([entry["loss"] for entry in logged], np.float32),
        steps_a_second=median(speeds) if speeds else None,
        side_by_side=max((entry.get("side_by_side", 1) for entry in logged), default=1),
        peak_bytes=max(peaks) if peaks else None,
        seconds=time.perf_counter() - start,
        parameters=sum(p.numel() for p in model.parameters()),
        positional=positional_parameters(model),
    )


def tested(config: TranslationConfig, model: Any, data: TranslationData) -> list[TestScores]:
    """The scores of each test text and of its sentences joined, and of the validation text."""
    found = []
    if config.translates_valid:
        found.append(test_scores(config, model, data.bpe, VALID, data.text.valid, 1))
    for name, pairs in data.text.tests.items():
        for joined in (1, *sorted(config.test_joined)):
            found.append(test_scores(config, model, data.bpe, name, pairs.joined(joined), joined))
    return found


def test_scores(
    config: TranslationConfig, model: Any, bpe: Bpe, test: str, pairs: Pairs, joined: int
) -> TestScores:
    """Translate a text and score it."""
    source = rows_of(bpe.encode(pairs.source))
    length = float(source.lengths.float().mean())
    stacks = (model.model.encoder.stack, model.get_decoder_stack())
    limit = min((x.position.max_length() or np.inf for x in stacks), default=np.inf)
    if int(source.lengths.max()) + config.more_tokens > limit:
        empty = np.zeros((0, 10), np.float32)
        return TestScores(test, joined, length, None, None, None, (), empty, ())
    tokens = translated(
        model,
        source,
        beams=config.beams,
        length_penalty=config.length_penalty,
        more_tokens=config.more_tokens,
    )
    texts = tuple(bpe.decode(tokens))
    found = scored(texts, pairs.target)
    words = found["statistics"][:, :2].sum(axis=0)
    return TestScores(
        test,
        joined,
        length,
        ratio=float(words[0] / words[1]),
        translations=texts,
        loss=mean_loss(model, source, rows_of(bpe.encode(pairs.target))),
        **found,
    )
