"""Load a model with its method, and say clearly where a checkpoint lacks a part of it."""

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file

from whence.checks import require
from whence.families import ATTACHABLE
from whence.hf.attaching import attached
from whence.hf.building import positions_for
from whence.hf.changes import SetAside
from whence.hf.classes import PositionedModel, model_class, read_options
from whence.hf.model_parts import family_of, parts_of
from whence.old_checkpoints import HUB

PICKLES = (
    "and a pickle can run code when it is read. Save the model again as safetensors, or pass "
    "allow_pickle=True if you trust its author (use_safetensors=False to an Auto class)."
)


def from_pretrained(
    path: str | Path, cls: type | None = None, *, allow_pickle: bool = False, **options: Any
) -> PreTrainedModel:
    """A model saved with a method attached, in the class that it was saved in.

    `cls` is another class of its family (BertForSequenceClassification), or an Auto class. Weights
    are read from safetensors; pickled ones (pytorch_model.bin) with allow_pickle=True only. The
    options are those of transformers' own from_pretrained, which is what loads it; for
    output_loading_info=True, which returns two things, call that one.

        >>> from transformers import AutoModel
        >>> from whence.hf import attach
        >>> model = AutoModel.from_pretrained("tiny-bert")
        >>> handle = attach(model, "tisa:kernels=5")
        >>> model.save_pretrained("tiny-bert-with-tisa")
        >>> attached(from_pretrained("tiny-bert-with-tisa")).n_parameters() == handle.n_parameters()
        True
    """
    require(
        not options.get("output_loading_info"),
        "output_loading_info=True gives a model and a report: call from_pretrained of an Auto "
        "class, such as AutoModel.",
    )
    require(
        options.pop("use_safetensors", True) or allow_pickle,
        f"use_safetensors=False asks for pickled weights, {PICKLES}",
    )
    config = _config(path, {key: options[key] for key in HUB if key in options})
    require(
        str(config.model_type).startswith("whence-"),
        f"{path} was saved without a method ({config.model_type}). Load it with transformers' "
        "AutoModel and call whence.hf.attach.",
    )
    read_options(config.whence)
    if cls is None:
        names: list[str] = list(config.architectures or [])
        require(
            len(names) == 1 and hasattr(transformers, names[0]),
            f"the config in {path} does not say which class of transformers the model is "
            f"(architectures = {names}). Name it: from_pretrained(path, AutoModel).",
        )
        cls = getattr(transformers, names[0])
    loader: Any = cls
    of_a_family = isinstance(loader, type) and issubclass(loader, PreTrainedModel)
    if of_a_family:
        family = config.model_type.removeprefix("whence-")
        own = str(getattr(loader.config_class, "model_type", "")).removeprefix("whence-")
        require(
            own in ATTACHABLE and family_of(own) is family_of(family),
            f"{path} holds a model of the family {family}, and {loader.__name__} is of {own!r}. "
            "Give a class of its family, an Auto class, or none.",
        )
        loader = loader if issubclass(loader, PositionedModel) else model_class(loader, family)
    formats = {"use_safetensors": None if allow_pickle else True}  # None: whichever there are
    model = loader.from_pretrained(path, **options, **formats)
    assert isinstance(model, PreTrainedModel)
    return model


def _config(path: str | Path, hub: dict[str, Any]) -> Any:
    """The config in a folder or on the hub; transformers takes any missing folder for a name."""
    folder, local = Path(path), str(path).startswith((".", "/", "~")) or str(path).count("/") > 1
    require(
        folder.is_dir() or not (local or isinstance(path, Path)),
        f"there is no folder {path}. Give a folder that save_pretrained wrote.",
    )
    require(
        not folder.is_dir() or (folder / str(hub.get("subfolder", "")) / "config.json").is_file(),
        f"{path} has no config.json. Give a folder that save_pretrained wrote.",
    )
    try:
        return AutoConfig.from_pretrained(path, **hub)
    except OSError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"there is no folder {path} here, and no model of that name could be had from the hub "
            f"({reason})."
        ) from error


def refuse_pickles(path: str | Path, hub: dict[str, Any]) -> None:
    """Refuse a checkpoint of pickles alone, and an index of safetensors that names one."""
    folder = Path(path) / str(hub.get("subfolder") or "")
    if folder.is_dir():
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        require(
            not pickled or any(folder.glob("*.safetensors")),
            f"{path} has no weights as safetensors but {', '.join(pickled)}, {PICKLES}",
        )
    known = {key: value for key, value in hub.items() if value is not None}
    quiet = {f"_raise_exceptions_for_{x}": False for x in ("missing_entries", "connection_errors")}
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **known, **quiet)
    if index is None:
        return
    try:
        shards = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of shards: {error!r}.") from None
    named = sorted(str(shard) for shard in shards if not str(shard).endswith(".safetensors"))
    require(not named, f"{index} names {', '.join(named)}, {PICKLES}")


def checked(model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Refuse a model whose method has weights that were not in the checkpoint.

    What a method computes when it is built is in no checkpoint, and transformers leaves it unset,
    as it does zeros in place of a table: both are written anew.
    """
    handle = attached(model)
    assert handle is not None
    base = model.base_model
    prefix = "whence." if base is model else f"{model.base_model_prefix}.whence."
    missing = sorted(key for key in info["missing_keys"] if key.startswith(prefix))
    wrong = sorted(key for key, *_ in info["mismatched_keys"] if key.startswith(prefix))
    require(
        not missing and not wrong,
        f"the checkpoint lacks weights of the method {handle.position!r} that its config names: "
        f"{', '.join(missing + wrong)}. Save it again with the method attached, or attach the "
        "method to a model loaded without it.",
    )
    fresh = positions_for(
        parts_of(base),
        str(handle.position),
        share=handle.options["share"],
        layers=[i for i, method in enumerate(handle.methods) if method is not None],
    )
    for name, buffer in fresh.named_buffers():
        base.whence.get_buffer(name).copy_(buffer)
    for change in handle.changes:
        if isinstance(change, SetAside):
            change.zeros().zero_()
