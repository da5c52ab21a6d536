"""Damaged copies of a file, the same in every run, and the outcome of reading each."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.errors import MeshparError


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in a body that takes longer."""

    def ended(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ended)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def damaged(content: bytes, num: int, first: int = 0, last: int | None = None) -> Iterator[bytes]:
    """Of ten copies, six have a bit flipped, two have eight bytes changed, one is cut short, and one has zeros in it.

    Args:
      first, last: only these bytes are changed.
    """
    last = len(content) if last is None else last
    for seed in range(num):
        rng = np.random.default_rng(seed)
        copy = bytearray(content)
        places = rng.integers(first, last, 8)
        if seed % 10 < 6:
            copy[places[0]] ^= 1 << int(rng.integers(8))
        elif seed % 10 < 8:
            for place in places:
                copy[place] ^= int(rng.integers(1, 256))
        elif seed % 10 == 8:
            del copy[places[0] :]
        else:
            copy[places[0] : places[0] + 16] = bytes(len(copy[places[0] : places[0] + 16]))
        if copy != content:
            yield bytes(copy)


def outcomes(path: Path, copies: Iterator[bytes], read: Callable[[], Any]) -> Counter[str]:
    """Counts how often reading gives the `same` result, `another` one, or is `refused`; any other error is raised.

    The file is restored afterwards.
    """
    right = path.read_bytes()
    expected = read()
    found = Counter[str]()
    for number, copy in enumerate(copies):
        path.unlink()  # a new file, because a reader may still map the copy before
        path.write_bytes(copy)
        try:
            found["same" if read() == expected else "another"] += 1
        except MeshparError:
            found["refused"] += 1
        except BaseException as error:
            error.add_note(f"by the damaged copy {number} of {path.name}")
            raise
    path.unlink()
    path.write_bytes(right)
    assert read() == expected
    return found


def flip_one_bit(path: Path) -> None:
    """Flips a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def with_flipped_bit(x: jax.Array, device: int, bit: int = 0) -> jax.Array:
    """The array, with one bit of the first number of a device's copy flipped."""
    shards = [np.array(shard.data) for shard in x.addressable_shards]
    (index,) = [i for i, shard in enumerate(x.addressable_shards) if shard.device.id == device]
    numbers = shards[index].reshape(-1).view(f"u{x.dtype.itemsize}")
    numbers[0] ^= numbers.dtype.type(1 << bit)
    buffers = [jax.device_put(data, shard.device) for data, shard in zip(shards, x.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, buffers)
