"""Table 1, measured: the probes know what theory knows, and judge a method they never saw."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from whence.analysis import probes
from whence.analysis.criteria import RULES, CriteriaReport, Criterion, MethodCriteria, measured
from whence.analysis.slides_table import CRITERIA, NOTES, TABLE_1, WHY, tick
from whence.cli.root import app
from whence.lag import DenseBias, LagBias, Line
from whence.method import PositionMethod
from whence.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]

# In the order of CRITERIA; where theory is silent, or the answer a matter of degree, a dot.
KNOWN = {
    "sinusoidal": "y n y n y n",
    "learned": "n y n n y n",
    "shaw": "y y y y y n",
    "t5": "y y y y y y",
    "floater": "y y n n n n",
    "synthesizer": "n y n n y n",
    "tupe": "n y n n y n",
    "rope": "y n y y y n",
    "tisa": "y y y y y y",
    "alibi": "y n y y y y",
    "kerple": "y y y y y y",
    "sandwich": "y n y y y y",
    "tisa2": "y y y y y y",
    "xpos": "y n y y y n",
    "nope": "y n y y y .",
    "cope": "y y y y y n",
    "content_band": "y y n y y n",
    "deberta": "y y n y y n",
    "transformer_xl": "y y n y y n",
    "forget": "y y y y y .",
    "fire": "y y y n y .",
}


@functools.cache
def row_of(name: str) -> MethodCriteria:
    return measured(name)


def verdicts(row: MethodCriteria) -> list[bool | None]:
    return [cell.verdict for cell in row.criteria]


def stored() -> CriteriaReport:
    return CriteriaReport.load(ROOT / "results" / "criteria.json")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "floater" else ()) for n in METHODS]
)
def test_every_method_is_judged_as_theory_and_the_committed_results_have_it(name: str) -> None:
    row = row_of(name)
    assert [cell.name for cell in row.criteria] == list(CRITERIA) == list(RULES)
    assert row.time > 0
    for cell, known in zip(row.criteria, KNOWN.get(name, ". . . . . .").split(), strict=True):
        if known != ".":
            assert cell.verdict == (known == "y"), (cell.name, cell.text)
    (committed,) = (old for old in stored().rows if old.method == name)
    assert verdicts(committed) == verdicts(row), "run whence criteria --out results/criteria.json"


def test_the_slides_table_is_theirs_and_every_difference_from_it_has_a_reason() -> None:
    assert tick("shaw", "parallelizable") is False
    assert tick("tisa", "interpretable") is True
    assert tick("alibi", "interpretable") is None
    assert set(TABLE_1) <= set(METHODS)
    found = stored().differences()
    assert found
    for method, cell in found:
        assert cell.why == WHY[method, cell.name]
    assert {(method, cell.name) for method, cell in found} == set(WHY)  # no reason for nothing
    assert {method for method, _ in NOTES} <= set(METHODS)


class Absolute(PositionMethod):
    """A bias of the key's position: not a function of lag, but bounded and free of parameters."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def score_term(
        self, q: Tensor, q_pos: Tensor, k_pos: Tensor, *, content: object = None
    ) -> DenseBias:
        def function(q_pos: Tensor, k_pos: Tensor) -> Tensor:
            return (0.1 * k_pos).sin().to(q.dtype).expand(1, self.n_heads, len(q_pos), -1)

        return DenseBias(function, q_pos, k_pos, "it looks at the key's position")


class Growing(PositionMethod):
    """A number for each lag that max_length has."""

    def __init__(self, n_heads: int, max_length: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(n_heads, 2 * max_length - 1))

    def score_term(
        self, q: Tensor, q_pos: Tensor, k_pos: Tensor, *, content: object = None
    ) -> LagBias:
        return LagBias(self.table[None, :, None])


class Scaled(PositionMethod):
    """Content times a learned number: a parameter, but none of position."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def query_heads(self, q: Tensor, q_pos: Tensor) -> Tensor:
        return q * self.scale


class ScaledWithLag(Scaled):
    """Content scaled, as some methods do, and a function of lag: the scale is no part of it."""

    def score_term(
        self, q: Tensor, q_pos: Tensor, k_pos: Tensor, *, content: object = None
    ) -> LagBias:
        return LagBias.line(torch.ones(q.shape[1], dtype=q.dtype))


class Sequential(PositionMethod):
    """Position vectors made one after the other."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(d_model))

    def input_term(self, pos: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
        state, states = self.start, []
        for _ in range(int(pos[-1]) + 1):
            state = (state + 0.1).sin()
            states.append(state)
        return torch.stack(states)[pos]


class Exploding(PositionMethod):
    """Finite at the length it was built for, and not at twice that."""

    def __init__(self, n_heads: int, max_length: int) -> None:
        super().__init__()
        self.n_heads, self.max_length = n_heads, max_length

    def score_term(
        self, q: Tensor, q_pos: Tensor, k_pos: Tensor, *, content: object = None
    ) -> LagBias:
        curve = torch.full((1, self.n_heads, 1, 2 * self.max_length + 1), 0.0, dtype=q.dtype)
        curve[..., -1] = float("nan")
        return LagBias(curve, Line(), Line())


class LearningValues(PositionMethod):
    """Nothing in the logits; a learned vector at each place is added to the values."""

    def __init__(self, d_head: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(d_head))

    def value_heads(self, v: Tensor, k_pos: Tensor) -> Tensor:
        return v + (0.1 * k_pos).sin().to(v.dtype)[:, None] * self.vector


@pytest.fixture
def throwaway(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (Absolute, Growing, Scaled, ScaledWithLag, Sequential, Exploding, LearningValues):
        monkeypatch.setitem(METHODS, cls.__name__.lower(), cls)


@pytest.mark.usefixtures("throwaway")
@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("absolute", [True, False, True, False, True, False]),
        ("growing", [False, True, False, True, True, True]),
        ("scaled", [True, False, True, True, True, None]),
        ("scaledwithlag", [True, False, True, True, True, True]),
        ("sequential", [True, True, True, False, False, False]),
        ("exploding", [False, False, True, True, True, None]),
        ("learningvalues", [True, True, True, True, True, None]),
    ],
)
def test_a_method_that_the_probes_never_saw_is_judged_rightly(
    name: str, known: list[bool | None]
) -> None:
    row = measured(name)
    assert verdicts(row) == known, [cell.text for cell in row.criteria]
    assert [cell.slides for cell in row.criteria] == [None] * 6


@pytest.mark.usefixtures("throwaway")
def test_what_stops_a_method_at_a_longer_input_is_said() -> None:
    assert probes.longest_run("tisa") == (8, "")
    assert probes.longest_run("exploding") == (1, "the output is not finite")
    factor, why = probes.longest_run("learned")
    assert factor == 1
    assert "Learned knows positions 0..31" in why


@pytest.mark.parametrize(("name", "count"), [("tisa", 60), ("kerple", 8)])
def test_numbers_in_units_of_their_own_are_not_moved_out_of_reach(name: str, count: int) -> None:
    assert probes.learning_parameters(name) == (count, count)


def test_a_sum_is_judged_as_a_whole_and_keeps_to_the_causal_part() -> None:
    share = probes.lag_share("tisa+alibi")
    assert share == pytest.approx(1.0)
    assert probes.largest_change("tisa+sinusoidal") > 0.1
    assert probes.made("tisa+xpos", 8)[1] is True


def test_the_share_of_a_mixture_lies_between_those_of_its_parts() -> None:
    shares = [probes.lag_share(spec) for spec in ("rope", "rope+alibi", "alibi")]
    assert shares == sorted(shares)  # type: ignore[type-var]
    assert shares[0] < shares[1] < shares[2] == pytest.approx(1.0)  # type: ignore[operator]


def test_measuring_twice_gives_the_same_and_leaves_the_callers_state_alone() -> None:
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second = measured("shaw"), measured("shaw")
    torch.testing.assert_close(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert [c.to_json() for c in first.criteria] == [c.to_json() for c in second.criteria]


def test_a_report_survives_json_and_a_file(tmp_path: Path) -> None:
    cell = Criterion("interpretable", None, "none", None, None, "")
    row = MethodCriteria("nope", (cell,), 1.0)
    report = CriteriaReport((row,), RULES, {"floater": "needs torchdiffeq"}, {"torch": "2"})
    assert CriteriaReport.from_json(report.to_json()).to_json() == report.to_json()
    path = report.save(tmp_path / "criteria.json")
    assert CriteriaReport.load(path).rows[0].criteria[0].verdict is None
    with pytest.raises(ValueError, match="expected a result of kind MethodCriteria"):
        MethodCriteria.from_json(report.to_json())


def test_the_command_prints_the_table_and_writes_the_same_results(tmp_path: Path) -> None:
    path = tmp_path / "new" / "criteria.json"
    result = run("criteria", "--methods", "tisa,shaw:clip=4,values=false", "--out", str(path))
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    report = CriteriaReport.load(path)
    assert [row.method for row in report.rows] == ["tisa", "shaw:clip=4,values=false"]
    assert report.versions["torch"] == torch.__version__
    for name, rule in RULES.items():
        assert " ".join(f"{name}: {rule}".split()) in " ".join(result.stdout.split())


def test_the_command_says_why_the_slides_differ() -> None:
    result = run("criteria", "--methods", "t5")
    assert WHY["t5", "inductive"] in " ".join(result.stdout.split())
    assert "(✗!)" in result.stdout


def test_no_value_is_cut_in_a_table_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run("criteria", "--methods", "t5,transformer_xl,content_band")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    for part in ("time", "0.00035%", "20480", "pretable"):
        assert part in result.stdout


def test_json_is_the_report() -> None:
    data = json.loads(run("criteria", "--methods", "nope", "--json").stdout)
    assert data["kind"] == "CriteriaReport"
    assert data["rows"][0]["criteria"][5]["verdict"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "phrase"),
    [
        (["--methods", "tisa,rpoe"], 2, "Did you mean 'rope'?"),
        (["--methods", "tisa,tisa"], 2, "listed twice"),
        (["--methods", "tisa,"], 2, "empty method name"),
        (["--methods", "tisa:kernel=5"], 2, "Did you mean 'kernels'?"),
        (["--methods", "nope", "--out", "/dev/null/x/criteria.json"], 1, "cannot write"),
    ],
)
def test_wrong_use_is_one_line_before_any_work(
    arguments: list[str], code: int, phrase: str
) -> None:
    result = run("criteria", *arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert phrase in result.stderr


def test_a_method_that_cannot_be_built_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Missing(PositionMethod):
        def __init__(self) -> None:
            raise ImportError("it needs moonlight")

    monkeypatch.setitem(METHODS, "missing", Missing)
    result = run("criteria", "--methods", "missing,nope", "--json")
    assert result.exit_code == 0
    assert result.stderr == "whence: left out missing: it needs moonlight\n"
    report = CriteriaReport.from_json(result.stdout)
    assert [row.method for row in report.rows] == ["nope"]
    assert report.left_out == {"missing": "it needs moonlight"}


def test_the_page_has_every_verdict_and_every_difference_of_the_committed_results() -> None:
    page, report = (ROOT / "docs" / "criteria.md").read_text(encoding="utf-8"), stored()
    assert [row.method for row in report.rows] == list(METHODS)
    assert "commit" in report.versions
    for row in report.rows:
        (line,) = re.findall(rf"^\| `{re.escape(row.method)}` \|(.*)\|$", page, re.MULTILINE)
        cells = [cell.strip() for cell in line.split("|")]
        assert len(cells) == 7
        for shown, cell in zip(cells, row.criteria, strict=False):
            assert shown.startswith({True: "✓", False: "✗", None: "-"}[cell.verdict])
            assert cell.text in shown
    for method, cell in report.differences():
        assert re.search(rf"- `{method}`, {cell.name}: .*{re.escape(cell.why)}", page)
