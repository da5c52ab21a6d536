"""Imports Grain without Orbax, which takes three fourths of the time of Grain's import.

Grain needs Orbax only for a handler with which other programs save Grain's iterators in Orbax's checkpoints. meshpar
saves none: its batches are functions of their index.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from meshpar.import_blocker import blocked

ORBAX = "orbax.checkpoint"
HANDLER = ("CheckpointHandler", "CheckpointSave", "CheckpointRestore")


def load() -> ModuleType:
    """Grain. Its handler for Orbax is imported when a program uses it, if it was not imported before.

    >>> load().MapDataset.range(3)[1]
    1
    """
    is_alone = not {"grain", ORBAX} & sys.modules.keys()
    with blocked(ORBAX):
        import grain
    if is_alone:
        _postpone(grain.checkpoint)
    return grain


def _postpone(public: ModuleType) -> None:
    """Defines the names of the handler at their first use, in Grain's public module and in that of the handler."""
    inner = sys.modules[public.CheckpointHandler.__module__]
    modules = (public, inner)

    def define(name: str) -> Any:
        if name not in HANDLER:
            raise AttributeError(f"module 'grain.checkpoint' has no attribute {name!r}")
        for module in modules:
            vars(module).pop("__getattr__", None)
        importlib.reload(inner)
        vars(public).update({name: vars(inner)[name] for name in HANDLER if name in vars(inner)})
        return getattr(inner, name)

    for module in modules:
        for name in HANDLER:
            vars(module).pop(name, None)
        vars(module)["__getattr__"] = define
