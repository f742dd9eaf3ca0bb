"""What the tables are made of: the files that benchmarks wrote into `results`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MISSING = "Not measured yet: `{}`.\n"


@dataclass(frozen=True)
class Stored:
    """The folder `results` under a root."""

    root: Path

    def path(self, name: str) -> Path:
        """Where a file is, or would be."""
        return self.root / "results" / name

    def json(self, name: str) -> Any:
        """What a benchmark wrote, or None."""
        path = self.path(name)
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
