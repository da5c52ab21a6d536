"""Damaged copies of a file, the same in every run; and what comes of reading each."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from meshpar.errors import MeshparError


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Within, what takes longer raises TimeoutError."""

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
        at = rng.integers(first, last, 8)
        if seed % 10 < 6:
            copy[at[0]] ^= 1 << int(rng.integers(8))
        elif seed % 10 < 8:
            for place in at:
                copy[place] ^= int(rng.integers(1, 256))
        elif seed % 10 == 8:
            del copy[at[0] :]
        else:
            copy[at[0] : at[0] + 16] = bytes(len(copy[at[0] : at[0] + 16]))
        if copy != content:
            yield bytes(copy)


def outcomes(path: Path, copies: Iterator[bytes], read: Callable[[], Any]) -> Counter[str]:
    """How often reading gives the `same` as before, `another` result, or is `refused`; any other error is raised.

    The file is whole again afterwards.
    """
    right, want, found = path.read_bytes(), read(), Counter[str]()
    for number, copy in enumerate(copies):
        path.unlink()  # what is mapped of the copy before stays as it is
        path.write_bytes(copy)
        try:
            found["same" if read() == want else "another"] += 1
        except MeshparError:
            found["refused"] += 1
        except BaseException as error:
            error.add_note(f"by the damaged copy {number} of {path.name}")
            raise
    path.unlink()
    path.write_bytes(right)
    assert read() == want
    return found
