"""The folder `results`: the files that benchmarks wrote, from which the tables are made."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDED = "\n<details markdown><summary>{title}</summary>\n\n{text}\n</details>\n"
MISSING = "Not measured yet: `{}`.\n"


@dataclass(frozen=True)
class ResultsFolder:
    """The folder `results` of a repository."""

    root: Path

    def path(self, name: str) -> Path:
        """The path of a file in it, whether the file is there or not."""
        return self.root / "results" / name

    def json(self, name: str) -> Any:
        """The content of a JSON file, or None if it is not there."""
        path = self.path(name)
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
