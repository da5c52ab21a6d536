"""What is public is documented, and what is documented is public."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import meshpar

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "index.md"


def is_documented(name: str, value: object) -> bool:
    """Whether somebody wrote a docstring: dataclasses make one of their fields, and a subpackage is not the name."""
    return not inspect.ismodule(value) and not (value.__doc__ or f"{name}(").startswith(f"{name}(")


PACKAGES = {"collectives": meshpar.collectives}
"""Public names that are packages, with public names of their own."""


@pytest.mark.parametrize("name", [name for name in meshpar.__all__ if name not in PACKAGES])
def test_a_public_name_has_a_docstring(name):
    value = getattr(meshpar, name)
    assert is_documented(name, value), f"meshpar.{name} is {value!r}, with the docstring {value.__doc__!r}"


def test_a_missing_docstring_is_seen():
    undocumented = dataclasses.make_dataclass("Planted", ["field"])
    assert not is_documented("Planted", undocumented)
    assert not is_documented("planted", lambda: None)
    assert not is_documented("inspect", inspect)


def test_the_reference_lists_exactly_the_public_names():
    listed = re.findall(r"^\| `(\w+)`", REFERENCE.read_text(), re.M)
    assert sorted(listed) == sorted(meshpar.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_so_are_those_of_a_public_package(package):
    """Whatever else was imported: a module of the same name would take a name's place."""
    public = PACKAGES[package]
    for module in pkgutil.iter_modules(public.__path__):
        importlib.import_module(f"{public.__name__}.{module.name}")
    listed = re.findall(rf"^\| `{package}\.(\w+)`", REFERENCE.read_text(), re.M)
    assert sorted(listed) == sorted(public.__all__)
    assert all(is_documented(name, getattr(public, name)) for name in public.__all__)
