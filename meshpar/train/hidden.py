"""Hides a package from another one, which would import it for nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Imports within find that `package` is not installed, unless it was imported before."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # pyright: ignore
    try:
        yield
    finally:
        del sys.modules[package]
