"""Jobs of a plan of language-modelling experiments, in a process of their own (lm_gpu.py)."""

import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from whence.experiments.job_queue import AT, DONE, FAILED, FAILURE, LATE, LOGS, in_a_line, log_to
from whence.files import write_text


def lm_work(pipe: Connection, number: int, given: dict[str, Any]) -> None:
    """Run the jobs that come through the pipe, of any experiment of the plan."""
    out = Path(given["out"])
    log_to(out / LOGS / f"{number}.txt")
    import torch

    from lm_plan import import_plugins
    from whence.experiments import LMConfig, run_one
    from whence.experiments.lm.results import Run, run_folder
    from whence.experiments.progress import OutOfTimeError

    torch.set_num_threads(1)
    import_plugins(given["plugins"], Path(given["plugin_folder"]))
    configs = {name: LMConfig.from_json(text) for name, text in given["configs"].items()}
    sources: dict[str, Any] = {}
    corpora: dict[str, Any] = {}
    while (job := pipe.recv()) is not None:
        last = time.monotonic()

        def tell(what: str, share: float) -> None:
            nonlocal last
            if time.monotonic() - last > 2:
                last = time.monotonic()
                pipe.send((AT, f"{share:.0%}"))

        name, run = job[0], Run(*job[1:])
        config, folder = configs[name], out / name
        try:
            if name not in sources:
                sources[name] = _source(config, folder, corpora)
            found = run_one(
                config,
                run.method,
                run.seed,
                folder,
                learning_rate=run.learning_rate,
                source=sources[name],
                say=tell,
                deadline=given["deadline"],
                side_by_side=given["at_once"],
            )
        except OutOfTimeError as error:
            pipe.send((LATE, f"out of time at {str(error).rpartition(': ')[2]}"))
        except Exception as error:
            where = run_folder(config, folder, run)
            write_text(where / FAILURE, traceback.format_exc())
            pipe.send((FAILED, in_a_line(error)))
            return
        else:
            pipe.send((DONE, told(found)))


def _source(config: Any, folder: Path, corpora: dict[str, Any]) -> Any:
    """The data of an experiment; a corpus that several experiments share is read once."""
    from whence.experiments import load_corpus
    from whence.experiments.lm.data import prepared, text_source

    if not config.tokenized:
        return prepared(config, folder)
    if config.data not in corpora:
        corpora[config.data] = load_corpus(Path(config.data))[0]
    return text_source(config, corpora[config.data])


def told(job: Any) -> str:
    """A finished job in a few words."""
    if job.stopped:
        return f"STOPPED, {job.stopped}"
    found = [(x.length, x.loss) for x in job.losses if x.how == "from scratch"]
    losses = ", ".join("-" if loss is None else f"{loss:.3f}" for _, loss in found)
    tuned = "" if job.tuning_loss is None else f", tuning {job.tuning_loss:.3f}"
    last = float(job.train_loss[-1]) if len(job.train_loss) else float("nan")
    speed = f"{(job.tokens_a_second or 0) / 1e3:,.0f}k tokens/s"
    memory = f"{(job.peak_bytes or 0) / 1e9:.1f} GB"
    return f"train {last:.3f}{tuned}, {losses}; {speed}, {memory}"
