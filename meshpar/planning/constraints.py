"""The constraints of a plan: parts of a layout that the user gives."""

from __future__ import annotations

import re
from typing import Any

from meshpar.config import flatten_json
from meshpar.errors import ConfigError, Problems, nearest
from meshpar.experiment.config import Run
from meshpar.mesh.layout import AXES
from meshpar.planning.machine import Machine
from meshpar.planning.space import Layout, layouts

KEYS = (*(f"mesh.{axis}" for axis in AXES), "rules", "parallel.pipeline.kind", "num_microbatches", "model.remat")
"""What a layout decides, and `fix` may hold."""


def constrained(run: Run, machine: Machine, fix: list[str]) -> list[Layout]:
    """The layouts that have every fixed value.

    Raises:
      ConfigError: lists unknown keys; or no layout is left.
    """
    problems = Problems()
    wanted: dict[str, str] = {}
    for text in fix:
        key, _, value = text.partition("=")
        if key not in KEYS or not value:
            near = nearest(key, KEYS)
            problems.add(
                f"--fix {text}", "not a key of a layout", (near and f"did you mean {near}?") or ", ".join(KEYS)
            )
        elif wanted.setdefault(key, value) != value:
            problems.add(f"--fix {text}", f"{key} is fixed to {wanted[key]}, too", "keep one of the two")
    problems.raise_any(ConfigError, "the constraints do not fit each other:")
    found = [layout for layout in layouts(run, machine.num_devices, machine.per_host) if _has(layout, wanted)]
    if not found:
        what = f"no layout of {machine.num_devices} devices has {', '.join(fix)}" if fix else "no layout fits"
        why = f"a batch of {run.data.batch_size} rows of {run.data.seq_len} tokens, and the layers, must divide"
        raise ConfigError(f"{machine.text}: {what}: {why}")
    return found


def _has(layout: Layout, wanted: dict[str, str]) -> bool:
    own = {f"mesh.{axis}": 1 for axis in AXES} | flatten_json(layout.changes)
    own["num_microbatches"] = layout.num_microbatches
    return all(_text(own.get(key)) == _text(value) for key, value in wanted.items())


def _text(value: Any) -> str:
    """A value as a user may write it, without blanks and brackets."""
    words = value if isinstance(value, list) else re.findall(r"[\w.]+", str(value))
    return ",".join(map(str, words))
