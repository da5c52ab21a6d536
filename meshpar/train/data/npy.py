"""`.npy` data: a header that is checked before it is believed.

NumPy evaluates a header as a Python literal, and each way in which that can fail raises an error of its own.

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
    """What lies behind it.

    Args:
      begin: where, in bytes from the beginning.
    """

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype
    begin: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: IO[bytes], size: int) -> Header:
    """Reads a header, and leaves the file where the array begins.

    Args:
      size: bytes of the header and the array.

    Raises:
      DataError: it is no header, the array holds no integers, or it has another size than the header says.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python's parser warns of is a damaged header
            version = npy.read_magic(file)
            if version not in READERS:
                raise ValueError(f"it says that it is of version {version[0]}.{version[1]} of the format")
            header = Header(*READERS[version](file, max_header_size=LONGEST_HEADER), begin=file.tell())
    except Exception as error:
        said = str(error) or type(error).__name__
        raise DataError(f"is not an array that can be read: {said.splitlines()[0]}") from None
    if header.dtype.kind not in "iu":
        raise DataError(f"is {header.dtype}, not token ids, which are integers")
    if any(dim < 0 for dim in header.shape) or header.begin + header.num_bytes != size:
        what = f"its header makes it {header.dtype}{list(header.shape)}, and it is {size} bytes long"
        raise DataError(f"is cut short, too long or damaged: {what}")
    return header


def read_array(file: IO[bytes], size: int) -> np.ndarray:
    """A whole array; raises as `read_header` does."""
    header = read_header(file, size)
    array = np.frombuffer(file.read(header.num_bytes), header.dtype)
    return array.reshape(header.shape, order="F" if header.is_fortran else "C")


def map_array(path: Path) -> np.ndarray:
    """The array of a file, mapped into memory; raises as `read_header` does."""
    with open_regular(path) as file:
        header = read_header(file, os.fstat(file.fileno()).st_size)
        if not header.num_bytes:  # nothing can be mapped
            return np.zeros(header.shape, header.dtype)
        order = "F" if header.is_fortran else "C"
        return np.memmap(file, header.dtype, "r", header.begin, header.shape, order)
