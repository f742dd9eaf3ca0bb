"""Native models on a GPU: through the fused kernels, in half precision, compiled, decoding."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from five_calls import (
    Found,
    errors_beyond,
    fill_free_gpu_memory_with_nan,
    five_steps,
)
from models import GREEDY, SIZES, VOCAB, causal, prompts
from shaking import gain, shake
from whence.models import WhenceConfig, WhenceForCausalLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # torch's own, from its inductor and from its tracing of an autograd function
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
NAMES = ["tisa:kernels=5+rope", "shaw", "t5", "alibi", "learned"]


def wide(name: str, length: int = 512, **more: Any) -> WhenceForCausalLM:
    """A model of wide heads, in training, whose positions alone are moved from where they begin.

    With all weights moved, as `causal` does, softmax is so steep that in half precision gradients
    keep no digit.
    """
    torch.manual_seed(1)
    sizes = {**SIZES, **WIDE, "num_key_value_heads": 2, "max_position_embeddings": length}
    model = WhenceForCausalLM(WhenceConfig(position=name, **sizes, **more))
    shake(model.model.stack.position, 0.3)
    return model.cuda().train()


@pytest.mark.parametrize("name", NAMES)
def test_the_fused_kernels_train_it_as_the_definition_does(name: str) -> None:
    reference, fused = (wide(name, backend=backend) for backend in ("reference", "fused"))
    fused.load_state_dict(reference.state_dict())
    ids = torch.randint(2, VOCAB, (2, 300), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :100] = 0
    for model in (reference, fused):
        model(ids, attention_mask=mask, labels=ids).loss.backward()
    for a, b in zip(fused.parameters(), reference.parameters(), strict=True):
        if b.grad is not None:
            assert_close(a.grad, b.grad, rtol=1e-2, atol=1e-3 * b.grad.abs().max().item() + 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_and_compiling_leave_the_loss_where_it_was(name: str) -> None:
    torch.compiler.reset()
    model = wide(name)
    ids = torch.randint(2, VOCAB, (2, 256), device="cuda")
    plain = model(ids, labels=ids).loss
    with torch.autocast("cuda", torch.bfloat16):
        half = model(ids, labels=ids).loss
        compiled = torch.compile(model)(ids, labels=ids).loss
    half.backward()
    compiled.backward()
    assert_close(half, plain, rtol=2e-2, atol=2e-2)
    assert_close(compiled, half, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("default")
def test_compiled_gradients_of_the_fifth_step_are_as_exact_as_the_called_ones(
    name: str, mode: str
) -> None:
    torch.compiler.reset()
    model = wide(name)
    compiled = torch.compile(model, mode=mode)

    def gradients(forward: Callable[..., Any], ids: Tensor, half: bool) -> Found:
        model.zero_grad(set_to_none=True)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = forward(ids, labels=ids).loss
        loss.backward()
        found = {key: p.grad / gain(key) for key, p in model.named_parameters() if p.requires_grad}
        return {"out": loss.detach().clone(), **found}

    def draw() -> Tensor:
        fill_free_gpu_memory_with_nan()
        return torch.randint(2, VOCAB, (2, 256), device="cuda")

    outcomes = five_steps(
        ours=lambda ids: gradients(compiled, ids, True),
        plain=lambda ids: gradients(model, ids, True),
        truth=lambda ids: gradients(model, ids, False),
        draw=draw,
    )
    assert errors_beyond(outcomes, torch.bfloat16) == {}


LENGTHS = (300, 700, 48, 4608, 100)  # at 4,608 tokens a plain kernel takes the far keys


@functools.cache
def graphs_in_training(name: str, backend: str) -> int:
    """How many graphs this compiler makes of a model that is trained at these lengths."""
    torch.compiler.reset()
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(wide(name, length=8192), backend=graphs)
    for n in LENGTHS:
        ids = torch.randint(2, VOCAB, (1, n), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            compiled(ids, labels=ids, use_cache=False).loss.backward()
    return int(graphs.frame_count)


@pytest.mark.parametrize("name", ["tisa:reach=64+rope", "t5", "shaw"])
@pytest.mark.filterwarnings("default")
def test_positions_add_no_graph_to_those_of_a_compiled_model_at_other_lengths(name: str) -> None:
    # Inductor has reasons of its own to compile again: it pads matrices by their sizes.
    most = graphs_in_training("nope", "inductor")
    torch.compiler.reset()
    model = wide(name, length=8192)
    graphs = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=graphs)
    learned = {key: p for key, p in model.named_parameters() if p.requires_grad}
    for n in LENGTHS:
        ids = torch.randint(2, VOCAB, (1, n), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            found, wanted = (x(ids, labels=ids, use_cache=False).loss for x in (compiled, model))
        assert_close(found, wanted, rtol=1e-3, atol=0)
        pairs = (torch.autograd.grad(x, [*learned.values()]) for x in (found, wanted))
        for key, a, b in zip(learned, *pairs, strict=True):
            assert (a - b).norm() <= 0.03 * b.norm(), (n, key)
    assert graphs.frame_count <= most


@pytest.mark.parametrize("name", ["tisa:reach=64+rope", "t5", "shaw"])
@pytest.mark.filterwarnings("default")
def test_a_model_is_traced_at_most_twice_whatever_its_lengths(name: str) -> None:
    assert graphs_in_training(name, "aot_eager") <= 2


# What Inductor says of float32, and CUDA graphs of a part without kernels, is no error.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("name", [*NAMES, "fire:threshold=3", "forget"])
def test_it_decodes_on_the_gpu_as_on_the_cpu(name: str) -> None:
    model = causal(name, **SIZES)
    _, ids, mask = prompts()
    arguments = {"max_new_tokens": 5, **GREEDY}
    wanted = model.generate(ids, attention_mask=mask, **arguments)
    model.cuda()
    for cache in ({}, {"cache_implementation": "static"}, {"num_beams": 1, "use_cache": False}):
        found = model.generate(ids.cuda(), attention_mask=mask.cuda(), **arguments, **cache)
        assert_close(found.cpu(), wanted)
