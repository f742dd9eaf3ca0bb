"""Which of the two fused strategies runs a call: one pass, or a plain kernel for the far keys."""

import torch

from whence.kernels.call import AttentionCall
from whence.kernels.plain import fastest

GRAIN = 64  # far parts begin at a multiple of it, so that the plain kernel cuts no tile,
ROW_GRAIN = 32  # but sooner where a row has its own numbers: near tiles cost more than a cut one
SHORTEST = {64: 4096, 128: 4096}  # by head size: from this length on it is faster; on an H200
FEWEST = 8  # and from so many times the far parts' start on


def far_start(call: AttentionCall) -> int | str:
    """From which |lag| on a plain kernel takes the keys, or why one pass takes them all."""
    sight, lag = call.sight, call.lag
    if lag is None:
        return "there is no bias"
    if call.scale <= 0:
        return "plain kernels want a positive scale"
    if not lag.endless:
        return "the bias has no finite reach"
    if lag.sloped:
        return "the bias slopes beyond its reach"
    if sight.mask is not None or sight.window != (None, None) or call.dropout:
        return "a plain kernel knows no mask, window or dropout of ours"
    if sight.n_q != sight.n_k or sight.q_start:
        return "queries and keys are not the same positions"
    values = 0 if call.values is None else call.values.reach
    by_row = lag.shape[2] > 1 or call.values is not None
    grain = ROW_GRAIN if by_row else GRAIN
    start = (max(lag.reach, values) // grain + 1) * grain
    d = call.q.shape[-1]
    shortest = next((n for size, n in SHORTEST.items() if d <= size), None)
    if shortest is None or sight.n_q < max(shortest, FEWEST * start):
        return f"it is faster at {sight.n_q} tokens with a reach of {lag.reach}"
    if call.q.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        return "plain kernels are not deterministic"
    plain = fastest(call.q, call.v)
    if plain is None or not (plain.grouped or call.q.shape[1] == call.k.shape[1]):
        return f"no plain kernel takes heads like these ({call.q.dtype})"
    return start
