"""What a training loop wraps around a layer: DDP, FSDP, activation checkpointing, torch.export."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from processes import CONTEXT, free_port
from whence import LagBias, LagValues, Line, attend
from whence.nn import MultiheadAttention, TransformerEncoder

N, WIDTH, HEADS = 12, 16, 2
in_the_interpreter = pytest.mark.triton


def model(position: str) -> nn.Module:
    torch.manual_seed(0)
    return TransformerEncoder(
        WIDTH, HEADS, 2, dim_feedforward=32, dropout=0.0, position=position, batch_first=True
    )


def batch() -> Tensor:
    return torch.randn(4, N, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def fsdp(module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in module.children():
        if isinstance(layer, nn.ModuleList):
            for part in layer:
                fully_shard(part, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def train(rank: int, port: str, positions: list[str], folder: str) -> None:
    """One of two processes: half of the batch, a mean over it, the gradients of all into a file."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        found = {}
        for position in positions:
            for wrap in (ddp, fsdp):
                module = model(position)
                names = [name for name, _ in module.named_parameters()]
                wrapped = wrap(module)
                half = batch()[2 * rank : 2 * rank + 2]
                wrapped(half).square().mean().backward()
                grads = [p.grad for p in wrapped.parameters()]
                whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
                for name, g in zip(names, whole, strict=True):
                    found[f"{position} {wrap.__name__} {name}"] = g.contiguous()
        if rank == 0:
            save_file(found, Path(folder) / "gradients.safetensors")
    finally:
        dist.destroy_process_group()


def test_two_processes_give_the_gradients_of_one_with_the_whole_batch(tmp_path: Path) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    positions = ["tisa", "shaw:clip=3"]
    given, method = (free_port(), positions, str(tmp_path)), CONTEXT.get_start_method()
    torch.multiprocessing.start_processes(train, given, nprocs=2, start_method=method)
    found = load_file(tmp_path / "gradients.safetensors")
    for position in positions:
        alone = model(position)
        alone(batch()).square().mean().backward()
        wanted = gradients(alone)
        assert any("position" in name for name in wanted)
        for wrap in ("ddp", "fsdp"):
            for name, want in wanted.items():
                got = found.pop(f"{position} {wrap} {name}")
                assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert not found


def layer(dropout: float) -> MultiheadAttention:
    torch.manual_seed(0)
    position = "tisa+shaw:clip=3"
    return MultiheadAttention(
        32, 2, dropout=dropout, batch_first=True, position=position, backend="fused"
    )


@pytest.fixture
def _interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("run with TRITON_INTERPRET=1, as `make test` does")
    pytest.importorskip("triton", reason="Triton is a Linux package")


@in_the_interpreter
@pytest.mark.usefixtures("_interpreter")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_layer_has_the_same_dropout_and_the_same_gradients(reentrant: bool) -> None:
    module = layer(0.3)

    def run(x: Tensor) -> Tensor:
        return module(x, x, x, need_weights=False)[0]

    results = []
    for wrapped in (run, lambda x: checkpoint(run, x, use_reentrant=reentrant)):
        torch.manual_seed(5)
        x = torch.randn(1, N, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = wrapped(x)
        module.zero_grad()
        out.square().sum().backward()
        assert x.grad is not None
        results.append({"out": out.detach(), "x": x.grad, **gradients(module)})
    plain, again = results
    assert plain.keys() == again.keys()
    assert any("key_table" in name for name in plain)
    for name, want in plain.items():
        assert_close(again[name], want, rtol=0, atol=0)
    torch.manual_seed(6)
    other = run(torch.randn(1, N, 32, generator=torch.Generator().manual_seed(1)))
    assert not torch.equal(other, plain["out"])


@in_the_interpreter
@pytest.mark.usefixtures("_interpreter")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_fused_operator_can_be_exported_as_one_node() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.band = nn.Parameter(torch.randn(1, 2, 1, 9))
            self.table = nn.Parameter(torch.randn(1, 5, 16))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            bias = LagBias(self.band, Line(), Line())
            return attend(q, k, v, bias=bias, values=LagValues(self.table), backend="fused")

    module = Attention()
    inputs = tuple(torch.randn(3, 1, 2, N, 16).unbind())
    exported = torch.export.export(module, inputs)
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert sum("whence.lag_attention" in name for name in called) == 1
    assert_close(exported.module()(*inputs), module(*inputs))


def test_the_default_backend_is_recomputed_with_the_same_dropout_too() -> None:
    module = layer(0.3)
    module.backend = "sdpa"
    wrappers: list[Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = [
        lambda run, x: run(x),
        lambda run, x: checkpoint(run, x, use_reentrant=False),
    ]
    found = []
    for wrapper in wrappers:
        torch.manual_seed(5)
        x = torch.randn(1, N, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = wrapper(lambda x: module(x, x, x, need_weights=False)[0], x)
        found.append(torch.autograd.grad(out.square().sum(), [x, *module.parameters()]))
    for a, b in zip(*found, strict=True):
        assert_close(a, b)
