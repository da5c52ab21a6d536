"""The constraints of a plan: parts of a layout that the user gives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any, get_args

from meshpar.config import flatten_json
from meshpar.errors import ConfigError, Problems, nearest
from meshpar.experiment.config import Run
from meshpar.mesh.layout import AXES
from meshpar.parallel.strategies import Overlap
from meshpar.planning.layers import has_experts, layers_of, shares_tokens
from meshpar.planning.machine import Machine
from meshpar.planning.space import OVERLAPS, Layout, layouts

OVERLAP = "parallel.tensor.overlap"
KEYS = (
    *(f"mesh.{axis}" for axis in AXES), "rules", "parallel.pipeline.kind", OVERLAP, "num_microbatches", "model.remat"
)  # fmt: skip
"""What a layout decides, and `fix` may hold."""


def constrained(run: Run, machine: Machine, fix: list[str]) -> tuple[list[Layout], Sequence[Overlap]]:
    """The layouts that have every fixed value, and the overlaps that they may have.

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
    overlap: Any = wanted.get(OVERLAP)
    if overlap not in (None, *get_args(Overlap)):
        problems.add(f"--fix {OVERLAP}={overlap}", "not an overlap", ", ".join(get_args(Overlap)))
    problems.raise_any(ConfigError, "the constraints do not fit each other:")
    stack, experts = layers_of(run, machine.platform), has_experts(run)
    shares = machine.num_devices == 1 or shares_tokens(run, machine.platform)
    every = [*layouts(run, machine.num_devices, machine.per_host, stack, experts, shares)]
    if overlap:
        every = [replace(layout, overlap=overlap) if layout.can_overlap else layout for layout in every]
    met = [_met(layout, wanted) for layout in every]
    found = [layout for layout, keys in zip(every, met, strict=True) if len(keys) == len(wanted)]
    if not found:
        conflict = _conflict(met, wanted)
        what = " with ".join(f"{key}={wanted[key]}" for key in conflict)
        why = f"a batch of {run.data.batch_size} rows of {run.data.seq_len} tokens, and the layers, must divide"
        if "mesh.expert" in conflict and not experts:
            why = "no parameter of the model has a dim called experts, which the axis expert shards"
        if "mesh.pipe" in conflict and not stack:
            why = "no stack of equal layers was found in the model, which stages of a pipeline need"
        of = f"no layout of {machine.num_devices} devices"
        raise ConfigError(f"{machine.text}: {of}{' has ' if what else ' fits'}{what}: {why}")
    return found, (overlap,) if overlap else OVERLAPS


def _met(layout: Layout, wanted: dict[str, str]) -> set[str]:
    """The keys whose fixed values a layout has."""
    if not wanted:
        return set()
    own = flatten_json(layout.changes) | {f"mesh.{axis}": layout.size(axis) for axis in AXES}
    own["num_microbatches"] = layout.num_microbatches
    return {key for key, value in wanted.items() if _text(own.get(key)) == _text(value)}


def _conflict(met: Iterable[set[str]], wanted: Iterable[str]) -> tuple[str, ...]:
    """The fewest keys whose fixed values no layout has together."""
    distinct = {frozenset(keys) for keys in met}
    keys = [*wanted]
    every = chain.from_iterable(combinations(keys, count) for count in range(1, len(keys) + 1))
    return next((some for some in every if not any(one.issuperset(some) for one in distinct)), ())


def _text(value: Any) -> str:
    """A value as a user may write it, without blanks and brackets."""
    words = value if isinstance(value, list) else re.findall(r"[\w.]+", str(value))
    return ",".join(map(str, words))
