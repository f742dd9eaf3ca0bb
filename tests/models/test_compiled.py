"""torch.compile sees a native model as one graph, with the same numbers."""

import pytest
import torch

from models import VOCAB, causal, prompts

pytestmark = [
    pytest.mark.compiled,
    # torch's own, from its inductor and from its tracing of an autograd function
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.mark.parametrize(
    "name",
    [
        "tisa:kernels=3+rope",
        "shaw",
        pytest.param("learned", marks=pytest.mark.slow),
        pytest.param("t5", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_is_one_graph_with_the_same_gradients(name: str) -> None:
    torch.compiler.reset()
    model = causal(name).train()
    ids = torch.randint(2, VOCAB, (2, 16))
    gradients = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        run(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_takes_padding() -> None:
    torch.compiler.reset()
    model = causal("tisa:kernels=3+learned")
    _, ids, mask = prompts()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(
            found[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()]
        )
