"""A method attached to a model on a GPU: no bit changes at zero effect, and the fused kernels run."""

import pytest
import torch
from torch.testing import assert_close

from hf_models import FAMILIES, awake, hidden, inputs, spec, tiny
from whence.hf import attach

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),
]


def on_gpu(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.cuda() for key, value in given.items()}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_method_of_no_effect_changes_no_bit_on_a_gpu(name, dtype, attn):
    for pad in (None, "right"):
        model, given = tiny(name, attn=attn).to("cuda", dtype), on_gpu(inputs(name, pad=pad))
        before = hidden(model, given)
        handle = attach(model, spec(name, "kernels=3,start=zero"))
        assert_close(hidden(model, given), before, rtol=0, atol=0)
        out = model(**given)[0]
        assert_close(out.detach(), before, rtol=0, atol=0)
        out.square().mean().backward()
        gradient = next(m for m in handle.methods if m is not None).raw_amplitude.grad
        assert gradient is not None
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("vit", "mpnet")])
@pytest.mark.parametrize("pad", [None, "left", "right"])
def test_the_fused_kernels_give_what_the_models_function_gives(name, pad):
    model, given = tiny(name).cuda(), on_gpu(inputs(name, pad=pad))
    handle = attach(model, "tisa:kernels=3", backend="original")
    awake(handle, 0.5)
    want, state = hidden(model, given), model.base_model.whence.state_dict()
    handle.undo()
    attach(model, "tisa:kernels=3", backend="fused")
    model.base_model.whence.load_state_dict(state)
    got, there = hidden(model, given), given.get("attention_mask", torch.ones(want.shape[:2]))
    assert_close(got[there.bool()], want[there.bool()], rtol=2e-3, atol=2e-3)


def test_attached_on_the_cpu_a_method_moves_with_its_model():
    model = tiny("bert")
    handle = attach(model, "tisa:start=local+alibi+rope", keep_positions=False)
    want = hidden(model, inputs("bert"))
    got = hidden(model.cuda(), on_gpu(inputs("bert"))).cpu()
    assert handle.methods[0].parts[0].amplitude.is_cuda
    assert_close(got, want, rtol=2e-3, atol=2e-3)
