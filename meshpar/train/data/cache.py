"""Tokens that are made once: in a folder whose name is a checksum of all that they are made of."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from meshpar.errors import DataError, Problem
from meshpar.train.data.documents import HEADING, Documents
from meshpar.train.data.tokenizer import Tokenizer, TokenizerFile

FORMAT = 1
TOKENS, SIZES, SHARES = "tokens.bin", "sizes.npy", "shares.npy"


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
    one that is killed leaves a folder `partial-...` that nobody reads.

    Args:
      what: the config, as far as the tokens depend on it.
      make: () -> (share, tokens) of each document.

    Raises:
      DataError: the folder cannot be written; the files changed while they were read; an entry is damaged.

    Memory: a document at a time while they are made; then pages of the file, as they are read.
    """
    entry = folder / _checksum(what, files, tokenizer, dtype)
    if not entry.is_dir():
        _make(entry, make, dtype)
        if entry.name != _checksum(what, files, tokenizer, dtype):
            shutil.rmtree(entry)
            raise DataError(f"{HEADING}\n{Problem('data', 'its files changed while they were read', 'start again')}")
    return _open(entry, tokenizer.bos, dtype)


def _checksum(what: dict[str, Any], files: Sequence[Path], tokenizer: Tokenizer, dtype: np.dtype) -> str:
    sources = [(str(path), _file_checksum(path)) for path in files]
    how: list[Any] = [FORMAT, str(dtype), tokenizer.bos, tokenizer.eos]
    if isinstance(tokenizer, TokenizerFile):
        how += [_file_checksum(Path(tokenizer.path)), _version("tokenizers")]
    return hashlib.sha256(json.dumps([what, sources, how], sort_keys=True).encode()).hexdigest()[:32]


def _file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
            os.fsync(file.fileno())  # before the rename says that it is whole
    with _writing(folder.parent):
        np.save(folder / SIZES, np.array(sizes, np.int64))
        np.save(folder / SHARES, np.array(shares, np.float64))


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


def _open(entry: Path, bos: int, dtype: np.dtype) -> Documents:
    try:
        sizes, shares = (np.load(entry / name, allow_pickle=False) for name in (SIZES, SHARES))
        num_bytes = (entry / TOKENS).stat().st_size
        damaged = num_bytes != sizes.sum() * dtype.itemsize or len(sizes) != len(shares)
    except (OSError, ValueError, EOFError):
        damaged = True
    if damaged:
        problem = Problem(f"data.cache: {entry}", "is damaged", "remove it: it is made again")
        raise DataError(f"{HEADING}\n{problem}")
    # An empty file cannot be mapped.
    tokens = np.memmap(entry / TOKENS, dtype, "r") if num_bytes else np.zeros(0, dtype)
    return Documents.in_a_line(tokens, sizes, shares, bos)
