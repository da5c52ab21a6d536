"""Hides a package from another one that imports it without need."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Inside the `with` block, an import of the package raises ImportError, unless it was imported before.

    >>> with hidden("this"):
    ...     import this
    Traceback (most recent call last):
        ...
    ModuleNotFoundError: import of this halted; None in sys.modules
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # pyright: ignore
    try:
        yield
    finally:
        if sys.modules[package] is None:
            del sys.modules[package]
