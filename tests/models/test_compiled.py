"""torch.compile and torch.export see a native model as one graph, with the same numbers."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from models import LENGTH, VOCAB, causal, prompts

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


class Logits(nn.Module):
    """The logits of padded tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(ids, attention_mask=mask, use_cache=False).logits


def padded(b: int, n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(2, VOCAB, (b, n)), torch.arange(n) >= torch.arange(b)[:, None]


EXPORTED = [
    "tisa+rope",
    "shaw",
    *(
        pytest.param(x, marks=pytest.mark.slow)
        for x in ("t5", "alibi", "kerple", "transformer_xl", "learned", "rope")
    ),
]


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_model_takes_any_batch_and_length(name: str) -> None:
    model = Logits(causal(name))
    b, n = Dim("b", min=1, max=8), Dim("n", min=9, max=LENGTH)
    exported = export(model, padded(3, 11), dynamic_shapes=({0: b, 1: n}, {0: b, 1: n}))
    for shape in ((1, 9), (3, 11), (4, 31)):
        ids, mask = padded(*shape)
        found, wanted = exported.module()(ids, mask), model(ids, mask)
        torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-4, atol=1e-4)


def test_padding_cannot_be_exported_where_the_position_depends_on_the_beginning() -> None:
    with pytest.raises(ValueError, match="cannot sort rows by their padding"):
        export(Logits(causal("fire")), padded(3, 11))
