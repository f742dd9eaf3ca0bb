"""torch.compile and torch.export see a native model as one graph, with the same numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from transformers import CompileConfig

from models import GREEDY, LENGTH, VOCAB, causal, prompts, seq2seq
from whence.methods import METHODS

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
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("shaw", "learned", "t5")),
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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_rows_that_begin_at_other_places_in_each_batch_train_compiled(backend: str) -> None:
    torch.compiler.reset()
    model = causal("fire").train()
    compiled = torch.compile(model, backend=backend)
    for pads in ((0, 0), (2, 5), (1, 3), (4, 0), (3, 3)):
        ids, mask = torch.randint(2, VOCAB, (2, 9)), torch.arange(9) >= torch.tensor(pads)[:, None]
        labels, gradients = ids.masked_fill(~mask, -100), []
        for run in (model, compiled):
            model.zero_grad()
            run(ids, attention_mask=mask, labels=labels).loss.backward()
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


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


# Of the other methods attention depends on where a sequence begins, so that padding sorts rows.
DECODED = [name for name, method in METHODS.items() if not method.anchored]
ALWAYS = ["tisa:kernels=3+rope", "shaw"]


@pytest.mark.parametrize(
    "name", [*ALWAYS, *(pytest.param(x, marks=pytest.mark.slow) for x in DECODED)]
)
def test_one_compiled_graph_decodes_every_token(name: str) -> None:
    torch.compiler.reset()
    model = causal(name)
    assert model._can_compile_fullgraph
    _, ids, mask = prompts()
    graphs: list[torch.fx.GraphModule] = []
    wanted = model.generate(ids, attention_mask=mask, max_new_tokens=6, **GREEDY)
    found = decoded(model, graphs, input_ids=ids, attention_mask=mask, max_new_tokens=6)
    assert torch.equal(found, wanted)
    assert len(graphs) == 1


def test_one_compiled_graph_decodes_every_token_of_an_encoder_decoder() -> None:
    torch.compiler.reset()
    model = seq2seq("tisa")
    _, ids, mask = prompts()
    graphs: list[torch.fx.GraphModule] = []
    wanted = model.generate(ids, attention_mask=mask, max_new_tokens=6, **GREEDY)
    found = decoded(model, graphs, input_ids=ids, attention_mask=mask, max_new_tokens=6)
    assert torch.equal(found, wanted)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "options", [{"position": "fire"}, {"position": "tisa", "sliding_window": 4}]
)
def test_what_cannot_be_one_graph_is_decoded_without_compiling(options: dict[str, Any]) -> None:
    model = causal(options.pop("position"), **options)
    _, ids, mask = prompts()
    graphs: list[torch.fx.GraphModule] = []
    wanted = model.generate(ids, attention_mask=mask, max_new_tokens=3, **GREEDY)
    found = decoded(model, graphs, input_ids=ids, attention_mask=mask, max_new_tokens=3)
    assert torch.equal(found, wanted)
    assert not graphs


def decoded(model: Any, graphs: list[torch.fx.GraphModule], **arguments: Any) -> Tensor:
    """Tokens by `generate` with a static cache, its steps compiled; every graph is added."""

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph

    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True  # else on a GPU alone
    return model.generate(
        **arguments, compile_config=config, cache_implementation="static", **GREEDY
    )
