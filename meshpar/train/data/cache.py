"""Tokens that are made once: in a folder whose name is a checksum of all that they are made of."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from meshpar.checkpoint.durable import sync, sync_tree
from meshpar.errors import DataError, DataWarning, Problem
from meshpar.train.data.documents import HEADING, Documents
from meshpar.train.data.fingerprint import checksum
from meshpar.train.data.tokenizer import Tokenizer, TokenizerFile

FORMAT = 2
TOKENS, SIZES, SHARES, SUMS = "tokens.bin", "sizes.npy", "shares.npy", "crc32.json"
ATTEMPTS = 3
CHUNK = 2**22


def cached(
    folder: Path,
    what: dict[str, Any],
    files: Sequence[Path],
    tokenizer: Tokenizer,
    make: Callable[[], Iterable[tuple[float, np.ndarray]]],
    dtype: np.dtype,
) -> Documents:
    """The documents that `make` makes, from the folder if they are there, and else by way of it.

    What is in the folder has been made of the very bytes that the files hold now: each start reads them for their
    checksums. An entry appears whole or not at all, by a rename; two processes that make the same one do no harm, and
    one that is killed leaves a folder `partial-...` that nobody reads. Each start compares the checksums of an entry's
    own files too: what is damaged is made again.

    Args:
      what: the config, as far as the tokens depend on it.
      make: () -> (share, tokens) of each document.

    Raises:
      DataError: the folder cannot be written; the files changed while they were read; the disk does not keep an entry.

    Warns:
      DataWarning: an entry is damaged, and made again.

    Memory: a document at a time while they are made; then pages of the file, as they are read.
    """
    entry = folder / _checksum(what, files, tokenizer, dtype)
    for _ in range(ATTEMPTS):
        if not entry.is_dir():
            _make(entry, make, dtype)
            if entry.name != _checksum(what, files, tokenizer, dtype):
                shutil.rmtree(entry)
                problem = Problem("data", "its files changed while they were read", "start again")
                raise DataError(f"{HEADING}\n{problem}")
        if not (damaged := _damaged(entry)):
            return _open(entry, tokenizer.bos, dtype)
        warnings.warn(f"{entry}: {', '.join(damaged)} damaged; the tokens are made again", DataWarning, stacklevel=2)
        _discard(entry)
    problem = Problem(f"data.cache: {entry}", "is damaged again and again", "put data.cache on another disk")
    raise DataError(f"{HEADING}\n{problem}")


def _checksum(what: dict[str, Any], files: Sequence[Path], tokenizer: Tokenizer, dtype: np.dtype) -> str:
    sources = [(str(path), checksum(path)) for path in files]
    how: list[Any] = [FORMAT, str(dtype), tokenizer.bos, tokenizer.eos]
    if isinstance(tokenizer, TokenizerFile):
        how += [checksum(Path(tokenizer.path)), _version("tokenizers")]
    return hashlib.sha256(json.dumps([what, sources, how], sort_keys=True).encode()).hexdigest()[:32]


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _make(entry: Path, make: Callable[[], Iterable[tuple[float, np.ndarray]]], dtype: np.dtype) -> None:
    partial = entry.with_name(f"partial-{uuid4().hex}")
    with _writing(entry.parent):
        partial.mkdir(parents=True)
    try:
        _write(partial, make(), dtype)
        _publish(partial, entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, documents: Iterable[tuple[float, np.ndarray]], dtype: np.dtype) -> None:
    shares, sizes = [], []
    with (folder / TOKENS).open("wb") as file:
        for share, tokens in documents:
            with _writing(folder.parent):
                file.write(tokens.astype(dtype).data)
            shares.append(share)
            sizes.append(len(tokens))
        with _writing(folder.parent):
            file.flush()
    with _writing(folder.parent):
        np.save(folder / SIZES, np.array(sizes, np.int64))
        np.save(folder / SHARES, np.array(shares, np.float64))
        sums = {name: _crc32(folder / name) for name in (TOKENS, SIZES, SHARES)}
        (folder / SUMS).write_text(json.dumps(sums))
        sync_tree(folder)  # before the rename says that it is whole


def _crc32(path: Path) -> int:
    """It sees each damage of up to 32 bits in a row, and misses one in 4e9 of all others."""
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            total = zlib.crc32(chunk, total)
    return total


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = Problem(f"data.cache = {str(folder)!r}", f"cannot be written: {error.strerror}")
        raise DataError(f"{HEADING}\n{problem}") from None


def _publish(partial: Path, entry: Path) -> None:
    try:
        partial.rename(entry)
    except OSError:
        if not entry.is_dir():  # else another process was first, with the same
            raise
    sync(entry.parent)


def _damaged(entry: Path) -> list[str]:
    """The files of an entry that are not what was written."""
    try:
        sums = json.loads((entry / SUMS).read_bytes())
        return [name for name in (TOKENS, SIZES, SHARES) if sums[name] != _crc32(entry / name)]
    except PermissionError as error:
        problem = Problem(f"data.cache: {error.filename}", f"cannot be read: {error.strerror}")
        raise DataError(f"{HEADING}\n{problem}") from None
    except OSError as error:
        return [Path(str(error.filename)).name]
    except (ValueError, TypeError, KeyError, RecursionError):
        return [SUMS]


def _discard(entry: Path) -> None:
    aside = entry.with_name(f"partial-{uuid4().hex}")
    with _writing(entry.parent), suppress(FileNotFoundError):  # another process was first
        entry.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _open(entry: Path, bos: int, dtype: np.dtype) -> Documents:
    sizes, shares = (np.load(entry / name, allow_pickle=False) for name in (SIZES, SHARES))
    # An empty file cannot be mapped.
    tokens = np.memmap(entry / TOKENS, dtype, "r") if sizes.sum() else np.zeros(0, dtype)
    return Documents.in_a_line(tokens, sizes, shares, bos)
