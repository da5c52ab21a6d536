"""Root ignores permission bits, so the tests that need them run as another user instead of being skipped."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534


@pytest.fixture
def as_nobody(tmp_path: Path) -> Iterator[None]:
    """Root becomes a user without privileges for the length of the test, and owner of its folder."""
    if os.geteuid() != 0:
        yield
        return
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
    for folder in [parent for parent in tmp_path.parents if not parent.stat().st_mode & stat.S_IXOTH]:
        folder.chmod(0o711)
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)
