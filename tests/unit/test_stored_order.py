"""A run that resumes under a newer meshpar reads the rows in the order of the older one, and what that one has encoded.

The numbers here were written down when the order was decided. One that changes makes old checkpoints read rows twice.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshpar.data import Jsonl, Mixture, Shards
from meshpar.data.dataset import Dataset
from meshpar.data.documents import Documents
from meshpar.data.packing import PackedRows
from meshpar.data.rows.block_order import BlockOrder
from meshpar.data.rows.dataset import RowDataset
from meshpar.data.rows.source import Indexed, Row
from meshpar.data.rows.spec import RowSpec
from meshpar.errors import DataError

SEED = 3
NUM_ROWS = 9
ONE_BY_ONE = [0, 3, 1, 2, 4, 5, 6, 7, 8, 5, 8, 4, 1, 2, 3, 6, 0, 7]
"""The rows of two epochs, of packed tokens and of arrays that are read one by one."""
BLOCKS = [8, 2, 0, 3, 6, 1, 5, 7, 4, 6, 5, 3, 1, 2, 0, 7, 4, 8]
"""The same, of rows in three blocks."""
DRAWN = [811, 268, 278, 986, 558, 736]
"""A random number for each of the first rows of arrays."""
MIXED = 857591639
"""The CRC-32 of five batches of a mixture."""


def packed(seed: int) -> list[int]:
    """The first token of each row tells which one it is."""
    documents = Documents.joined([(0.0, np.array([r])) for r in range(NUM_ROWS)], NUM_ROWS, np.uint8)
    dataset = Dataset((PackedRows(documents, seq_len=2),), NUM_ROWS, seed)
    return [row for i in range(2) for row in dataset[i]["tokens"][:, 1].tolist()]


def in_arrays(seed: int, blocks: np.ndarray | None = None) -> list[int]:
    source = Indexed("own", [{"row": r} for r in range(NUM_ROWS)], NUM_ROWS, blocks)
    dataset = RowDataset(source, RowSpec.of({"row": 0}, "row 0"), NUM_ROWS, seed)
    return [row for i in range(2) for row in dataset.rows(i, np.arange(NUM_ROWS))["row"].tolist()]


def in_blocks(seed: int) -> list[int]:
    return in_arrays(seed, np.array([0, 3, 5, NUM_ROWS]))


def drawn(seed: int) -> list[int]:
    def transform(row: Row, draw: np.random.Generator) -> Row:
        return {"row": draw.integers(1000)}

    source = Indexed("own", [{"row": r} for r in range(NUM_ROWS)], NUM_ROWS)
    dataset = RowDataset(source, RowSpec.of({"row": 0}, "row 0"), 6, seed, transform=transform)
    return dataset.rows(0, np.arange(6))["row"].tolist()


def mixed(seed: int) -> int:
    parts = [{"weight": w, "data": {"kind": "synthetic", "noise": w}} for w in (0.5, 0.3, 0.2)]
    train = Mixture(parts=parts, seq_len=32, batch_size=4).train(seed)
    total = 0
    for i in range(5):
        for name in ("tokens", "targets", "segments", "positions"):
            total = zlib.crc32(train[i][name].astype("<i4").tobytes(), total)
    return total


READ = {"tokens": (packed, ONE_BY_ONE), "arrays": (in_arrays, ONE_BY_ONE),
        "blocks": (in_blocks, BLOCKS), "random numbers": (drawn, DRAWN), "mixture": (mixed, MIXED)}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_seed_gives_the_rows_that_it_has_always_given(name):
    read, stored = READ[name]
    assert read(SEED) == stored
    assert read(SEED + 1) != stored  # or the numbers would show nothing


def test_control_another_shuffle_is_seen(monkeypatch):
    monkeypatch.setattr(BlockOrder, "_draw", lambda self, *which: np.random.default_rng((self.seed + 1, *which)))
    assert in_blocks(SEED) != BLOCKS


ENTRY = "78db0917184e8d295d69cb104d762a7b"
"""The name of the cache's entry for the data of `cached`: a checksum of all that its tokens depend on."""


def cached(folder: Path) -> Jsonl:
    (folder / "texts.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    return Jsonl(path="texts.jsonl", cache="cache", seq_len=4, held_out_fraction=0.3)


def write_entry(folder: Path) -> None:
    """An entry as it was written, with other tokens than the texts have, to see which of the two are read."""
    folder.mkdir(parents=True)
    (folder / "tokens.bin").write_bytes(b"abcde")
    np.save(folder / "sizes.npy", np.array([2, 3], np.int64))
    np.save(folder / "shares.npy", np.array([0.25, 0.75]))
    names = ("tokens.bin", "sizes.npy", "shares.npy")
    (folder / "crc32.json").write_text(json.dumps({name: zlib.crc32((folder / name).read_bytes()) for name in names}))


@pytest.mark.parametrize(("entry", "expected"), [(ENTRY, b"cde"), (ENTRY[::-1], b"one")])
def test_a_cache_that_was_written_is_read(tmp_path, monkeypatch, entry, expected):
    """Under another name it is not: the control."""
    monkeypatch.chdir(tmp_path)
    data = cached(tmp_path)
    write_entry(tmp_path / "cache" / entry)
    train = data.train(0)
    assert bytes(train.parts[0].documents.take(np.arange(1, 4))[0].tolist()) == expected
    assert ENTRY in [path.name for path in (tmp_path / "cache").iterdir()]


def write_shards(folder: Path, **changes: Any) -> Shards:
    """Two documents to train on, `ab` and `c`, and one that is held out, as a build wrote them."""
    files = {"train.ids": b"\0ab\0c", "train.opens": b"\x09", "held_out.ids": b"\0d", "held_out.opens": b"\x01"}
    place = folder / "00000-of-00001"
    place.mkdir(parents=True)
    for name, content in files.items():
        (place / name).write_bytes(content)
    sums = {name: zlib.crc32(content) for name, content in files.items()}
    sides = {"train": {"documents": 2, "tokens": 5}, "held_out": {"documents": 1, "tokens": 2}}
    manifest = {
        "version": 1, "dtype": "uint8", "held_out_fraction": 0.25, "sources": "",
        "tokenizer": {"kind": "bytes", "vocab_size": 257, "bos": 256, "eos": None},
        "shards": [{**sides, "crc32": sums, "shares": [0.1, 0.3, 0.4]}],
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    return Shards(path=str(folder), seq_len=5, batch_size=1, held_out_fraction=0.25)


def test_shards_that_were_built_are_read(tmp_path):
    train, held_out = write_shards(tmp_path).datasets(0)
    assert train[0]["tokens"].tolist() == [[256, *b"ab", 256, *b"c"]]
    assert held_out[0]["tokens"].tolist() == [[256, *b"d", 256, 256, 256]]


def test_control_shards_of_another_version_are_refused(tmp_path):
    with pytest.raises(DataError, match="is of version 2"):
        write_shards(tmp_path, version=2).datasets(0)
