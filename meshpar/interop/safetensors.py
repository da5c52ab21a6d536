"""Checks, reads and writes safetensors files. A read may be of a slice of a tensor.

    8 bytes    N, little endian
    N bytes    JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__"
    the rest   the tensors, row-major, without gaps

Slices are read with `preadv`. The library's `safe_open` maps the file instead: a process then holds whole pages around
each row, and a bus error kills the process if the file is truncated meanwhile.

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
from meshpar.regular_files import open_regular

LONGEST_HEADER = 100_000_000
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("float64"), "F32": np.dtype("float32"), "F16": np.dtype("float16"),
    "BF16": np.dtype(jnp.bfloat16), "I64": np.dtype("int64"), "I32": np.dtype("int32"),
    "I16": np.dtype("int16"), "I8": np.dtype("int8"), "U8": np.dtype("uint8"), "BOOL": np.dtype("bool"),
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file, not read yet.

    Args:
      begin: offset of its first byte in the file.
    """

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int

    def read(self, rows: slice = slice(None), columns: slice = slice(None)) -> np.ndarray:
        """Reads `[rows, columns]` of a matrix, or `[rows]` of a vector, and no other bytes.

        Raises:
          CheckpointError: the file was truncated after its header was checked.
        """
        first, last, _ = rows.indices(self.shape[0])
        left, right, _ = columns.indices(self.shape[1] if len(self.shape) > 1 else 1)
        width = math.prod(self.shape[1:])
        size = self.dtype.itemsize
        part = np.empty((last - first, right - left), self.dtype)
        runs = [(first, part)] if right - left == width else zip(range(first, last), part, strict=True)
        with self.file.open("rb", buffering=0) as file:
            for row, into in runs:
                self._fill(file.fileno(), into, self.begin + (row * width + left) * size)
        return part if len(self.shape) > 1 else part[:, 0]

    def _fill(self, file: int, array: np.ndarray, offset: int) -> None:
        buffer = _bytes(array)
        while buffer:
            num_read = os.preadv(file, [buffer], offset)
            if not num_read:
                raise CheckpointError(f"{self.file} was truncated while it was read")
            buffer = buffer[num_read:]
            offset += num_read


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]


def tensors_in(path: Path, problems: Problems) -> dict[str, Tensor]:
    """The tensors of a file by name; none if the header is wrong.

    Args:
      problems: every fault of the header is added.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                what = f"it has {size} bytes"
                if size >= 8:
                    what += f", and says that its header alone has {length}"
                problems.add(str(path), f"is truncated, or no safetensors file: {what}", "download it again")
                return {}
            header = _parse(file.read(length))
    except OSError as error:
        problems.add(str(path), f"cannot be read: {error.strerror}")
        return {}
    except ValueError as error:
        problems.add(str(path), f"has no safetensors header: {error}", "download it again")
        return {}
    return _checked(path, header, 8 + length, size, problems)


def _parse(text: bytes) -> dict[str, dict[str, Any]]:
    try:
        header = json.loads(text.decode(), object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("it is not a JSON object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not _is_entry(entry):
            raise ValueError(f"{name} has {json.dumps(entry)[:200]}; dtypes are {', '.join(DTYPES)}")
    return header


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError("a name is in it twice")
    return names


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.get("dtype") not in CODES.values():
        return False
    offsets: Any = entry.get("data_offsets")
    return _are_counts(entry.get("shape")) and _are_counts(offsets) and len(offsets) == 2


def _are_counts(values: Any) -> bool:
    """Whether it is a list of natural numbers."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _checked(path: Path, header: dict[str, Any], start: int, size: int, problems: Problems) -> dict[str, Tensor]:
    """The tensors, if each has as many bytes as its shape needs, and they fill the file without gap or overlap."""
    before = len(problems)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        needed = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
        if end - begin != needed:
            what = f"{entry['dtype']}{entry['shape']} needs {needed} bytes, but its header gives it {end - begin}"
            problems.add(f"{path}: {name}", what, "download the file again")
    ranges = [(0, 0, "the header"), *sorted((*entry["data_offsets"], name) for name, entry in header.items())]
    for (_, end, earlier), (begin, _, name) in pairwise(ranges):
        if begin != end:
            how = "overlaps with" if begin < end else "leaves a gap behind"
            problems.add(f"{path}: {name}", f"begins at byte {begin}: it {how} {earlier}, which ends at {end}")
    end = start + max(end for _, end, _ in ranges)
    if size != end:
        what = "truncated" if size < end else "too long"
        problems.add(str(path), f"is {what}: it has {size} bytes, and its header needs {end}", "download it again")
    if len(problems) > before:
        return {}
    return {
        name: Tensor(path, DTYPES[entry["dtype"]], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for name, entry in header.items()
    }


@dataclass(frozen=True)
class Written:
    """A tensor to write. `make` computes it when it is written, so only one tensor is in memory at a time."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(path: Path, tensors: Iterable[Written]) -> None:
    """Writes a new file. The header is padded to a multiple of 8 bytes, as the format asks, and marked as PyTorch's.

    Raises:
      FileExistsError: the file exists.
    """
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.num_bytes
        header[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            array = np.asarray(tensor.make(), tensor.dtype, order="C")
            assert array.shape == tensor.shape, (tensor.name, array.shape, tensor.shape)
            file.write(_bytes(array))
