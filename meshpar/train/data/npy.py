"""Reads `.npy` data, and checks its header before the array is used.

NumPy evaluates a header as a Python literal, which may fail with many kinds of errors.

Source: numpy.org/neps/nep-0001-npy-format.html.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from meshpar.errors import DataError
from meshpar.regular import open_regular

MAGIC = b"\x93NUMPY"
LONGEST_HEADER = 10_000
READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@dataclass(frozen=True)
class Header:
    """The header of an array.

    Args:
      begin: where the array begins, in bytes from the start of the file.
    """

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype
    begin: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: IO[bytes], size: int) -> Header:
    """Reads a header; afterwards the file is positioned at the start of the array.

    Args:
      size: bytes of the header and the array.

    Raises:
      DataError: the header is invalid, the array does not hold integers, or its size differs from the header's.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python's parser warns about damaged headers
            version = npy.read_magic(file)
            if version not in READERS:
                raise ValueError(f"its version of the format, {version[0]}.{version[1]}, is not supported")
            header = Header(*READERS[version](file, max_header_size=LONGEST_HEADER), begin=file.tell())
    except Exception as error:
        raise unreadable(error) from None
    if header.dtype.kind not in "iu":
        raise DataError(f"is {header.dtype}, not token ids, which are integers")
    if any(dim < 0 for dim in header.shape) or header.begin + header.num_bytes != size:
        what = f"its header describes {header.dtype}{list(header.shape)}, but it has {size} bytes"
        raise DataError(f"is truncated, too long or damaged: {what}")
    return header


def read_array(file: IO[bytes], size: int) -> np.ndarray:
    """Reads a whole array; raises the errors of `read_header`."""
    header = read_header(file, size)
    array = np.frombuffer(file.read(header.num_bytes), header.dtype)
    return array.reshape(header.shape, order="F" if header.is_fortran else "C")


def map_array(path: Path) -> np.ndarray:
    """The array of a file, mapped into memory; raises the errors of `read_header`."""
    with open_regular(path) as file:
        header = read_header(file, os.fstat(file.fileno()).st_size)
        if not header.num_bytes:  # an empty array cannot be mapped
            return np.zeros(header.shape, header.dtype)
        order = "F" if header.is_fortran else "C"
        return np.memmap(file, header.dtype, "r", header.begin, header.shape, order)


def unreadable(error: Exception) -> DataError:
    """Describes an error of NumPy or of zipfile in one line."""
    why = str(error) or type(error).__name__
    return DataError(f"is not a readable array: {why.splitlines()[0]}")
