"""Which methods are in front: the best one, and those that the seeds do not tell from it."""

from dataclasses import dataclass
from itertools import takewhile
from math import sqrt
from statistics import fmean, stdev

from scipy.special import stdtrit

from whence.analysis.lm_results import Language

DIGITS = 3  # of a loss, as it is shown
BySeed = dict[str, dict[int, float]]  # method -> seed -> loss, or difference of two losses
NAMED = 3  # methods of a tie that a card names


@dataclass(frozen=True)
class Winner:
    """A card of the ranking: who is in front, at what, and how sure that is."""

    name: str
    what: str
    against: str


def losses(results: Language, length: int) -> BySeed:
    """The loss from scratch of each method that has one with all of its seeds."""
    found: dict[str, dict[int, float | None]] = {}
    for job in results.jobs:
        loss = job.loss(length)
        found.setdefault(job.method, {})[job.seed] = None if loss is None else loss.loss
    return {
        method: {seed: x for seed, x in seeds.items() if x is not None}
        for method, seeds in found.items()
        if None not in seeds.values()
    }


def in_front(found: BySeed) -> list[str]:
    """The method with the smallest mean, then those after it by their means while they are tied.

    The first that is not tied ends the list, so that a method whose seeds are far apart is not in
    front of one that is clearly behind, only because little is known of it.
    """
    order = sorted(found, key=lambda method: fmean(found[method].values()))
    best = order[0]
    return list(takewhile(lambda name: name == best or tied(found[best], found[name]), order))


def tied(first: dict[int, float], second: dict[int, float]) -> bool:
    """Whether nothing shows that two methods differ.

    Over two common seeds or more: 0 lies in the 95% interval, by Student's t, of the mean
    difference between runs of the same seed. With less: both losses are shown by the same digits.
    """
    gaps = [second[seed] - first[seed] for seed in first.keys() & second.keys()]
    if len(gaps) < 2:
        return _shown(fmean(first.values())) == _shown(fmean(second.values()))
    half = float(stdtrit(len(gaps) - 1, 0.975)) * stdev(gaps) / sqrt(len(gaps))
    return abs(fmean(gaps)) <= half


def winners(results: Language) -> list[Winner]:
    """In front at the length of training, at the longest one, and from the first to the second."""
    home, far = int(results.config["train_length"]), results.lengths[-1]
    near_losses, far_losses = losses(results, home), losses(results, far)
    cards = [_card(near_losses, f"at {home:,} tokens", "has the smallest loss")]
    if far > home:
        change = {
            method: {seed: x - near_losses[method][seed] for seed, x in seeds.items()}
            for method, seeds in far_losses.items()
            if method in near_losses
        }
        cards.append(_card(far_losses, f"at {far:,} tokens", "has the smallest loss"))
        cards.append(_card(change, f"from {home:,} to {far:,} tokens", "loses least", sign="+"))
    return [card for card in cards if card is not None]


def certainty(results: Language) -> str:
    """How far the order of the methods can be trusted."""
    seeds = {len(seeds) for seeds in losses(results, int(results.config["train_length"])).values()}
    if not seeds or max(seeds) < 2:
        return "In bold the smallest loss. One seed cannot tell a difference from chance."
    return (
        "In bold the smallest loss and those tied with it: 0 is in the 95% interval of the mean "
        "difference between runs of the same seed."
    )


def _card(found: BySeed, where: str, what: str, sign: str = "") -> Winner | None:
    """None where fewer than two methods can be compared."""
    if len(found) < 2:
        return None
    front = in_front(found)
    seeds = min(len(values) for values in found.values())
    behind = {name: fmean(values.values()) for name, values in found.items() if name not in front}
    after = min(behind, key=behind.__getitem__, default=None)
    next_one = "" if after is None else f"; next {after}, {_told(found[after], sign)}"
    if len(front) == 1:
        value = f"{_told(found[front[0]], sign)} nats"
        sure = (
            f" over {seeds} seeds{next_one}"
            if seeds > 1
            else f"{next_one}; one seed: perhaps chance"
        )
        return Winner(front[0], f"{what} {where}", f"{value}{sure}")
    first, last = (_shown(fmean(found[name].values()), sign) for name in (front[0], front[-1]))
    value = f"{first} nats" if first == last else f"{first} to {last} nats"
    why = f"{seeds} seeds do not tell them apart" if seeds > 1 else "equal to the last digit shown"
    few = len(front) <= NAMED
    return Winner(
        ", ".join(front) if few else f"{len(front)} of {len(found)} methods",
        f"are tied in front {where}",
        f"{value}{'' if few else ': ' + ', '.join(front)}; {why}{next_one}",
    )


def _told(found: dict[int, float], sign: str) -> str:
    values = list(found.values())
    spread = f" ± {stdev(values):.{DIGITS}f}" if len(values) > 1 else ""
    return f"{_shown(fmean(values), sign)}{spread}"


def _shown(value: float, sign: str = "") -> str:
    return f"{value:{sign}.{DIGITS}f}"
