"""Cross-entropy with label smoothing."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from whence.experiments.translation.batches import IGNORED


def smoothed_loss(
    logits: Float[Tensor, "b n vocabulary"], labels: Int[Tensor, "b n"], smoothing: float
) -> Float[Tensor, ""]:
    """The sum over tokens of -(1 - s) log p(label) - s * mean over the vocabulary of log p."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
        reduction="sum",
    )
