"""FlexAttention as a peer: compiled, the bias looked up by lag, with its own tiles or with ours."""

from collections.abc import Callable

import torch
from torch import Tensor

from whence.bench.problem import Attention, Problem
from whence.checks import require

SIDES = (  # rows and keys a tile: forward, then backward by keys and by rows
    (64, 64, 32, 64),
    (128, 64, 64, 64),
    (64, 32, 32, 32),
)


def default_flex() -> dict[str, Attention]:
    """With the tiles that PyTorch picks."""
    torch.compiler.reset()  # it compiles a function eight times at most, and this is a new size
    return {"": flex(None)}


def best_flex() -> dict[str, Attention]:
    """With each of a small set of tiles, of which the fastest counts."""
    torch.compiler.reset()
    return {
        f"{rows}x{keys}, {short}x{long}": flex(
            {
                "BLOCK_M": rows,
                "BLOCK_N": keys,
                "BLOCK_M1": short,
                "BLOCK_N1": long,
                "BLOCK_M2": long,
                "BLOCK_N2": short,
            }
        )
        for rows, keys, short, long in SIDES
    }


def flex(tiles: dict[str, int] | None) -> Attention:
    """score + curve[h, lag], the curve evaluated and differentiated outside of the kernel."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    masks: dict[int, object] = {}  # made once a length, as a model would

    def run(problem: Problem) -> Tensor:
        call = problem.call()
        lag, n_q, n_k = call.lag, call.sight.n_q, call.sight.n_k
        require(
            call.values is None and not call.dense and call.lag is not None and n_q == n_k,
            "FlexAttention is measured with a shared function of the lag, and that alone.",
        )
        assert lag is not None
        require(lag.band.shape[2] == 1, "FlexAttention is measured with a band that queries share.")
        curve = lag.at(torch.arange(1 - n_k, n_k, device=call.q.device))[0, :, 0].contiguous()

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + curve[h, j - i + n_k - 1]

        def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i >= j

        if problem.causal and n_k not in masks:
            masks[n_k] = create_block_mask(causal, None, None, n_q, n_k, device=str(call.q.device))
        return compiled(
            call.q,
            call.k,
            call.v,
            score_mod=score_mod,
            block_mask=masks.get(n_k),
            scale=call.scale,
            kernel_options=tiles,
        )

    return run
