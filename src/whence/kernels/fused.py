"""The place of the fused Triton kernels: it refuses every call until they are there."""

from jaxtyping import Float
from torch import Tensor

from whence.kernels.call import AttentionCall


def refuse(call: AttentionCall) -> str | None:
    """Why this backend cannot run the call, or None."""
    return "is not built into this version: take backend='auto'."


def note(call: AttentionCall) -> str:
    """What `explain` says of it."""
    return "one pass on the GPU, linear memory"


def run(call: AttentionCall) -> Float[Tensor, "b h q d_v"]:
    """Never reached: `refuse` comes first."""
    raise ValueError(refuse(call))
