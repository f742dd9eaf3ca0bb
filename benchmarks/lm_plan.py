"""A plan of several language-modelling experiments, read from TOML.

plugins = ["lm_variants"]   # modules beside the plan that register methods of their own

[all]                       # fields of LMConfig that all experiments share
steps = 600

[experiment.NAME]           # NAME is a folder of the results; its fields win over [all]
methods = ["tisa", "rope"]
"""

import importlib
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from whence.checks import require, unknown
from whence.experiments import LMConfig
from whence.experiments.lm.config import config_of

PARTS = ("plugins", "all", "experiment")


class PlannedJob(NamedTuple):
    """One run of one experiment of a plan."""

    experiment: str
    method: str
    seed: int
    learning_rate: float

    def __str__(self) -> str:
        return f"{self.experiment}, {self.method}, rate {self.learning_rate:g}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """Experiments in the order of the file, and the modules that their methods need."""

    plugins: tuple[str, ...]
    experiments: dict[str, LMConfig]


def read_plan(path: Path) -> Plan:
    """The plan in a file; its plugins are not imported yet."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}.") from None
    for name in found:
        require(name in PARTS, unknown(f"part of {path}", name, PARTS))
    tables = found.get("experiment", {})
    require(len(tables) > 0, f"{path} has no table [experiment.NAME].")
    shared = found.get("all", {})
    return Plan(
        tuple(found.get("plugins", ())),
        {
            name: config_of(shared | table, where=f"{path}, experiment {name}")
            for name, table in tables.items()
        },
    )


def import_plugins(names: Iterable[str], folder: Path) -> None:
    """Import modules that lie in `folder`; each puts its methods into whence.methods.METHODS."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    for name in names:
        importlib.import_module(name)
