"""Stores the tokens of a corpus in a folder whose name is a checksum of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshpar.data.documents import Documents, no_data
from meshpar.data.fingerprint import checksum, crc32
from meshpar.data.tokenizer import Tokenizer, TokenizerFile
from meshpar.data.whole_folder import discard, writing, written
from meshpar.errors import DataWarning

FORMAT = 2
TOKENS = "tokens.bin"
SIZES = "sizes.npy"
SHARES = "shares.npy"
SUMS = "crc32.json"
ATTEMPTS = 3


def cached(
    folder: Path,
    what: dict[str, Any],
    files: Sequence[Path],
    tokenizer: Tokenizer,
    make: Callable[[], Iterable[tuple[float, np.ndarray]]],
    dtype: np.dtype,
) -> Documents:
    """Reads the documents that `make` computes from the folder. If they are not there, it computes and writes them.

    An entry of the folder is used only if the files have the content from which it was computed: each start reads
    them to compare their checksums. Two processes may compute the same entry. Each start also compares the checksums of
    the entry's own files, and recomputes a damaged entry.

    Args:
      what: the part of the config on which the tokens depend.
      make: () -> (share, tokens) of each document.

    Raises:
      DataError: the folder cannot be written; the files changed while they were read; each new entry is damaged.

    Warns:
      DataWarning: an entry is damaged, and is recomputed.

    Memory: one document at a time while tokens are computed; afterwards, the pages of the mapped file that are read.
    """
    entry = folder / _checksum(what, files, tokenizer, dtype)
    where = f"data.cache = {str(folder)!r}"
    for _ in range(ATTEMPTS):
        if not entry.is_dir():
            _write(entry, where, make(), dtype)
            if entry.name != _checksum(what, files, tokenizer, dtype):
                shutil.rmtree(entry)
                raise no_data("data", "its files changed while they were read", "start the run again")
        if not (damaged := _damaged(entry)):
            return _open(entry, tokenizer.bos, dtype)
        what_happened = f"{entry}: damaged ({', '.join(damaged)}); its tokens are computed again"
        warnings.warn(what_happened, DataWarning, stacklevel=2)
        discard(entry, where)
    raise no_data(f"data.cache: {entry}", "is damaged each time it is written", "put data.cache on another disk")


def _checksum(what: dict[str, Any], files: Sequence[Path], tokenizer: Tokenizer, dtype: np.dtype) -> str:
    sources = [(str(path), checksum(path)) for path in files]
    encoding: list[Any] = [FORMAT, str(dtype), tokenizer.bos, tokenizer.eos]
    if isinstance(tokenizer, TokenizerFile):
        from tokenizers import __version__

        encoding += [checksum(Path(tokenizer.path)), __version__]
    return hashlib.sha256(json.dumps([what, sources, encoding], sort_keys=True).encode()).hexdigest()[:32]


def _write(
    entry: Path, where: str, documents: Iterable[tuple[float, np.ndarray]], dtype: np.dtype
) -> None:  # fmt: skip
    shares = []
    sizes = []
    with written(entry, where) as folder:
        with (folder / TOKENS).open("wb") as file:
            for share, tokens in documents:
                with writing(where):
                    file.write(tokens.astype(dtype).data)
                shares.append(share)
                sizes.append(len(tokens))
            with writing(where):
                file.flush()
        with writing(where):
            np.save(folder / SIZES, np.array(sizes, np.int64))
            np.save(folder / SHARES, np.array(shares, np.float64))
            sums = {name: crc32(folder / name) for name in (TOKENS, SIZES, SHARES)}
            (folder / SUMS).write_text(json.dumps(sums))


def _damaged(entry: Path) -> list[str]:
    """The files of an entry whose checksums differ from those recorded when they were written."""
    try:
        sums = json.loads((entry / SUMS).read_bytes())
        return [name for name in (TOKENS, SIZES, SHARES) if sums[name] != crc32(entry / name)]
    except PermissionError as error:
        raise no_data(f"data.cache: {error.filename}", f"cannot be read: {error.strerror}") from None
    except OSError as error:
        return [Path(str(error.filename)).name]
    except (ValueError, TypeError, KeyError, RecursionError):
        return [SUMS]


def _open(entry: Path, bos: int, dtype: np.dtype) -> Documents:
    sizes = np.load(entry / SIZES, allow_pickle=False)
    shares = np.load(entry / SHARES, allow_pickle=False)
    # An empty file cannot be mapped.
    tokens = np.memmap(entry / TOKENS, dtype, "r") if sizes.sum() else np.zeros(0, dtype)
    return Documents.in_a_line(tokens, sizes, shares, bos)
