"""Keeps what was read from a file until the file is modified."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")


def kept_while_unmodified(num_files: int) -> Callable[[Callable[[Any], T]], Callable[[Any], T]]:
    """Decorates a function of a path, which is called again only after the file is modified.

    The decorated function raises OSError if there is no such file.

    Args:
      num_files: of which the results are kept.

    >>> @kept_while_unmodified(1)
    ... def size(path): return len(path.read_bytes())
    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "file"
    ...     for text in ("a", "abc"):
    ...         _ = path.write_text(text)
    ...         print(size(path))
    1
    3
    """

    def decorate(read: Callable[[Any], T]) -> Callable[[Any], T]:
        kept = lru_cache(num_files)(lambda path, modified_ns, size: read(path))

        def of_path(path: Any) -> T:
            stat = os.stat(path)
            return kept(path, stat.st_mtime_ns, stat.st_size)

        return of_path

    return decorate
