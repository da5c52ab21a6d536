"""Damaged data are refused with a message: no traceback, no crash, and no other tokens where there is a checksum."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshpar.data import Arrow, Jsonl, Numpy, Parquet
from meshpar.data import cache as token_cache
from meshpar.data.corpus import Corpus
from meshpar.data.tokenizer import Ids
from meshpar.errors import DataError, DataWarning
from tests.damage import damaged, outcomes
from tests.sources import texts

Tokens = tuple[list[int], list[float]]


def reader(corpus: Corpus) -> Callable[[], Tokens]:
    """Reads every token of a corpus, and the sides of the split."""

    def read() -> Tokens:
        documents = corpus.documents()
        return documents.take(np.arange(documents.num_tokens))[0].tolist(), documents.share.tolist()

    return read


# Arrow and Parquet ----------------------------------------------------------------------------------------------

TABLES = ["file", "stream", "file of ids", "file of views", "file of a dictionary", "lz4 file", "parquet"]


def table(kind: str, folder: Path) -> tuple[Path, Corpus]:
    import pyarrow as pa
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    column = pa.array([" ".join(texts()[i % 40] for i in range(n, n + 3)) for n in range(60)])
    if "ids" in kind:
        column = pa.array([rng.integers(0, 250, rng.integers(3, 40)).tolist() for _ in range(60)], pa.list_(pa.int32()))
    elif "views" in kind:
        column = column.cast(pa.string_view())
    elif "dictionary" in kind:
        column = column.dictionary_encode()
    data = pa.table({"x": column})
    path = folder / ("a.parquet" if kind == "parquet" else "a.arrow")
    if kind == "parquet":
        parquet.write_table(data, path)
    else:
        new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        options = pa.ipc.IpcWriteOptions(compression="lz4" if "lz4" in kind else None)
        with new(path, data.schema, options=options) as file:
            file.write_table(data, max_chunksize=25)
    tokenizer = {"tokenizer": Ids(vocab_size=250, bos=0)} if "ids" in kind else {}
    corpus = Parquet if kind == "parquet" else Arrow
    return path, corpus(path=str(path), column="x", **tokenizer)


def tables_are_read(folder: Path, num: int) -> None:
    for kind in TABLES:
        path, corpus = table(kind, folder)
        found = outcomes(path, damaged(path.read_bytes(), num), reader(corpus))
        assert found["refused"] > num / 10, kind
        print(kind, dict(found))


def in_a_process(function: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Calls a function in another process, because a crash would end the tests."""
    code = f"from tests.unit.test_damaged_data import *; {function}({', '.join(map(repr, arguments))})"
    return subprocess.run(
        [sys.executable, "-c", "from pathlib import *; " + code], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("num", [24, pytest.param(300, marks=pytest.mark.slow)])
def test_a_damaged_table_is_refused_without_a_traceback_or_a_crash(num: int, tmp_path: Path):
    done = in_a_process("tables_are_read", tmp_path, num)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


def tables_are_read_without_checks(folder: Path) -> None:
    """Reads without checking that offsets lie within their buffer."""
    import pyarrow as pa

    class Unchecked:
        def __init__(self, values: pa.Array):
            self.values = values

        def validate(self, full: bool) -> None:
            pass

        def __getattr__(self, name: str):
            return getattr(self.values, name)

        def __len__(self) -> int:
            return len(self.values)

    right = Arrow.open
    Arrow.open = lambda self, path: (right(self, path)[0], map(Unchecked, right(self, path)[1]))  # pyright: ignore
    path, corpus = table("file", folder)
    outcomes(path, damaged(path.read_bytes(), 300), reader(corpus))


def test_control_unchecked_offsets_end_in_a_traceback_or_a_crash(tmp_path: Path):
    assert in_a_process("believing", tmp_path).returncode != 0


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_two_columns_of_one_name_are_refused(kind: str, tmp_path: Path):
    import pyarrow as pa
    from pyarrow import parquet

    twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(twice, path)
    else:
        with pa.ipc.new_file(path, twice.schema) as file:
            file.write_table(twice)
    corpus = {"arrow": Arrow, "parquet": Parquet}[kind](path=str(path))
    with pytest.raises(DataError, match="has 2 columns named 'text'\n    give each column its own name"):
        corpus.documents()


# NumPy ------------------------------------------------------------------------------------------------------------

WORD_IDS = Ids(vocab_size=50257, bos=50256)


def arrays(folder: Path) -> dict[str, Path]:
    matrix = np.random.default_rng(0).integers(0, 50257, (64, 10))
    np.save(folder / "vector.npy", matrix.reshape(-1).astype(np.uint16))
    np.save(folder / "matrix.npy", matrix.astype(np.int32))
    np.savez(folder / "plain.npz", a=matrix, b=matrix.reshape(-1))
    np.savez_compressed(folder / "packed.npz", a=matrix, b=matrix.reshape(-1))
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("num", [60, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["vector.npy", "matrix.npy", "plain.npz", "packed.npz"])
def test_a_damaged_header_of_an_array_is_refused(name: str, num: int, tmp_path: Path):
    path = arrays(tmp_path)[name]
    copies = damaged(path.read_bytes(), num, 0, 128 if name.endswith("npy") else None)
    found = outcomes(path, copies, reader(Numpy(path=str(path), tokenizer=WORD_IDS)))
    assert found["another"] == 0
    assert found["refused"] > num / 2


def test_no_flipped_bit_of_a_header_changes_the_tokens(tmp_path: Path):
    path = arrays(tmp_path)["vector.npy"]
    right = path.read_bytes()

    def flipped():
        for bit in range(128 * 8):
            copy = bytearray(right)
            copy[bit // 8] ^= 1 << bit % 8
            yield bytes(copy)

    found = outcomes(path, flipped(), reader(Numpy(path=str(path), tokenizer=WORD_IDS)))
    # `=u2` and `|u2` are `<u2` here, and a form feed is as good as a comma before the last brace.
    assert (found["same"], found["another"], found["refused"]) == (3, 0, 1021)


def test_control_damage_after_the_header_changes_the_tokens(tmp_path: Path):
    """A `.npy` file has no checksum: after the header, only ids outside of the vocabulary are noticed."""
    path = arrays(tmp_path)["vector.npy"]
    copies = damaged(path.read_bytes(), 40, 128)
    assert outcomes(path, copies, reader(Numpy(path=str(path), tokenizer=WORD_IDS)))["another"] > 10


def test_an_archive_that_expands_too_far_is_refused_before_it_is_unpacked(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", bytes(2**28 + 1))
    with pytest.raises(DataError, match=r"would expand to 256.00 MiB, 10.. times its size"):
        Numpy(path=str(tmp_path), tokenizer=WORD_IDS).documents()


# The cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path: Path) -> Jsonl:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts()))
    return Jsonl(path=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache"))


def entry(data: Jsonl) -> Path:
    (found,) = Path(str(data.cache)).iterdir()
    return found


FILES = ("tokens.bin", "sizes.npy", "shares.npy", "crc32.json")


@pytest.mark.parametrize("num", [12, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_cache_is_computed_again(name: str, num: int, cached: Jsonl):
    read = reader(cached)
    want = read()
    right = (entry(cached) / name).read_bytes()
    for copy in damaged(right, num):
        (entry(cached) / name).unlink()
        (entry(cached) / name).write_bytes(copy)
        with pytest.warns(DataWarning, match=r"damaged \(.*\); its tokens are computed again"):
            assert read() == want
        assert (entry(cached) / name).read_bytes() == right


def test_control_without_checksums_other_tokens_come_from_the_cache(cached: Jsonl, monkeypatch: pytest.MonkeyPatch):
    read = reader(cached)
    read()
    monkeypatch.setattr(token_cache, "_damaged", lambda entry: [])
    path = entry(cached) / "tokens.bin"
    assert outcomes(path, damaged(path.read_bytes(), 6), read)["another"] == 6  # a bit in each


def test_a_missing_file_of_the_cache_is_computed_again(cached: Jsonl):
    want = reader(cached)()
    for name in FILES:
        (entry(cached) / name).unlink()
        with pytest.warns(DataWarning, match=rf"damaged \({name}\)"):
            assert reader(cached)() == want


@pytest.mark.filterwarnings("ignore::meshpar.errors.DataWarning")
def test_a_cache_that_is_damaged_each_time_is_refused(cached: Jsonl, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_cache, "_damaged", lambda entry: ["tokens.bin"])
    with pytest.raises(DataError, match="is damaged each time it is written"):
        cached.documents()


def test_a_cache_entry_is_synced_before_it_is_renamed(cached: Jsonl, monkeypatch: pytest.MonkeyPatch):
    synced: list[str] = []
    fsync = os.fsync
    rename = Path.rename

    def watched(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    def named(self: Path, to: Path) -> Path:
        assert sorted(synced) == sorted([*FILES, self.name])
        return rename(self, to)

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(Path, "rename", named)
    cached.documents()
    assert synced[-1] == "cache"
