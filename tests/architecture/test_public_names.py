"""What is public is documented, and what is documented is public."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import meshpar

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "index.md"


@pytest.mark.parametrize("name", meshpar.__all__)
def test_a_public_name_has_a_docstring(name):
    assert getattr(meshpar, name).__doc__


def test_the_reference_lists_exactly_the_public_names():
    listed = re.findall(r"^\| `(\w+)`", REFERENCE.read_text(), re.M)
    assert sorted(listed) == sorted(meshpar.__all__)
