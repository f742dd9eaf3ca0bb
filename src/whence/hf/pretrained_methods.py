"""Methods with parameters of pretrained models: released TISA weights, T5 and MPNet tables."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from whence.checks import require
from whence.methods.t5 import T5
from whence.methods.tisa import Tisa


def tisa_from_released(
    state: Mapping[str, Tensor], *, prefix: str = "", heads_first: bool = False
) -> Tisa:
    """A layer with the weights of the authors' module, sign and shift of its offsets converted.

    The three tensors are known by the words amplitude, sharpness and offset in their names, after
    the prefix. They are [kernels, heads], or [heads, kernels] with heads_first=True.

        >>> import torch
        >>> names = ("amplitude", "sharpness", "offset")
        >>> state = {f"layer.0.{name}": torch.ones(3, 4) for name in names}
        >>> method = tisa_from_released(state, prefix="layer.0.")
        >>> method.n_heads, method.kernels
        (4, 3)
    """
    found = {}
    for word in ("amplitude", "sharpness", "offset"):
        names = [name for name in state if name.startswith(prefix) and word in name]
        require(
            len(names) == 1,
            f"expected one tensor with {word!r} in its name after {prefix!r}, got "
            f"{names or 'none'}. Give the prefix of one layer's module.",
        )
        tensor = state[names[0]]
        found[word] = tensor if heads_first else tensor.T
    return Tisa.from_released(**found)


def t5_from(model: PreTrainedModel, *, stack: Literal["encoder", "decoder"] = "encoder") -> T5:
    """The relative table of T5 and its kin, or of MPNet, as a method.

    T5 does not scale q.k by 1/sqrt(d): an attention that is to give its results needs scale=1.0.
    UMT5 has a table a layer, and only the first is read.

        >>> from transformers import T5Config, T5Model
        >>> sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        >>> method = t5_from(T5Model(T5Config(vocab_size=9, **sizes)), stack="decoder")
        >>> method.table.shape, method.causal
        (torch.Size([32, 2]), True)
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if name.split(".")[-1] == "relative_attention_bias" and stack in name.split(".")
    }
    require(
        bool(found),
        f"{type(model).__name__} has no relative_attention_bias in its {stack}. It is found in T5, "
        "mT5, UMT5 and MPNet.",
    )
    table: Tensor = next(iter(found.values())).weight
    distance = int(getattr(model.config, "relative_attention_max_distance", 128))
    method = T5(
        table.shape[1],
        buckets=table.shape[0],
        max_distance=distance,
        causal=stack == "decoder",
    )
    method.to(device=table.device, dtype=table.dtype)
    method.table = table.detach()
    return method
