"""Positional parameters of a whole model: counted, by formula, and as a share."""

import json

import pytest
import torch
from transformers import BertConfig, BertModel
from typer.testing import CliRunner, Result

from whence.analysis.params import ParametersTable, Shape, parameters, parameters_table
from whence.cli.root import app
from whence.method import PositionMethod
from whence.methods import METHODS, build


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def count(spec: str, shape: Shape | None = None) -> int | None:
    return parameters(spec, Shape() if shape is None else shape).count


def test_tisa_in_bert_base_has_the_2160_parameters_of_the_slides() -> None:
    row = parameters("tisa", Shape())
    assert (row.formula, row.count, row.grows) == (
        "n_layers * (3 * n_heads * kernels)",
        3 * 5 * 12 * 12,
        False,
    )
    assert row.count == 2160
    assert row.share == pytest.approx(2160 / 109_091_184)
    assert count("tisa:kernels=1") == 432


@pytest.mark.parametrize(
    ("layers", "heads", "d_head", "length"), [(12, 12, 64, 512), (3, 5, 8, 40), (1, 1, 2, 7)]
)
def test_the_rest_of_the_model_is_transformers_bert(
    layers: int, heads: int, d_head: int, length: int
) -> None:
    d = heads * d_head
    config = BertConfig(
        hidden_size=d,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * d,
        max_position_embeddings=length,
    )
    with torch.device("meta"):
        model = BertModel(config)
    shape = Shape(n_layers=layers, n_heads=heads, d_head=d_head, length=length)
    total = sum(p.numel() for p in model.parameters())
    assert shape.without_position() + length * d == total
    assert parameters("learned", shape).share == pytest.approx(length * d / total)


@pytest.mark.parametrize("name", METHODS)
def test_the_formula_of_the_model_evaluates_to_its_count(name: str) -> None:
    shape = Shape(n_layers=3, n_heads=4, d_head=6, length=20)
    row = parameters(name, shape)
    method = build(name, n_heads=4, d_head=6, max_length=20, n_layers=3)
    names = {
        word: getattr(method, word, None) for word in compile(row.formula, "", "eval").co_names
    }
    value = eval(row.formula, {"__builtins__": {}}, {**names, "n_layers": 3})
    assert value == row.count


def test_what_layers_share_counts_once_and_what_they_do_not_counts_each_time() -> None:
    deep, flat = Shape(n_layers=24), Shape(n_layers=1)
    for name in ("t5", "tupe", "learned"):
        assert count(name, deep) == count(name, flat), name
    for name in ("tisa", "shaw", "synthesizer"):
        assert count(name, deep) == 24 * (count(name, flat) or 0), name
    flow = (count("floater", deep) or 0) - (count("floater", flat) or 0)
    assert flow == 23 * 3 * 768  # the initial states of a layer; the flow itself is shared


def test_a_sum_counts_each_part_by_its_own_rule() -> None:
    row = parameters("tisa+t5", Shape())
    assert row.count == 2160 + 384
    assert row.formula == "n_layers * (3 * n_heads * kernels) + buckets * n_heads"


def test_only_tables_of_positions_grow_with_the_length() -> None:
    grows = {row.method for row in parameters_table().rows if row.grows}
    assert grows == {"learned", "synthesizer", "tupe", "table2d"}


def test_a_table_survives_json_and_a_huge_one_costs_nothing() -> None:
    table = parameters_table(["learned", "nope"], shape=Shape(length=10**9))
    assert table.rows[0].count == 768 * 10**9
    assert ParametersTable.from_json(table.to_json()).to_json() == table.to_json()


@pytest.mark.parametrize(
    ("spec", "length", "grows"),
    [
        ("learned", 1, True),
        ("learned", 2**31 - 1, True),  # twice as long is refused by `build`
        ("tisa", 2**31 - 1, False),
    ],
)
def test_growth_is_told_up_to_the_longest_length_a_method_takes(
    spec: str, length: int, grows: bool
) -> None:
    assert parameters(spec, Shape(length=length)).grows is grows


def test_a_missing_extra_is_said_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(PositionMethod):
        def __init__(self) -> None:
            raise ImportError("it needs moonlight")

    monkeypatch.setitem(METHODS, "missing", Missing)
    row = parameters("missing", Shape())
    assert (row.count, row.share, row.grows, row.needs) == (None, None, None, "it needs moonlight")
    assert "it needs moonlight" in run("params", "--methods", "missing").stdout


def test_the_command_prints_formula_and_count() -> None:
    result = run("params", "--methods", "tisa,learned")
    assert result.exit_code == 0
    for text in ("2,160", "393,216", "0.36%", "109,089,024"):
        assert text in result.stdout
    assert "shaw" not in result.stdout
    everything = run("params").stdout
    assert all(f" {name} " in everything for name in METHODS)


def test_json_is_the_table_of_the_shape_that_is_asked_for() -> None:
    arguments = ["--layers", "6", "--heads", "8", "--d-head", "32", "--length", "128"]
    data = json.loads(run("params", "--json", *arguments).stdout)
    assert data["shape"] == {"n_layers": 6, "n_heads": 8, "d_head": 32, "length": 128}
    found = {row["method"]: row["count"] for row in data["rows"]}
    assert found["tisa"] == 6 * 3 * 8 * 5
    assert found["learned"] == 128 * 256


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["--methods", "tsia"], "Did you mean 'tisa'?"),
        (["--layers", "0"], "layers must be at least 1, got 0"),
        (["--heads", "0"], "heads must be at least 1, got 0"),
        (["--d-head", "0"], "d_head must be at least 1, got 0"),
        (["--length", "99999999999999999999"], "length must be at most 2147483647, got 9"),
        (["--heads", "9223372036854775807"], "heads must be at most 65536, got 9"),
        (["--layers", "99999999999999999999"], "layers must be at most 65536, got 9"),
        (["--length", "2147483647", "--methods", "synthesizer"], "more than 2^63 bytes"),
        (["--d-head", "3", "--methods", "rope"], "even"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments: list[str], phrase: str) -> None:
    result = run("params", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert phrase in result.stderr
