"""Parallel text as files: read, refused with file and line, in tokens and back, and in batches."""

from pathlib import Path

import numpy as np
import pytest
import torch

from parallel_text import write_parallel
from whence.experiments.translation.batches import IGNORED, TokenBatches, rows_of
from whence.experiments.translation.bpe import END_ID, PAD_ID, Bpe, trained_bpe
from whence.experiments.translation.data import joined
from whence.experiments.translation.text import Pairs, ParallelText, read_pairs, read_parallel


def written(folder: Path, source: bytes, target: bytes) -> tuple[Path, Path]:
    (folder / "a.en").write_bytes(source)
    (folder / "a.de").write_bytes(target)
    return folder / "a.en", folder / "a.de"


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        (b"one\ntwo\n", b"eins\n", "a.en has 2 lines and .*a.de has 1: line 2 of .*a.en has no"),
        (b"one\n", b"eins\nzwei", "line 2 of .*a.de has no translation"),
        (b"one\n\n", b"eins\nzwei\n", "a.en, line 2: the line is empty"),
        (b"one\ntwo\n", b"eins\n \t\n", "a.de, line 2: the line is empty"),
        (b"one\ntwo\n", b"eins\nz\xfcwei\n", "a.de, line 2: this is not UTF-8"),
        (b"", b"", "a.en has no lines"),
    ],
)
def test_a_bad_file_is_named_with_its_line(
    tmp_path: Path, source: bytes, target: bytes, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read_pairs(*written(tmp_path, source, target))


def test_only_a_line_feed_ends_a_line_and_white_space_around_is_no_part_of_it(
    tmp_path: Path,
) -> None:
    found = read_pairs(*written(tmp_path, b"\xef\xbb\xbfone\x0c two \r\nb\n", b"eins\nzwei"))
    assert found == Pairs(("one\x0c two", "b"), ("eins", "zwei"))
    assert found.joined(2) == Pairs(("one\x0c two b",), ("eins zwei",))


def test_a_missing_side_is_named_with_what_there_is(tmp_path: Path) -> None:
    folder = write_parallel(tmp_path)
    (folder / "val.de").unlink()
    with pytest.raises(ValueError, match=r"has no val.de; it has test.de, test.en"):
        read_parallel(str(folder), "en", "de", train="train", valid="val", tests=("test",))
    with pytest.raises(ValueError, match="there is no folder"):
        read_parallel(str(folder / "x"), "en", "de", train="train", valid="val", tests=())
    (folder / "val.de").mkdir()
    with pytest.raises(ValueError, match=r"has no val.de; it has [^;]*train.en, val.en\."):
        read_parallel(str(folder), "en", "de", train="train", valid="val", tests=("test",))


def test_the_digest_is_of_every_split_whatever_a_test_is_called() -> None:
    one, two = Pairs(("a",), ("b",)), Pairs(("c",), ("d",))
    found = {ParallelText(one, valid, {"valid": one}).sha256() for valid in (one, two)}
    assert len(found) == 2


def test_texts_go_to_tokens_and_back() -> None:
    texts = ["Two men, in 2019!", "Zwei Männer — 日本 🙂", "a  b\tc", "'s", "a</s> b <pad>"]
    bpe = Bpe(trained_bpe(["Zwei Männer und zwei Männer"] * 5, 280))
    rows = bpe.encode(texts)
    assert all(row.index(END_ID) == len(row) - 1 and PAD_ID not in row for row in rows)
    assert bpe.decode(rows) == texts
    first, second = bpe.encode(["Männer und", "und"])  # a word is the same token wherever it is
    assert first[-2:] == second
    together = bpe.encode(["Männer und zwei"])[0]
    assert first[:-1] + bpe.encode(["zwei"])[0] == together  # so tokens can be joined


def test_batches_hold_a_row_once_a_pass_in_an_order_of_the_seed() -> None:
    draw = np.random.default_rng(0)
    source = [[*draw.integers(2, 90, n).tolist(), END_ID] for n in draw.integers(1, 60, 300)]
    target = [[*draw.integers(2, 90, n).tolist(), END_ID] for n in draw.integers(1, 60, 300)]
    options = {"tokens": 500, "n": 500}
    made = TokenBatches(rows_of(source), rows_of(target), seed=1, **options)
    passes, shapes = [], set()
    for number in range(3 * made.a_pass):
        one = made[number]
        if number % made.a_pass == 0:
            passes.append([])
        assert one["labels"].shape == one["input_ids"].shape
        assert one["input_ids"].numel() <= 500
        shapes.add(tuple(one["input_ids"].shape))
        start = torch.full_like(one["labels"][:, :1], PAD_ID)
        before = torch.cat([start, one["labels"][:, :-1]], dim=1)
        known = before != IGNORED
        torch.testing.assert_close(one["decoder_input_ids"][known], before[known])
        for ids, mask, labels in zip(
            one["input_ids"], one["attention_mask"], one["labels"], strict=True
        ):
            passes[-1].append((ids[mask == 1].tolist(), labels[labels != IGNORED].tolist()))
    pairs = sorted(zip(source, target, strict=True))
    for found in passes:
        assert len(pairs) - 7 < len(found) <= len(pairs)  # a batch of the widest has 7 rows
        assert all(pair in pairs for pair in found)
        assert len({str(pair) for pair in found}) == len(found)
    assert sorted({str(pair) for found in passes for pair in found}) == sorted(map(str, pairs))
    assert shapes == {(16, 16), (16, 24), (15, 32), (10, 48), (7, 64)}
    again = TokenBatches(rows_of(source), rows_of(target), seed=1, **options)
    other = TokenBatches(rows_of(source), rows_of(target), seed=2, **options)
    place = made.a_pass + 3  # of the second pass, as a run that goes on asks for it
    torch.testing.assert_close(again[place], made[place])
    assert other[place]["input_ids"].tolist() != made[place]["input_ids"].tolist()
    assert made[3]["input_ids"].tolist() != made[place]["input_ids"].tolist()
    few = TokenBatches(rows_of(source[:3]), rows_of(target[:3]), tokens=5000, seed=1, n=1)
    assert len(few[0]["labels"]) == 3


def test_joined_rows_keep_all_tokens_in_their_order_and_end_once() -> None:
    draw = np.random.default_rng(0)
    pairs = [
        ([place] * n + [END_ID], [place] * m + [END_ID])
        for place, (n, m) in enumerate(draw.integers(1, 9, (60, 2)).tolist(), start=2)
    ]
    rows = joined(pairs, 24, draw)
    for side in (0, 1):
        flat = [token for row in rows for token in row[side] if token != END_ID]
        assert flat == [token for pair in pairs for token in pair[side] if token != END_ID]
        assert all(row[side].count(END_ID) == 1 and row[side][-1] == END_ID for row in rows)
        assert max(len(row[side]) for row in rows) <= 24
    assert 3 < len(rows) < 30
    assert len({len(row[0]) for row in rows}) > 5
