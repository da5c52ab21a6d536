"""safetensors files: headers that are checked before they are believed, reads of byte ranges, a writer.

    8 bytes    N, little endian
    N bytes    JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__"
    the rest   the tensors, row-major, without gaps

A range is read, not mapped: what a process holds are the bytes that it asked for, once.

Source: github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshpar.errors import CheckpointError, Problems
from meshpar.regular import open_regular

LONGEST_HEADER = 100_000_000
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("float64"), "F32": np.dtype("float32"), "F16": np.dtype("float16"),
    "BF16": np.dtype(jnp.bfloat16), "I64": np.dtype("int64"), "I32": np.dtype("int32"),
    "I16": np.dtype("int16"), "I8": np.dtype("int8"), "U8": np.dtype("uint8"), "BOOL": np.dtype("bool"),
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies.

    Args:
      begin: of its first byte, in the file.
    """

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int

    def read(self, rows: slice = slice(None), columns: slice = slice(None)) -> np.ndarray:
        """`[rows, columns]` of a matrix, or `[rows]` of a vector; no other bytes are read.

        Raises:
          CheckpointError: the file ends, though its header was right: it was changed meanwhile.
        """
        first, last, _ = rows.indices(self.shape[0])
        left, right, _ = columns.indices(self.shape[1] if len(self.shape) > 1 else 1)
        width, size = math.prod(self.shape[1:]), self.dtype.itemsize
        part = np.empty((last - first, right - left), self.dtype)
        file = os.open(self.file, os.O_RDONLY)
        try:
            if right - left == width:
                self._fill(file, part, self.begin + first * width * size)
            else:
                for row, into in zip(range(first, last), part, strict=True):
                    self._fill(file, into, self.begin + (row * width + left) * size)
        finally:
            os.close(file)
        return part if len(self.shape) > 1 else part[:, 0]

    def _fill(self, file: int, array: np.ndarray, offset: int) -> None:
        buffer = _bytes(array)
        while buffer:
            num_read = os.preadv(file, [buffer], offset)
            if not num_read:
                raise CheckpointError(f"{self.file} ends while it is read: it was changed meanwhile")
            buffer, offset = buffer[num_read:], offset + num_read


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]


def tensors_in(path: Path, problems: Problems) -> dict[str, Tensor]:
    """The tensors of a file by name, or none and what is wrong with it.

    Args:
      problems: gets all that the header says and the file is not.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                what = (
                    f"{size} bytes long, and says that its header alone has {length}" if size >= 8 else f"{size} bytes"
                )
                problems.add(str(path), f"is cut short, or no safetensors file: it is {what}", "fetch it again")
                return {}
            header = _parse(file.read(length))
    except OSError as error:
        problems.add(str(path), f"cannot be read: {error.strerror}")
        return {}
    except ValueError as error:
        problems.add(str(path), f"has a header that is not one of safetensors: {error}", "fetch it again")
        return {}
    return _checked(path, header, 8 + length, size, problems)


def _parse(text: bytes) -> dict[str, dict[str, Any]]:
    try:
        header = json.loads(text.decode(), object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(header, dict):
        raise ValueError("it is no mapping of names")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not _is_entry(entry):
            raise ValueError(f"{name} has {json.dumps(entry)[:200]}; dtypes are {', '.join(DTYPES)}")
    return header


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError("a name stands in it twice")
    return names


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.get("dtype") not in CODES.values():
        return False
    offsets = entry.get("data_offsets")
    return _are_counts(entry.get("shape")) and _are_counts(offsets) and len(offsets or []) == 2


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _checked(path: Path, header: dict[str, Any], start: int, size: int, problems: Problems) -> dict[str, Tensor]:
    """Every tensor has as many bytes as its shape, and together they are the file: no gap, no overlap, no rest."""
    before = len(problems)
    for name, entry in header.items():
        (begin, end), needed = entry["data_offsets"], math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
        if end - begin != needed:
            what = f"{entry['dtype']}{entry['shape']} takes {needed} bytes, but its header gives it {end - begin}"
            problems.add(f"{path}: {name}", what, "fetch the file again")
    ranges = [(0, 0, "the header"), *sorted((*entry["data_offsets"], name) for name, entry in header.items())]
    for (_, end, earlier), (begin, _, name) in pairwise(ranges):
        if begin != end:
            how = "overlaps with" if begin < end else "leaves a gap behind"
            problems.add(f"{path}: {name}", f"begins at byte {begin}: it {how} {earlier}, which ends at {end}")
    end = start + max(end for _, end, _ in ranges)
    if size != end:
        what = f"is cut short: it has {size} bytes" if size < end else f"is too long: it has {size} bytes"
        problems.add(str(path), f"{what}, and its header accounts for {end}", "fetch it again")
    if len(problems) > before:
        return {}
    return {
        name: Tensor(path, DTYPES[entry["dtype"]], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for name, entry in header.items()
    }


@dataclass(frozen=True)
class Written:
    """A tensor to be written: made when its turn comes, so that only one is in memory."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(path: Path, tensors: Iterable[Written]) -> None:
    """Writes a new file. The header is filled up to a multiple of 8 bytes, as PyTorch's readers like it.

    Raises:
      FileExistsError: there is one already.
    """
    tensors = list(tensors)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for one in tensors:
        offsets, end = [end, end + one.num_bytes], end + one.num_bytes
        header[one.name] = {"dtype": CODES[one.dtype], "shape": [*one.shape], "data_offsets": offsets}  # pyright: ignore
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one in tensors:
            made = np.ascontiguousarray(one.make(), one.dtype)
            assert made.shape == one.shape, (one.name, made.shape, one.shape)
            file.write(_bytes(made))
