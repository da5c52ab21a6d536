"""Whatever a data path names is read, or refused with a message, in bounded time."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from meshpar.data import Data, Synthetic, Text, TokenizerFile
from meshpar.data import jsonl as json_lines
from meshpar.errors import ConfigError, DataError, MeshparError
from tests.damage import at_most, damaged
from tests.sources import write_tokenizer

KINDS = {"text": "txt", "jsonl": "jsonl", "parquet": "parquet", "arrow": "arrow", "numpy": "npy", "numpy ": "npz"}
KINDS |= {"webdataset": "tar", "array_record": "array_record"}
IDS = {"kind": "ids", "vocab_size": 300, "bos": 0}


def link(to: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(to)


def holds(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def sparse(path: Path) -> None:
    """A sparse file of 3 GB, which has no line, header or footer."""
    with path.open("wb") as file:
        file.truncate(3 * 10**9)


REFUSED: dict[str, Callable[[Path], None]] = {
    "nowhere": link("nowhere"),
    "circle": lambda path: path.symlink_to(path.name),
    "device": link("/dev/zero"),
    "pipe": os.mkfifo,
    "folder": os.mkdir,
}
EITHER: dict[str, Callable[[Path], None]] = {
    "empty": holds(b""),
    "zeros": holds(bytes(5000)),
    "mark": holds(b"\xef\xbb\xbf"),
    "marked": holds(b'\xef\xbb\xbf{"text": "a"}\n'),
    "UTF-16": holds('{"text": "a"}\n'.encode("utf-16")),
    "gzip": holds(gzip.compress(bytes(10**6))),
    "random": holds(np.random.default_rng(0).bytes(10_000)),
    "half a character": holds(b'{"text": "\xc3"}'),
    "half a pair": holds(b'{"text": "\\ud800"}\n' * 3),
    "numbers": holds(b"1e999\n" * 3),
    "digits": holds(b"9" * 10_000),
    "nested": holds(b"[" * 100_000),
    "ids": holds(b'{"text": [1e3]}\n{"text": [-1]}\n{"text": [4294967296]}\n'),
    "PAR1": holds(b"PAR1" + b"\xff" * 100 + b"PAR1"),
    "ARROW1": holds(b"ARROW1\0\0" + b"\xff" * 100 + b"ARROW1"),
    "NUMPY": holds(b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (9999999999,), }"),
    "zip": holds(b"PK\x05\x06" + bytes(18)),
}


def read(kind: str, path: str) -> None:
    tokenizer = {"tokenizer": IDS} if kind.strip() == "numpy" else {}
    data = TypeAdapter(Data).validate_python(
        {"kind": kind.strip(), "path": path, "held_out_fraction": 0.5, **tokenizer}
    )
    with at_most(20):
        data.datasets(seed=0)
        data.fingerprint()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", REFUSED)
def test_a_path_that_is_no_regular_file_is_refused(kind: str, fault: str, tmp_path: Path):
    REFUSED[fault](tmp_path / f"a.{KINDS[kind]}")
    for path in (tmp_path, *([tmp_path / f"a.{KINDS[kind]}"] if fault != "folder" else [])):
        with pytest.raises(DataError):
            read(kind, str(path))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", EITHER)
def test_a_file_with_any_content_is_read_or_refused(kind: str, fault: str, tmp_path: Path):
    EITHER[fault](tmp_path / f"a.{KINDS[kind]}")
    (tmp_path / f"b.{KINDS[kind]}").write_bytes((tmp_path / f"a.{KINDS[kind]}").read_bytes())
    try:
        read(kind, str(tmp_path))
    except DataError as error:
        assert len(str(error)) < 10_000  # noqa: PT017


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "text"])
def test_a_sparse_file_of_three_gigabytes_is_refused_at_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(json_lines, "LONGEST_LINE", 10**6)
    sparse(tmp_path / f"a.{KINDS[kind]}")
    with pytest.raises(DataError), at_most(20):
        TypeAdapter(Data).validate_python(
            {"kind": kind.strip(), "path": str(tmp_path)} | ({"tokenizer": IDS} if "numpy" in kind else {})
        ).train(seed=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["", "x" * 300, "a/" * 3000, "a\0b", "\ud800", "/dev/null", "/proc/self/mem", "~"])
def test_a_path_to_nothing_is_refused(kind: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((DataError, ValidationError)):
        read(kind, path)


@pytest.mark.parametrize("glob", ["a\0b", "x" * 300, "[", "**", "***", "**/**/**/*", "\ud800"])
def test_an_odd_pattern_is_refused_without_a_traceback(glob: str, tmp_path: Path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises((DataError, ConfigError)):
        Text(path=str(tmp_path), glob=glob).datasets(seed=0)


# tokenizer.json -----------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None, True, -1, 2**31, 2**32 - 1, 2**63, 0.5, "", "x", [], ["x"], {}, {"type": "x"},
    {"type": "WordLevel", "vocab": {}, "unk_token": "[UNK]"}, {"type": "WordPiece", "vocab": {"a": 0}},
]  # fmt: skip


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    for key in (
        list(node)[:12] if isinstance(node, dict) else range(min(3, len(node))) if isinstance(node, list) else ()
    ):
        yield from places(node[key], (*at, key))


def mutated(content: bytes) -> Iterator[bytes]:
    whole = json.loads(content)
    for *parents, last in places(whole):
        for value in [*VALUES, "removed"]:
            copy = json.loads(content)
            node = copy
            for key in parents:
                node = node[key]
            if value == "removed":
                del node[last]
            else:
                node[last] = value
            yield json.dumps(copy).encode()
    yield from damaged(content, 300)


def encode_and_decode(tokenizer: TokenizerFile, folder: Path) -> None:
    documents = Text(path=str(folder), tokenizer=tokenizer, held_out_fraction=0.5).documents()
    tokenizer.decode(documents.take(np.arange(documents.num_tokens))[0].tolist())
    _ = tokenizer.opening, tokenizer.eos, tokenizer.token(3)


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_tokenizer_is_read_or_refused(every: int, tmp_path: Path):
    (tmp_path / "a.txt").write_text("a mesh, 1 né")
    (tmp_path / "b.txt").write_text("for each dim")
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    encode_and_decode(tokenizer, tmp_path)
    path = tmp_path / "tokenizer.json"
    found = Counter[str]()
    for number, content in enumerate(mutated(path.read_bytes())):
        if number % every:
            continue
        path.unlink()
        path.write_bytes(content)
        try:
            with at_most(20):
                encode_and_decode(tokenizer, tmp_path)
            found["read"] += 1
        except MeshparError:
            found["refused"] += 1
        except BaseException as error:
            error.add_note(f"by the damaged copy {number}")
            raise
    print(dict(found))
    assert found["read"] > 5 and found["refused"] > 30


def test_a_batch_that_exceeds_the_memory_is_refused_at_once():
    data = Synthetic(batch_size=10**8)
    with at_most(20), pytest.raises(DataError) as error:
        data.datasets(seed=0)
    heading, where, what, fix = str(error.value).splitlines()
    assert (heading, where) == ("the batches do not fit into memory:", "  data.batch_size = 100000000")
    assert what.startswith("    10 batches of 256 tokens a row take 3814.70 GiB of ")
    most = int(fix.removeprefix("    at most ").removesuffix(" fit"))
    data.model_copy(update={"batch_size": most}).datasets(seed=0)
