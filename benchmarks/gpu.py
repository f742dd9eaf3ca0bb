"""Attention with a learned position on one GPU: time and memory against every way there was.

python benchmarks/gpu.py [--out results/gpu] [--quick]

Forward + backward with the gradients of the position's own parameters, bfloat16, 16,384 tokens a
batch. Exactness comes first: a method whose output or gradient is off gets no time. Peers run in
the same process: eager (the n x n way), SDPA with the bias as a dense mask, FlexAttention with the
bias as a score_mod, the article's O(n^2 d) Shaw, and FlashAttention-2 and cuDNN with no bias, the
limit.
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import whence
from article_shaw import article_attention
from whence.method import PositionMethod

TOKENS, HEADS = 16_384, 12
SPECS = ("tisa:kernels=5", "t5", "alibi", "kerple", "shaw:clip=16", "tisa:reach=256")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(method: PositionMethod, causal: bool = False) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pos = torch.arange(q.shape[2], device=q.device)
        return whence.attend(
            q,
            k,
            v,
            bias=method.score_term(q, pos, pos),
            values=method.value_term(pos, pos),
            causal=causal,
            backend="fused",
        )

    return run


def dense_bias(method: PositionMethod, q: Tensor) -> Tensor:
    pos = torch.arange(q.shape[2], device=q.device)
    bias = method.score_term(q, pos, pos)
    assert bias is not None
    return bias.to_dense(pos, pos).to(q.dtype)


def eager(method: PositionMethod) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + dense_bias(method, q)
        return torch.softmax(logits, dim=-1) @ v

    return run


def sdpa_dense(method: PositionMethod) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = dense_bias(method, q).expand(q.shape[0], -1, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return run


def flex(method: PositionMethod) -> Attention:
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        curve = method.curve(torch.arange(1 - n, n, device=q.device))  # type: ignore[operator]

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + curve[h, j - i + n - 1]

        return compiled(q, k, v, score_mod=score_mod, kernel_options=TILES)

    TILES = {
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "BLOCK_M1": 32,
        "BLOCK_N1": 64,
        "BLOCK_M2": 64,
        "BLOCK_N2": 32,
    }
    return run


def plain(backend: SDPBackend, causal: bool = False) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def article(method: PositionMethod) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (t[0].to(q.dtype) for t in (method.key_table, method.value_table))  # type: ignore[index]
        return article_attention(q, k, v, key_table=keys, value_table=values, left=16, right=16)

    return run


def tensors(n: int, d: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    shape = (max(1, TOKENS // n), HEADS, n, d)
    qkv = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    return [*qkv, torch.randn(shape, device="cuda", dtype=dtype)]


def step(attention: Attention, parts: list[Tensor], parameters: list[Tensor]) -> Callable[[], None]:
    q, k, v, d_out = parts

    def run() -> None:
        torch.autograd.grad(attention(q, k, v), [q, k, v, *parameters], d_out)

    return run


def exact(method: PositionMethod, d: int) -> float:
    """The worst ratio of our error to eager bfloat16's, over output and gradients, by float64."""
    parts = tensors(512, d)
    parts = [x[:2].detach() for x in parts]
    found = []
    for kind, dtype in (
        ("fused", torch.bfloat16),
        ("same", torch.bfloat16),
        ("true", torch.float64),
    ):
        module = method.double() if kind == "true" else method.float()
        qkv = [x.to(dtype).requires_grad_() for x in parts[:3]]
        parameters = list(module.parameters())
        if kind == "fused":
            out = fused(module)(*qkv)
        else:
            pos = torch.arange(512, device="cuda")
            call = whence.kernels.call.as_call(
                *qkv,
                bias=module.score_term(qkv[0], pos, pos),
                values=module.value_term(pos, pos),
                mask=None,
                causal=False,
                window=None,
                scale=None,
                dropout=0.0,
                q_start=None,
            )
            out = whence.kernels.reference.attend_rows(call, slice(0, 512))
        grads = torch.autograd.grad(out, [*qkv, *parameters], parts[3].to(out.dtype))
        found.append([out.detach().double(), *(g.double() for g in grads)])
    method.float()
    ours, same, true = found
    return max(
        float((a - t).norm() / torch.maximum((b - t).norm(), 1e-4 * t.norm()))
        for a, b, t in zip(ours, same, true, strict=True)
    )


def measured(run: Callable[[], None]) -> dict[str, object]:
    """Median and 20/80 quantiles in ms, and the memory above what the inputs hold, in MB."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    median, low, high = triton.testing.do_bench(run, warmup=20, rep=80, quantiles=[0.5, 0.2, 0.8])
    return {
        "forward_backward_ms": {"median": median, "low": low, "high": high},
        "extra_memory_mb": extra / 2**20,
    }


def contenders(d: int, n: int, quick: bool) -> list[tuple[str, Attention, list[Tensor]]]:
    methods = {
        spec: whence.build(spec, n_heads=HEADS, d_head=d, causal=False).cuda() for spec in SPECS
    }
    tisa, shaw = methods["tisa:kernels=5"], methods["shaw:clip=16"]
    rows: list[tuple[str, Attention, list[Tensor]]] = [
        ("FlashAttention-2, no bias", plain(SDPBackend.FLASH_ATTENTION), []),
        ("cuDNN, no bias", plain(SDPBackend.CUDNN_ATTENTION), []),
    ]
    rows += [(spec, fused(m), list(m.parameters())) for spec, m in methods.items()]
    rows += [
        ("FlashAttention-2, causal", plain(SDPBackend.FLASH_ATTENTION, True), []),
        ("cuDNN, causal", plain(SDPBackend.CUDNN_ATTENTION, True), []),
        ("tisa:kernels=5, causal", fused(tisa, True), list(tisa.parameters())),
    ]
    if d == 64 and not quick:
        rows += [
            ("tisa, eager", eager(tisa), list(tisa.parameters())),
            ("tisa, SDPA + dense bias", sdpa_dense(tisa), list(tisa.parameters())),
            ("tisa, FlexAttention", flex(tisa), list(tisa.parameters())),
        ]
        if n <= 2048:
            rows.append(("shaw, the article's algorithm", article(shaw), list(shaw.parameters())))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--quick", action="store_true", help="ours and the limits at two lengths")
    options = parser.parse_args()
    rows, checks = [], {}
    for d in (64, 128):
        for spec in SPECS:
            torch.manual_seed(0)
            checks[f"{spec}, d {d}"] = exact(whence.build(spec, n_heads=HEADS, d_head=d).cuda(), d)
        print(f"d {d} error against same-dtype PyTorch's:", checks, flush=True)
    wrong = {name: ratio for name, ratio in checks.items() if not ratio <= 2}
    if wrong:
        raise SystemExit(f"not exact, so not timed: {wrong}")
    for d in (64, 128):
        for n in (2048, 8192) if options.quick else (512, 2048, 4096, 8192, 16384):
            torch.manual_seed(0)
            parts = tensors(n, d)
            for name, attention, parameters in contenders(d, n, options.quick):
                row: dict[str, object] = {"name": name, "n": n, "d_head": d}
                try:
                    row |= measured(step(attention, parts, parameters))
                    timing = row["forward_backward_ms"]
                    print(f"{d:4} {n:6} {name:32} {timing['median']:9.3f} ms", flush=True)  # type: ignore[index]
                except Exception as error:  # a peer that cannot run is a result too
                    row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                    print(f"{d:4} {n:6} {name:32} {row['failed']}", flush=True)
                rows.append(row)
                torch.cuda.empty_cache()
            save(options.out, rows, checks)


def save(folder: Path, rows: list[dict[str, object]], checks: dict[str, float]) -> None:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        "config": {"tokens": TOKENS, "heads": HEADS, "dtype": "bfloat16"},
        "machine": {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "commit": commit or os.environ.get("WHENCE_COMMIT", "unknown"),
        },
        "error_against_same_dtype_pytorch": checks,
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        json.dump(result, file, indent=1)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(folder / "attention.json")


if __name__ == "__main__":
    main()
