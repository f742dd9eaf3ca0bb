"""The official files of GLUE: every layout read, every defect said with file and line."""

from pathlib import Path

import pytest

from glue_files import LAYOUT, write_glue
from whence.experiments.glue.rows import read_rows, read_task
from whence.experiments.glue.tasks import TASKS


@pytest.mark.parametrize("name", LAYOUT)
def test_every_task_is_read_in_its_layout(tmp_path: Path, name: str) -> None:
    task = TASKS[name]
    found = read_task(task, write_glue(tmp_path, name, train=7, dev=3))
    assert len(found.train) == 7
    assert [len(part) for part in found.dev.values()] == [3] * len(task.dev)
    assert (found.train.second is None) == (len(task.columns) == 1)
    classes = len(task.labels)
    wanted = [n % classes for n in range(7)] if classes else [n / 2 for n in range(7)]
    assert list(found.train.labels) == wanted
    assert list(found.dev) == (["matched", "mismatched"] if name == "mnli" else [""])


def test_quotes_marks_and_line_ends_are_as_the_official_files_have_them(tmp_path: Path) -> None:
    folder = write_glue(tmp_path, "mrpc")
    path = folder / "MRPC" / "dev.tsv"
    header = LAYOUT["mrpc"][2]
    lines = [header, '1\t1\t2\tHe said " no\t" yes " he said', "0\t3\t4\ta\u2028b\x85c\td"]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())  # a mark, and no last newline
    found = read_rows(TASKS["mrpc"], path)
    assert found.first == ('He said " no', "a\u2028b\x85c")
    assert found.second == ('" yes " he said', "d")
    assert found.labels == (1.0, 0.0)


def test_columns_are_found_by_name_so_that_mnli_dev_may_have_more(tmp_path: Path) -> None:
    path = tmp_path / "dev_matched.tsv"
    path.write_text("sentence2\tlabel1\tlabel2\tsentence1\tgold_label\nB\tx\ty\tA\tneutral\n")
    found = read_rows(TASKS["mnli"], path)
    assert (found.first, found.second, found.labels) == (("A",), ("B",), (1.0,))


def test_rows_of_qqp_that_break_off_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = write_glue(tmp_path, "qqp", train=4)
    path = folder / "QQP" / "train.tsv"
    path.write_text(path.read_text() + "9\t1\t2\tonly one question\n")
    found = read_task(TASKS["qqp"], folder)
    assert (len(found.train), found.train.left_out) == (4, 1)


BROKEN = [
    ("sst2", "good\t1\textra", "line 4: 3 columns between tabs, and SST-2 has 2"),
    ("sst2", "good", "line 4: 1 columns"),
    ("sst2", " \t1", "line 4: the text is empty"),
    ("sst2", "good\t2", "line 4: the label '2' is not one of 0, 1"),
    ("cola", "gj04\t1\tgood", "line 3: 3 columns between tabs, and CoLA has 4"),
    ("rte", "0\ta\tb\tneutral", "the label 'neutral' is not one of entailment, not_entailment"),
    ("stsb", "0\tg\tf\ty\t0\tn\tn\ta\tb\t5.2", "line 4: the score 5.2 is not between 0 and 5"),
    ("stsb", "0\tg\tf\ty\t0\tn\tn\ta\tb\tnan", "line 4: the score nan is not between 0 and 5"),
    ("stsb", "0\tg\tf\ty\t0\tn\tn\ta\tb\thigh", "line 4: the score 'high' is not a number"),
    ("qqp", "0\t1\t2\ta\tb\t1\tmore", "line 4: 7 columns between tabs, and QQP has 6"),
]


@pytest.mark.parametrize(("name", "row", "message"), BROKEN)
def test_a_broken_row_is_named_by_file_and_line(
    tmp_path: Path, name: str, row: str, message: str
) -> None:
    folder = write_glue(tmp_path, name, train=2)
    path = folder / LAYOUT[name][0] / "train.tsv"
    path.write_text(path.read_text() + row + "\n")
    with pytest.raises(ValueError, match=r"train\.tsv, line") as error:
        read_task(TASKS[name], folder)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_what_is_no_utf_8_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_bytes(b"sentence\tlabel\nfine\t1\nbro\xffken\t0\n")
    with pytest.raises(ValueError, match=r"train\.tsv, line 3: this is not UTF-8"):
        read_rows(TASKS["sst2"], path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"line 1: SST-2 has a line of column names with 'sentence', 'label'"),
        ("good film\t1\n", r"line 1: SST-2 has a line of column names"),
        ("sentence\tlabel\n", "dev.tsv holds 0 rows"),
        ("sentence\tlabel\none row\t1\n", "dev.tsv holds 1 rows"),
    ],
)
def test_a_dev_set_without_a_header_or_rows_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    folder = write_glue(tmp_path, "sst2")
    (folder / "SST-2" / "dev.tsv").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_task(TASKS["sst2"], folder)


@pytest.mark.parametrize("split", ["train", "dev_mismatched"])
def test_a_missing_file_is_named_with_those_that_the_task_needs(tmp_path: Path, split: str) -> None:
    folder = write_glue(tmp_path, "mnli")
    (folder / "MNLI" / f"{split}.tsv").unlink()
    with pytest.raises(ValueError, match=rf"there is no .*{split}\.tsv: MNLI needs train\.tsv"):
        read_task(TASKS["mnli"], folder)


def test_the_digest_of_rows_sees_every_text_and_label(tmp_path: Path) -> None:
    folder = write_glue(tmp_path, "rte")
    before = read_task(TASKS["rte"], folder).sha256
    assert read_task(TASKS["rte"], folder).sha256 == before
    path = folder / "RTE" / "dev.tsv"
    path.write_text(path.read_text().replace("not_entailment", "entailment", 1))
    assert read_task(TASKS["rte"], folder).sha256 != before
