"""README and docs: every block runs and prints what it says, tables and links are up to date."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

import first_picture
import make_tables
from printed_commands import complaint, printed
from tables import first_screen
from tables.gpu import LATER, gpu, gpu_findings, gpu_short, main_run
from tables.methods import spec_with_defaults
from tables.results_folder import ResultsFolder
from whence import METHODS, build, families
from whence.analysis.lm_results import SCRATCH
from whence.bench import PEERS
from whence.cli.root import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WIDTH = 100  # of the terminal that the printed tables are from

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def lines(text: str) -> list[str]:
    """Without what a terminal adds: blanks at the ends of lines, and empty lines."""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_the_first_example_prints_what_its_comment_says() -> None:
    example = next(text for language, text in blocks(ROOT / "README.md") if language == "python")
    said = re.search(r"# (torch\.Size.*)", example)
    assert said is not None
    out = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(out):
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert out.getvalue().startswith(said[1])


@each_page
def test_the_python_of_a_page_runs_from_top_to_bottom_and_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name == "CONTRIBUTING.md":
        pytest.skip("its blocks are parts of files, which another test tries")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    found = blocks(page)
    with torch.random.fork_rng():
        for place, (language, text) in enumerate(found):
            if language != "python":
                continue
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, f"{page.name}, block {place}", "exec"), names)
            follows, said = found[place + 1] if place + 1 < len(found) else ("", "")
            if follows == "text" and directly_after(page, text, said):
                assert lines(out.getvalue()) == lines(said)


def directly_after(page: Path, code: str, said: str) -> bool:
    """Whether a block of text is what the code above it prints: nothing stands between."""
    return f"{code}```\n\n```text\n{said}" in page.read_text(encoding="utf-8")


@each_page
def test_every_command_of_a_page_is_understood_and_prints_what_it_says(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    lines_of_page = [] if page.name == "LOG.md" else printed(page.read_text(encoding="utf-8"))
    assert {line: why for line in lines_of_page if (why := complaint(line))} == {}
    for language, text in blocks(page):
        if language == "console":
            first, _, said = text.partition("\n")
            done = CliRunner().invoke(app, first.removeprefix("$ whence ").split())
            assert done.exit_code == 0, done.stderr
            assert lines(done.stdout) == lines(said)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("whence inspekt model", "no command inspekt"),
        ("whence lm --methods tisa --dta text.txt", "No such option: --dta"),
        ("whence lm --methods tisa:colour=3,t5 --data text.txt", "colour"),
        ("whence explain tisa+alibbi", "alibbi"),
        ("whence methods tissa", "tissa"),
        ("make tests", "no target"),
        ("python docs/make_tabels.py", "there is no docs/make_tabels.py"),
        ("python docs/make_tables.py --chek", "knows no ['--chek']"),
        ("pip install 'whence[cli,plots]'", "extras {'plots'}"),
        ("torchrun --nproc-per-node 2 -m whence lmm --data x", "no command lmm"),
    ],
)
def test_a_printed_command_that_would_not_work_is_found(line: str, why: str) -> None:
    assert list(printed(f"Say `{line}`.\n\n```text\n{line}   # now\n```\n")) == [
        f"{line}   # now",
        line,
    ]
    assert why in (complaint(line) or "")


def test_the_page_of_commands_has_all_of_them_and_names_those_without_json() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    commands = get_command(app).commands.items()  # type: ignore[attr-defined]
    assert set(re.findall(r"^\| `whence ([a-z-]+)", text, re.MULTILINE)) == {x for x, _ in commands}
    said = re.search(r"All but (.*) take `--json`", text)
    assert said is not None
    without = {
        name
        for name, command in commands
        if "--json" not in {o for p in command.params for o in p.opts}
    }
    assert set(re.findall(r"`(\w+)`", said[1])) == without


def test_every_peer_of_the_benchmark_is_in_its_page() -> None:
    text = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    table = text.partition("| peer |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == set(PEERS)


def test_the_method_and_the_family_in_contributing_are_what_they_say() -> None:
    code, row = (
        text for language, text in blocks(ROOT / "CONTRIBUTING.md") if language == "python"
    )
    family = eval(f"({row})", vars(families))[0]
    assert isinstance(family, families.Family)
    names: dict[str, Any] = {"__name__": "yours"}
    exec(compile(code, "yours.py", "exec"), names)
    method = names["Yours"](3)
    assert method.sites() == ("score",)
    assert method.n_parameters() == method.n_parameters_by_formula() == 3
    pos = torch.arange(4)
    bias = method.score_term(torch.zeros(1, 3, 4, 2), pos, pos)
    torch.testing.assert_close(bias.to_dense(pos, pos)[0, 0, 0], -torch.log1p(torch.arange(4.0)))


@pytest.mark.parametrize("name", METHODS)
def test_the_spec_that_the_docs_print_builds_the_method_with_its_defaults(name: str) -> None:
    spec = spec_with_defaults(name)
    with torch.device("meta"):
        plain, spelled = (build(text, n_heads=4, d_head=16) for text in (name, spec))
    assert [p.shape for p in spelled.parameters()] == [p.shape for p in plain.parameters()]


def test_the_tables_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_tables.py", "--check"])
    assert make_tables.main() == 0, "run python docs/make_tables.py"


def test_a_table_that_is_out_of_date_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- table: choosing -->\nold\n<!-- end of table -->\n", encoding="utf-8")
    monkeypatch.setattr(make_tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_tables.py", "--check"])
    assert make_tables.main() == 1
    assert capsys.readouterr().err.startswith("out of date: README.md.")


def test_the_gpu_section_is_there_when_its_results_are_and_not_before(tmp_path: Path) -> None:
    stored = ResultsFolder(tmp_path)
    assert gpu(stored) == ""
    assert "Not measured yet" in gpu_findings(stored)
    assert "Not measured yet" in gpu_short(stored)
    size = {"mode": "both", "n": 512, "d_head": 64, "batch": 32, "causal": False}
    ours = {"contender": "whence:fused", "method": "tisa:kernels=5", **size}
    rows = [
        {**ours, "ms": {"median": 1.234}, "extra_bytes": 56_700_000, "skipped": None},
        {**ours, "contender": "eager", "ms": None, "skipped": "needs about 200 GB, 130 are free"},
        {**ours, "contender": "flash", "method": "nope", "ms": {"median": 99.5}, "extra_bytes": 1e6}
        | {"skipped": None},
    ]
    bars = [
        {"what": "TISA over FA2", "value": 0.987, "rule": "at most", "limit": 1.6, "held": True},
        {"what": "Flex over TISA", "value": None, "rule": "at least", "limit": 2.5, "held": None},
    ]
    machine = {"gpu": "a GPU", "driver": "1", "cudnn": 9, "torch": "2", "triton": "3"}
    machine |= {"python": "3.11", "commit": "abc"}
    config = {"tokens": 16384, "n_heads": 12, "dtype": "bfloat16"}
    path = tmp_path / "results" / "gpu" / "bars.json"
    path.parent.mkdir(parents=True)
    results = {"config": config, "machine": machine, "records": rows, "bars": bars}
    path.write_text(json.dumps(results))
    section = gpu(stored)
    assert "## All that was measured on a GPU" in section
    assert "Of 2 promised ratios: 1 held, 0 missed, 1 not measured.\n" in section
    assert "16,384 tokens a batch, bfloat16" in section
    assert "| TISA over FA2 | 0.99 | at most 1.6 | held | abc |" in section
    assert "| Flex over TISA | - | at least 2.5 | not measured | abc |" in section
    assert "\n**Forward and backward, heads of 64 (commit abc)**\n\n|" in section
    assert "| `tisa:kernels=5`, whence, fused | 1.23 ms, 57 MB |\n" in section
    assert "| FlashAttention-2, no bias | 99.50 ms, 1 MB |" in section
    assert "- `tisa:kernels=5`, eager, n x n, n = 512: needs about 200 GB" in section
    beyond = [{**bars[0], "value": 1.7, "held": False}, bars[1]]
    path.write_text(json.dumps({**results, "bars": beyond}))
    assert "Missed:\n\n- TISA over FA2: 1.70, promised at most 1.6 (commit abc)\n" in gpu(stored)
    decode = {**bars[0], "what": "decode, one sequence, cache of 32,768, as called, over SDPA"}
    before = {**beyond[0], "what": next(iter(LATER))}
    path.write_text(json.dumps({**results, "bars": [before, decode]}))
    assert "1.70, promised at most 1.6 (commit abc; 0.99 at commit abc)\n" in gpu(stored)
    path.write_text(json.dumps({**results, "bars": [decode]}))
    assert gpu_findings(stored).splitlines() == [
        "- **Decoding** one sequence from a cache of 32,768 keys takes 1.0 times as long as "
        "without a bias."
    ]
    short = gpu_short(stored)
    assert "| `whence`, TISA with its gradients | 1.23 ms, 57 MB |\n| FlashAttention-2" in short
    assert "TISA began as its authors have it" in short
    released = {**rows[0], "method": "tisa:kernels=5,start=released", "ms": {"median": 1.1}}
    path.write_text(json.dumps({**results, "records": [*rows, released]}))
    short = gpu_short(stored)
    assert "| the same, `start=released` | 1.10 ms, 57 MB |" in short
    assert "TISA begins with wide Gaussians" in short


@each_page
def test_every_linked_file_and_heading_is_there(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text(encoding="utf-8")):
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if heading:
            found = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {
                re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in found
            }, link


def test_the_readme_is_short_and_has_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    assert {"make demo", "make test"} <= {line.partition("  ")[0] for line in text.splitlines()}


def test_the_first_picture_is_drawn_from_the_results_as_they_are() -> None:
    with Image.open(ROOT / "docs" / "first_picture.png") as picture:
        held = picture.text[first_picture.SOURCE]
    stored = ResultsFolder(ROOT)
    assert held == first_picture.drawn_from(stored), "run python docs/make_pictures.py --results"
    left, *right = first_picture.draw(stored).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in left.get_lines()}
    rope = first_screen.losses(stored)["rope"]
    assert drawn["RoPE"] == [rope[n].mean for n in sorted(rope)]
    costs = [cost.milliseconds for cost in first_screen.costs(stored).values()]
    assert [bar.get_width() for bar in right[0].patches] == costs[::-1]


def test_the_first_numbers_are_those_of_the_results_or_say_what_to_run(tmp_path: Path) -> None:
    missing = first_screen.first_numbers(ResultsFolder(tmp_path))
    assert missing.count("Not measured yet") == 2
    stored = ResultsFolder(ROOT)
    said = first_screen.first_numbers(stored)
    (ours,) = (
        record
        for record in main_run(stored)["records"]
        if (record["contender"], record["method"], record["mode"], record["d_head"], record["n"])
        == ("whence:fused", "tisa:kernels=5", "both", 64, 16_384)
        and not record["causal"]
    )
    assert f"takes {ours['ms']['median']:.1f} ms and {ours['extra_bytes'] / 1e6:.0f} MB" in said
    far = [
        loss["loss"]
        for job in stored.json("lm/python/lm.json")["jobs"]
        for loss in job["losses"]
        if (job["method"], loss["length"], loss["how"]) == ("rope", 8192, SCRATCH)
    ]
    assert f"RoPE's {sum(far) / len(far):.2f}." in said


def test_no_picture_is_larger_than_300_kilobytes() -> None:
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs").glob("*.png")}
    assert {name: size for name, size in sizes.items() if size > 300_000} == {}
