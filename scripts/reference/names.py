"""Lists the public names that are no configs; mkdocstrings replaces each by its signature and docstring."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from meshpar.config import Config

ABOUT = """# Functions and classes

This page has the signature and the docstring of every public name that is not a class of configs; those are
[keys of a config](config.md). [The overview](index.md) says in a line what each is.
"""
TITLES = {
    "Functions": inspect.isfunction,
    "Classes": lambda value: inspect.isclass(value) and not issubclass(value, Exception),
    "Errors and warnings": lambda value: inspect.isclass(value) and issubclass(value, Exception),
}


def names_page() -> str:
    meshpar = importlib.import_module("meshpar")
    lines = [ABOUT]
    top = _public(meshpar)
    for title, belongs in TITLES.items():
        lines += [f"## {title}\n", *(_directive("meshpar", name) for name, value in top.items() if belongs(value))]
    for space in (name for name in meshpar.__all__ if inspect.ismodule(getattr(meshpar, name))):
        inner = {name: value for name, value in _public(getattr(meshpar, space)).items() if value not in top.values()}
        if inner:
            lines += [f"## {space}\n", *(_directive(f"meshpar.{space}", name) for name in inner)]
    return "\n".join(lines)


def _public(module: Any) -> dict[str, Any]:
    """The public names of a module that are neither modules nor configs."""
    values = {name: getattr(module, name) for name in sorted(module.__all__, key=str.lower)}
    return {name: value for name, value in values.items() if not inspect.ismodule(value) and not _is_config(value)}


def _is_config(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Config)


def _directive(module: str, name: str) -> str:
    return f"::: {module}.{name}\n"
