"""Tiny models of every family of transformers that a method can be attached to, and their inputs."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from shaking import draw

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = SMALL | {"vocab_size": 50, "intermediate_size": 48, "max_position_embeddings": 24}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": TEXT,
    "roberta": TEXT | {"max_position_embeddings": 26, "pad_token_id": 1},
    "electra": TEXT | {"embedding_size": 16},
    "albert": TEXT | {"embedding_size": 16, "num_hidden_layers": 3},
    "distilbert": {
        "vocab_size": 50,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 24,
    },
    "mpnet": TEXT | {"max_position_embeddings": 26},
    "gpt2": {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24},
    "opt": SMALL
    | {
        "vocab_size": 50,
        "ffn_dim": 48,
        "max_position_embeddings": 24,
        "word_embed_proj_dim": 32,
        "pad_token_id": 1,
    },
    "vit": SMALL | {"intermediate_size": 48, "image_size": 20, "patch_size": 4, "num_channels": 3},
}
FAMILIES = list(CONFIGS)
CAUSAL = ("gpt2", "opt")


def tiny(
    name: str, auto: Any = AutoModel, *, attn: str = "sdpa", **changes: Any
) -> PreTrainedModel:
    """A random model whose attention is far from uniform, without dropout unless it trains."""
    config = AutoConfig.for_model(name, **(CONFIGS[name] | changes))
    if name == "mpnet":
        attn = "eager"
    model: PreTrainedModel = auto.from_config(config, attn_implementation=attn)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def inputs(name: str, n: int = 12, *, pad: str | None = None) -> dict[str, Tensor]:
    """Two sequences, the first with a quarter of padding on one side; or two images."""
    generator = torch.Generator().manual_seed(2)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 20, 20, generator=generator)}
    ids = torch.randint(4, 50, (2, n), generator=generator)
    if pad is None:
        return {"input_ids": ids}
    mask = torch.ones(2, n, dtype=torch.long)
    mask[0, (slice(n - n // 4, n) if pad == "right" else slice(0, n // 4))] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}


def spec(name: str, options: str = "kernels=3") -> str:
    """TISA as it fits the family: on a grid for images."""
    return f"{'tisa2d' if name == 'vit' else 'tisa'}:{options}"


def awake(handle: Any, scale: float = 1.0) -> None:
    """Parameters with an effect that can be seen, other ones for each method."""
    generator = torch.Generator().manual_seed(3)
    draw(handle.model.base_model.whence, scale, generator)


def hidden(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**given)[0]
    return out
