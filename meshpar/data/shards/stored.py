"""Documents whose token ids are in files: written once, and read in place."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from meshpar.data.documents import no_data
from meshpar.regular_files import open_regular

_TOGETHER = 2**18
_MOST_OPEN = 64
KINDS = ("ids", "opens")
AGAIN = "the command that built the shards builds the damaged ones again"


class SideWriter:
    """Writes documents one after the other: their ids, and a bit for each place that opens one.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with SideWriter(Path(folder.name) / "train", np.dtype(np.uint8)) as writer:
    ...     writer.add(np.array([7, 8]))
    >>> writer.num_tokens, (Path(folder.name) / "train.ids").read_bytes()
    (3, b'\\x00\\x07\\x08')
    >>> folder.cleanup()
    """

    def __init__(self, path: Path, dtype: np.dtype):
        self.num_documents = self.num_tokens = 0
        self.crc32: dict[str, int] = {}
        self._dtype = dtype
        self._files = {f"{path.name}.{kind}": path.with_name(f"{path.name}.{kind}").open("wb") for kind in KINDS}
        self._ids = np.zeros(0, dtype)
        self._opens = np.zeros(0, bool)
        self._bodies: list[np.ndarray] = []
        self._num_waiting = 0

    def __enter__(self) -> SideWriter:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self._flush(whole=True)
        finally:
            for file in self._files.values():
                file.close()

    def add(self, ids: np.ndarray) -> None:
        """Appends a document with these ids, integers[length]."""
        self._bodies.append(ids)
        self.num_documents += 1
        self.num_tokens += 1 + len(ids)
        self._num_waiting += 1 + len(ids)
        if self._num_waiting >= _TOGETHER:
            self._flush(whole=False)

    def _flush(self, whole: bool) -> None:
        """Writes what waits, up to a multiple of eight places: the bits of a byte are written at once."""
        ends = np.cumsum([1 + len(body) for body in self._bodies], dtype=np.int64)
        opens = np.zeros(ends[-1] if len(ends) else 0, bool)
        opens[np.concatenate([[0], ends[:-1]]).astype(np.int64) if len(ends) else []] = True
        ids = np.zeros(len(opens), self._dtype)
        ids[~opens] = np.concatenate([np.zeros(0, self._dtype), *self._bodies]).astype(self._dtype)
        ids, opens = np.concatenate([self._ids, ids]), np.concatenate([self._opens, opens])
        until = len(ids) if whole else len(ids) // 8 * 8
        contents = ids[:until].tobytes(), np.packbits(opens[:until], bitorder="little").tobytes()
        for (name, file), content in zip(self._files.items(), contents, strict=True):
            file.write(content)
            self.crc32[name] = zlib.crc32(content, self.crc32.get(name, 0))
        self._ids, self._opens = ids[until:], opens[until:]
        self._bodies, self._num_waiting = [], len(self._ids)


@dataclass(frozen=True)
class StoredDocuments:
    """The documents of all shards, one after the other. Only what `take` asks for is in memory.

    They are read by `pread` and not mapped: pages of a mapped file count as memory of the process until the kernel
    needs them, and a mapped file that is cut off ends the process.

    Args:
      shards: where the files of each shard are, without their endings.
      ends: int64[shards]. The number of tokens up to the end of each shard.
      bos: the token that opens each document.
      vocab_size: all ids are smaller.
    """

    shards: tuple[Path, ...]
    ends: np.ndarray
    num_documents: int
    dtype: np.dtype
    bos: int
    vocab_size: int

    def __len__(self) -> int:
        return self.num_documents

    @property
    def num_tokens(self) -> int:
        """The number of tokens, including one `bos` per document."""
        return int(self.ends[-1])

    def take(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `Documents.take`, of positions int64[..., length] that are consecutive in each row.

        Raises:
          DataError: a file is shorter than it was, or has an id outside of the vocabulary.
        """
        rows = at.reshape(-1, at.shape[-1])
        tokens = np.full(rows.shape, self.bos, np.int32)
        opens = np.ones(rows.shape, bool)
        for row, first in enumerate(rows[:, 0].tolist()):
            done, stop = 0, min(rows.shape[1], self.num_tokens - first)
            while done < stop:
                ids, bits = self._read(first + done, stop - done)
                here = slice(done, done + len(ids))
                tokens[row, here] = np.where(bits, np.int32(self.bos), ids)
                opens[row, here] = bits
                done += len(ids)
        return tokens.reshape(at.shape), opens.reshape(at.shape)

    def _read(self, at: int, num: int) -> tuple[np.ndarray, np.ndarray]:
        """Up to `num` ids from a position on, within one shard, and whether each place opens a document."""
        shard = int(np.searchsorted(self.ends, at, side="right"))
        start = at - (int(self.ends[shard - 1]) if shard else 0)
        stop = start + min(num, int(self.ends[shard]) - at)
        path = self.shards[shard]
        size = self.dtype.itemsize
        ids = np.frombuffer(self._bytes(path.with_name(f"{path.name}.ids"), start * size, stop * size), self.dtype)
        first, last = start // 8, -(-stop // 8)
        packed = np.frombuffer(self._bytes(path.with_name(f"{path.name}.opens"), first, last), np.uint8)
        bits = np.unpackbits(packed, bitorder="little").view(bool)[start - first * 8 : stop - first * 8]
        if (beyond := int(ids.max())) >= self.vocab_size:
            where = f"{path}.ids, token {start + int(ids.argmax())}"
            what = f"has the token id {beyond}, outside of the vocabulary of {self.vocab_size}: the file is damaged"
            raise no_data(where, what, AGAIN)
        return ids, bits

    def _bytes(self, path: Path, start: int, stop: int) -> bytes:
        try:
            content = self._opened(path).read(start, stop)
        except OSError as error:
            raise no_data(str(path), f"cannot be read: {error.strerror}", AGAIN) from None
        if len(content) < stop - start:
            what = f"ends at byte {path.stat().st_size}: it was cut off while the run read it"
            raise no_data(str(path), what, AGAIN)
        return content

    @cached_property
    def _opened(self) -> Callable[[Path], _Open]:
        return lru_cache(maxsize=_MOST_OPEN)(_Open)


class _Open:
    """An open file, which is closed when nobody refers to it: a thread that reads it does.

    The cache may have forgotten it meanwhile, or never have known it, if another thread opened the same file.
    """

    def __init__(self, path: Path):
        self._file = open_regular(path)

    def read(self, start: int, stop: int) -> bytes:
        return os.pread(self._file.fileno(), stop - start, start)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()
