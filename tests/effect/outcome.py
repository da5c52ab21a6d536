"""What a change of one key does: it is refused by name, or it changes programs, data or the loop; or nothing."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jax

from meshpar import MeshparError, Run
from meshpar.interop import user_code
from tests.effect import fingerprint
from tests.effect.walk import Change


def outcome(change: Change) -> str:
    """How the change shows: `refused: ...`, `program`, `data`, `loop`; or `nothing`, with what was seen."""
    for level in ("program", "data", "loop"):
        try:
            before = _of(level, json.dumps(change.before, sort_keys=True))
        except MeshparError as error:
            return f"refused: {error}" if _names(error, change, sections=True) else f"nothing: refused before: {error}"
        try:
            after = _of(level, json.dumps(change.after, sort_keys=True))
        except MeshparError as error:
            return f"refused: {error}" if _names(error, change) else f"nothing: refused without its name: {error}"
        if after != before:
            return level
    return "nothing"


def _names(error: MeshparError, change: Change, sections: bool = False) -> bool:
    """Whether an error names the key, or with `sections` one of the sections that it is in."""
    parts = change.path.split(".")
    names = [change.path, *(".".join(parts[:i]) for i in range(1, len(parts)) if sections or i == len(parts) - 1)]
    return any(name in str(error) for name in names) or parts[-1] in str(error)


def made(mapping: str) -> Run:
    run = Run.model_validate(json.loads(mapping))
    sections = (run.model, run.loss, run.data)
    keys = ("target", "transform", "reward")
    targets = [getattr(one, key) for one in sections for key in keys if key in type(one).model_fields]
    for target in [*targets, *(callback.target for callback in run.callbacks)]:
        if target:
            user_code.permit(target, None)
    return run


@cache
def _of(kind: str, mapping: str) -> Any:
    return getattr(fingerprint, kind)(made(mapping))


def forget() -> None:
    """Forgets what runs did, since the code has changed."""
    _of.cache_clear()
    jax.clear_caches()
