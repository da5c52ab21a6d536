"""Blocks the import of a package that another one imports without need."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def blocked(package: str) -> Iterator[None]:
    """Inside the `with` block, an import of the package raises ImportError, unless it was imported before.

    >>> with blocked("this"):
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
