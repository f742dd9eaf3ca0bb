"""Results on disk as JSON: whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def save(results: dict[str, Any], path: Path) -> Path:
    """Written beside its place, then renamed: no reader sees half; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
