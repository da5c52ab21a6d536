"""A name says one thing: few public functions and classes of two modules have the same one."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "meshpar"
AT_MOST = 152
"""Most of them are functions that are called by their module, `yaml_text.read`, or the verb of a command and what it
calls. The number may only shrink."""


def twice(sources: Iterable[str]) -> list[str]:
    """The public names that several of these modules define at their top."""
    modules = Counter(name for source in sources for name in set(defined(source)))
    return sorted(name for name, count in modules.items() if count > 1)


def defined(source: str) -> list[str]:
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [node.name for node in ast.parse(source).body if isinstance(node, definitions)]
    return [name for name in names if not name.startswith("_")]


def test_no_more_names_are_defined_in_two_modules():
    found = twice(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert len(found) <= AT_MOST, f"name one of two things otherwise: {found}"


def test_control_a_name_of_two_modules_is_seen():
    assert twice(["class A: ...\ndef f(): ...", "def A(): ...\ndef _b(): ...", "def _b(): ..."]) == ["A"]
