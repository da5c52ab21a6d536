"""Packing loses and repeats nothing; a batch depends on config, seed and index alone; threads end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from meshpar.data import Data, StandardLibrary, Synthetic, Text
from meshpar.data.dataset import Dataset
from meshpar.data.documents import Documents, share
from meshpar.data.file_ranges import FileRange
from meshpar.data.packing import Batch, PackedRows

BOS = 256
CORPORA = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8)


def packed(documents: list[bytes], seq_len: int) -> PackedRows:
    tokens = [(0.0, np.frombuffer(document, np.uint8)) for document in documents]
    return PackedRows(Documents.joined(tokens, BOS, np.uint16), seq_len)


def scattered(documents: list[bytes], seq_len: int) -> PackedRows:
    """The same rows from documents in arrays of their own, stored in reverse order with other bytes around them."""
    arrays = tuple(np.frombuffer(b"?" + document + b"??", np.uint8) for document in reversed(documents))
    num = len(documents)
    size = np.array([len(document) for document in documents])
    return PackedRows(Documents(arrays, np.arange(num)[::-1], np.ones(num, int), size, np.zeros(num), BOS), seq_len)


def test_joined_rows_are_one_document_each():
    apart = packed([b"abc", b"d", b"efghi"], 4)
    joined = PackedRows(apart.documents, 4, joined=True)
    assert len(joined) == len(apart)
    expected = apart.batch(range(len(apart)))
    batch = joined.batch(range(len(apart)))
    assert {*expected} - {*batch} == {"segments"}
    assert np.array_equal(batch["tokens"], expected["tokens"]) and np.array_equal(batch["targets"], expected["targets"])
    assert (batch["positions"] == np.arange(4)).all() and not np.array_equal(batch["positions"], expected["positions"])


def expected_rows(documents: list[bytes], seq_len: int) -> list[dict[str, list[int]]]:
    """The definition, token by token: what `PackedRows.batch` must give, without the padding."""
    rows: list[dict[str, list[int]]] = []
    at = 0
    for document in documents:
        tokens = [BOS, *document]
        for i, token in enumerate(tokens):
            if at % seq_len == 0:
                rows.append({"tokens": [], "targets": [], "segments": [], "positions": []})
            row = rows[-1]
            new = i == 0 or at % seq_len == 0
            row["positions"].append(0 if new else row["positions"][-1] + 1)
            row["segments"].append((row["segments"] or [0])[-1] + new)
            row["tokens"].append(token)
            row["targets"].append(tokens[i + 1] if i + 1 < len(tokens) else -1)
            at += 1
    return rows


def assert_packs(rows: PackedRows, documents: list[bytes]) -> None:
    expected = expected_rows(documents, rows.seq_len)
    assert len(rows) == len(expected)
    batch = rows.batch(range(len(rows)))
    for r, row in enumerate(expected):
        real = batch["segments"][r] > 0
        assert np.array_equal(real, np.arange(rows.seq_len) < len(row["tokens"]))
        assert {name: array[r][real].tolist() for name, array in batch.items()} == row
    assert all(array.dtype == np.int32 for array in batch.values())
    assert (batch["targets"][batch["segments"] == 0] == -1).all()


@given(CORPORA, st.integers(1, 50))
@settings(deadline=None)
def test_rows_equal_the_definition(documents: list[bytes], seq_len: int):
    assert_packs(packed(documents, seq_len), documents)
    assert_packs(scattered(documents, seq_len), documents)


@given(CORPORA, st.integers(1, 50))
@settings(deadline=None)
def test_each_byte_is_once_a_token_and_once_a_target(documents: list[bytes], seq_len: int):
    rows = packed(documents, seq_len)
    batch = rows.batch(range(len(rows)))
    tokens = batch["tokens"][batch["segments"] > 0]
    assert bytes(tokens[tokens != BOS].tolist()) == b"".join(documents)
    assert bytes(batch["targets"][batch["targets"] >= 0].tolist()) == b"".join(documents)
    assert (tokens == BOS).sum() == len(documents) == len(rows.documents)


class LosesTheLastRow(PackedRows):
    def __len__(self) -> int:
        return self.documents.num_tokens // self.seq_len


class PredictsAcrossDocuments(PackedRows):
    def batch(self, rows) -> Batch:
        batch = super().batch(rows)
        ends = (batch["targets"] == -1) & (batch["segments"] > 0)
        return batch | {"targets": np.where(ends, BOS, batch["targets"])}


class ForgetsTheNextRow(PackedRows):
    def batch(self, rows) -> Batch:
        batch = super().batch(rows)
        batch["targets"][:, -1] = -1
        return batch


class HasNoPositions(PackedRows):
    def batch(self, rows) -> Batch:
        return super().batch(rows) | {"positions": np.zeros_like(super().batch(rows)["tokens"])}


@pytest.mark.parametrize("fault", [LosesTheLastRow, PredictsAcrossDocuments, ForgetsTheNextRow, HasNoPositions])
def test_a_fault_in_packing_is_seen(fault: type[PackedRows]):
    documents = [b"one", b"two, and longer", b"x"]
    good = packed(documents, 8)
    assert_packs(good, documents)
    with pytest.raises(AssertionError):
        assert_packs(fault(good.documents, good.seq_len), documents)


def numbered(num_rows: int, batch_size: int, seed: int | None) -> Dataset:
    """A corpus whose row r is one document of the single token r."""
    documents = Documents.joined([(0.0, np.array([r])) for r in range(num_rows)], num_rows, np.uint32)
    return Dataset((PackedRows(documents, seq_len=2),), batch_size, seed)


def row_order(dataset: Dataset, num_batches: int) -> list[int]:
    return [row for i in range(num_batches) for row in dataset[i]["tokens"][:, 1].tolist()]


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 2**40))
@settings(deadline=None, max_examples=30)
def test_every_row_comes_once_an_epoch(num_rows: int, batch_size: int, seed: int):
    order = row_order(numbered(num_rows, batch_size, seed), -(-3 * num_rows // batch_size))
    for epoch in range(3):
        assert sorted(order[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_the_order_depends_on_epoch_and_seed_alone():
    orders = {}
    for seed in range(4):
        order = row_order(numbered(64, 16, seed), 12)
        assert order == row_order(numbered(64, 16, seed), 12)
        orders |= {(seed, epoch): tuple(order[epoch * 64 : (epoch + 1) * 64]) for epoch in range(3)}
    assert len(set(orders.values())) == len(orders)
    assert tuple(range(64)) not in orders.values()


@pytest.mark.parametrize("start", [0, 1, 7, 1000])
def test_iterating_from_k_is_random_access_from_k(start: int):
    dataset = Synthetic(batch_size=4, seq_len=32, num_documents=20, held_out_fraction=0.3).train(seed=3)
    batches = dataset.batches(start)
    for i, batch in enumerate(islice(batches, 12), start):
        assert all(np.array_equal(batch[name], array) for name, array in dataset[i].items())
    assert not np.array_equal(dataset[start]["tokens"], dataset[start + 1]["tokens"])
    batches.close()


def test_held_out_rows_come_once_in_order_and_the_last_batch_is_padded():
    dataset = numbered(10, 4, seed=None)
    batches = list(dataset)
    assert len(batches) == len(dataset) == 3
    assert row_order(dataset, 3)[:10] == list(range(10))
    assert batches[-1]["segments"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert batches[-1]["targets"].tolist() == [[8, -1], [9, -1], [-1, -1], [-1, -1]]
    assert all(batch["tokens"].shape == (4, 2) for batch in batches)
    assert list(dataset.batches(3)) == list(dataset.batches(7)) == []
    for outside in (-1, 3):
        with pytest.raises(IndexError):
            dataset[outside]


def prefetching() -> int:
    return sum(thread.name.startswith("grain-prefetch") for thread in threading.enumerate())


def all_end_within(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while prefetching() and time.monotonic() < deadline:
        time.sleep(0.01)
    return prefetching() == 0


def test_no_thread_outlives_its_batches():
    dataset = numbered(10, 4, seed=0)
    closed = dataset.batches()
    dropped = dataset.batches()
    held = dataset.batches()
    for batches in (closed, dropped, held):
        next(batches)
    assert prefetching() > 0
    closed.close()
    del dropped, batches
    assert not all_end_within(0.2), "the batches still held must keep their threads, or this test sees nothing"
    held.close()
    assert all_end_within(5)
    list(numbered(10, 4, seed=None))
    assert all_end_within(5)


def test_threads_end_even_while_the_traceback_of_an_interrupt_holds_on_to_them():
    batches = numbered(10, 4, seed=0).batches()
    next(batches)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        batches.throw(KeyboardInterrupt)
    assert all_end_within(5)
    assert "iterator" in interrupt.traceback[-1].locals


def test_the_split_is_the_same_in_every_process():
    """The CRC-32 of "a" is 0xE8B7BE43 by definition."""
    assert share(b"a") == 0xE8B7BE43 / 2**32


NAMES = st.lists(st.binary(min_size=1, max_size=8), min_size=3, max_size=20, unique=True)


def sides(names: list[bytes], fraction: float) -> list[set[bytes]]:
    documents = Documents.joined([(share(name), np.array([i])) for i, name in enumerate(names)], 99, np.uint8)
    return [{names[i] for i in side.take(np.arange(side.num_tokens))[0][1::2]} for side in documents.split(fraction)]


@given(NAMES, st.floats(0.2, 0.8))
def test_a_new_document_moves_no_other(names: list[bytes], fraction: float):
    shares = [share(name) for name in names[1:]]
    assume(min(shares) < fraction <= max(shares))
    before = sides(names[1:], fraction)
    after = sides(names, fraction)
    assert all(old <= new for old, new in zip(before, after, strict=True))
    assert not after[0] & after[1]
    assert after[0] | after[1] == set(names)


def all_tokens(side: Dataset) -> list[int]:
    return [t for part in side.parts for t in part.documents.take(np.arange(part.documents.num_tokens))[0].tolist()]


def test_text_reads_every_file_in_the_order_of_its_path(tmp_path):
    for name, text in {
        "b.txt": b"bee",
        "a/z.txt": b"zed",
        "c.md": b"no",
        "e.txt": b"",
        "\u00e9.txt": b"\xff",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text)
    data = Text(path=str(tmp_path), seq_len=4, batch_size=2, held_out_fraction=0.5)
    sides = data.train(seed=0), data.held_out()
    texts = [bytes(t for t in all_tokens(side) if t != BOS) for side in sides]
    assert Counter(b"".join(texts)) == Counter(b"zedbee\xff")
    assert [path.name for path in data.files()] == ["z.txt", "b.txt", "e.txt", "\u00e9.txt"]
    assert sum(side.num_documents for side in sides) == 3
    assert sum(side.num_tokens for side in sides) == 3 + len(b"zedbee\xff")
    assert data.vocab_size == 257


def test_every_byte_is_stored_in_a_byte_and_the_opening_id_is_not_stored(tmp_path: Path):
    (tmp_path / "all.txt").write_bytes(bytes(range(256)))
    documents = Text(path=str(tmp_path)).documents()
    assert [array.dtype for array in documents.arrays] == [np.uint8]
    assert documents.take(np.arange(257))[0].tolist() == [256, *range(256)]


def test_the_standard_library_is_its_source_without_tests():
    data = StandardLibrary()
    contents = list(data.read(FileRange(tuple(data.files()))))
    names = [str(content.name) for content in contents]
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not any({"test", "tests", "site-packages", "idle_test"} & set(name.split("/")) for name in names)
    source = next(content.content for content in contents if content.name == "json/decoder.py")
    assert "class JSONDecoder" in source
    train, held_out = data.datasets(seed=0)
    assert 0.02 < held_out.num_documents / (train.num_documents + held_out.num_documents) < 0.1


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_synthetic_documents_follow_their_rule_but_for_noise(noise: float):
    data = Synthetic(vocab_size=17, noise=noise, num_documents=40)
    train = data.train(seed=0)
    batch = train.parts[0].batch(range(train.num_rows))
    counts = (batch["targets"] >= 0) & (batch["tokens"] != data.tokenizer.bos)
    follows = batch["targets"][counts] == (batch["tokens"][counts] + 1) % data.tokenizer.bos
    assert follows.mean() == pytest.approx(1 - noise + noise / data.tokenizer.bos, abs=0.02)
    assert batch["tokens"].max() == data.tokenizer.bos == data.vocab_size - 1


def test_the_seed_orders_the_rows_and_changes_nothing_in_them():
    data = Synthetic(num_documents=30, held_out_fraction=0.3)
    first = data.train(seed=1)
    second = data.train(seed=2)
    assert all_tokens(first) == all_tokens(second)
    assert not np.array_equal(first[0]["tokens"], second[0]["tokens"])
    assert np.array_equal(first[0]["tokens"], replace(second, seed=1)[0]["tokens"])


def test_a_source_is_chosen_by_its_kind():
    data = TypeAdapter(Data)
    assert isinstance(data.validate_python({"kind": "stdlib"}), StandardLibrary)
    assert data.validate_python({"kind": "text", "path": "corpus"}) == Text(path="corpus")
    assert data.validate_python({"kind": "synthetic", "vocab_size": 12}) == Synthetic(vocab_size=12)


def test_a_source_is_checked_without_importing_its_reader():
    code = "import sys, meshpar.data; sys.exit(bool({'grain', 'pyarrow', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
