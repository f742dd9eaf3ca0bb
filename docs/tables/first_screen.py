"""The numbers of the first screen: what TISA costs at 16,384 tokens, and what it gains."""

from dataclasses import dataclass

from tables.gpu import TISA, main_run, start_told, usual_records
from tables.lm import COMMAND as LM_COMMAND
from tables.lm import language
from tables.results_folder import MISSING, ResultsFolder
from whence.analysis.lm_results import Mean, ranked

TOKENS = 16_384
CONTENDERS = {  # contender and method of a record: how the first screen calls it
    ("whence:fused", TISA): "TISA, whence",
    ("flash", "nope"): "FlashAttention-2, no bias",
    ("cudnn", "nope"): "cuDNN, no bias",
    ("flex-best", TISA): "FlexAttention, TISA",
    ("eager", TISA): "eager, TISA",
}
OURS, FLASH, CUDNN, _, EAGER = CONTENDERS.values()


@dataclass(frozen=True)
class Cost:
    """One layer's attention, forward and backward."""

    milliseconds: float
    megabytes: float


def costs(stored: ResultsFolder) -> dict[str, Cost]:
    """Time and memory of attention to TOKENS tokens; empty where it has not been measured."""
    found = {(r["contender"], r["method"]): r for r in usual_records(stored) if r["n"] == TOKENS}
    return {
        name: Cost(found[key]["ms"]["median"], found[key]["extra_bytes"] / 1e6)
        for key, name in CONTENDERS.items()
        if key in found and found[key]["ms"] is not None
    }


def losses(stored: ResultsFolder, corpus: str = "python") -> dict[str, dict[int, Mean]]:
    """By method and length, in the order of the loss at home; empty where nothing was trained."""
    run = language(stored, corpus)
    if run is None:
        return {}
    return {
        row.method: {
            n: mean for n, mean in zip(run.lengths, row.scratch, strict=True) if mean is not None
        }
        for row in ranked(run)
    }


def first_numbers(stored: ResultsFolder) -> str:
    """The two paragraphs below the first picture."""
    return _cost_told(stored) + _loss_told(stored)


def _cost_told(stored: ResultsFolder) -> str:
    found = costs(stored)
    main = main_run(stored)
    if main is None or not {OURS, FLASH, CUDNN, EAGER} <= found.keys():
        return MISSING.format("python benchmarks/gpu.py")
    ours, flash, cudnn, eager = (found[name] for name in (OURS, FLASH, CUDNN, EAGER))
    machine = main["machine"]
    return (
        f"- **Cost.** TISA with its gradients at {TOKENS:,} tokens takes {_amount(ours)}. Eager "
        f"attention with the same bias takes {_amount(eager)}. Without a bias "
        f"FlashAttention-2 takes {_amount(flash)}, cuDNN {_amount(cudnn)}. One layer "
        f"of 12 heads of 64 on an {machine['gpu']}, commit "
        f"{machine['commit']}. {start_told(stored)}\n"
    )


def _loss_told(stored: ResultsFolder) -> str:
    found = losses(stored)
    if not found:
        return MISSING.format(LM_COMMAND)
    tisa, rope = found["tisa"], found["rope"]
    home, far = min(tisa), max(tisa)
    return (
        f"- **Loss.** After training at {home} tokens TISA's loss is {tisa[home].mean:.2f} nats "
        f"and RoPE's {rope[home].mean:.2f}. At {far:,} tokens, {far // home} times the length, "
        f"TISA's is {tisa[far].mean:.2f} and RoPE's {rope[far].mean:.2f}. Small models on Python "
        f"source, 3 seeds; the lead at {home} tokens shrinks with longer training.\n"
    )


def _amount(cost: Cost) -> str:
    memory = cost.megabytes
    size = f"{memory / 1000:.1f} GB" if memory >= 1000 else f"{memory:.0f} MB"
    return f"{cost.milliseconds:.1f} ms and {size}"
