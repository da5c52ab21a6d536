"""The constraints of a plan: parts of a layout that the user gives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any, get_args

from meshpar.config import flatten_json
from meshpar.errors import ConfigError, Problems, nearest
from meshpar.experiment.config import Run
from meshpar.mesh.layout import AXES
from meshpar.models.contract import LayerStack
from meshpar.parallel.strategies import Overlap
from meshpar.planning.layers import has_experts, layers_of, shares_tokens
from meshpar.planning.machine import Machine
from meshpar.planning.space import OVERLAPS, Layout, layouts

OVERLAP = "parallel.tensor.overlap"
KEYS = (
    *(f"mesh.{axis}" for axis in AXES), "rules", "parallel.pipeline.kind", OVERLAP, "num_microbatches", "model.remat"
)  # fmt: skip
"""What a layout decides, and `fix` may hold."""
SHOWN = 6
"""How many values a message lists at most."""


def fixed(fix: Iterable[str], problems: Problems) -> dict[str, str]:
    """Key -> the value that is given. Adds unknown keys and contradictions to the problems."""
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
    return wanted


def constrained(run: Run, machine: Machine, wanted: Mapping[str, str]) -> tuple[list[Layout], Sequence[Overlap]]:
    """The layouts that have every fixed value, and the overlaps that they may have.

    Raises:
      ConfigError: lists values that no layout has, with the nearest that some have.
    """
    overlap: Any = wanted.get(OVERLAP)
    stack, experts = layers_of(run, machine.platform), has_experts(run)
    shares = machine.num_devices == 1 or shares_tokens(run, machine.platform)
    every = [*layouts(run, machine.num_devices, machine.per_host, stack, experts, shares)]
    if overlap:
        every = [replace(layout, overlap=overlap) if layout.can_overlap else layout for layout in every]
    values = [_values(layout) if wanted else {} for layout in every]
    texts = {key: _text(value) for key, value in wanted.items()}
    found = [layout for layout, own in zip(every, values, strict=True) if texts.items() <= own.items()]
    if found:
        return found, (overlap,) if overlap else OVERLAPS
    raise ConfigError(_lacking(run, machine, values, wanted, stack, experts))


def _lacking(
    run: Run, machine: Machine, values: Sequence[Mapping[str, str]], wanted: Mapping[str, str],
    stack: LayerStack | None, experts: bool,
) -> str:  # fmt: skip
    """Which fixed values no layout has, why, and which are nearest.

    Args:
      values: of each layout.
    """
    count = machine.num_devices
    sizes = f"sizes must divide {count} devices and a batch of {run.data.batch_size} rows of {run.data.seq_len} tokens"
    if not values:
        return f"{machine.text}: no layout fits: {sizes}"
    why = dict.fromkeys((f"mesh.{axis}" for axis in AXES), sizes)
    why["mesh.tensor"] += f"; tensor stays in a host of {machine.per_host} devices"
    why["mesh.pipe"] += f"; stages have layers, of which there are {stack.num_layers}" if stack else ""
    if not stack:
        why["mesh.pipe"] = "no stack of equal layers was found in the model, which stages of a pipeline need"
    if not experts:
        why["mesh.expert"] = "no parameter of the model has a dim called experts, which the axis expert shards"
    met = [{key for key, value in wanted.items() if own.get(key) == _text(value)} for own in values]
    alone = [key for key in wanted if not any(key in keys for keys in met)]
    problems = Problems()
    for key in alone or (together := _conflict(met, wanted)):
        others = set() if alone else {*together} - {key}
        possible = {own[key] for own, keys in zip(values, met, strict=True) if key in own and keys >= others}
        beside = "".join(f" with {one}={wanted[one]}" for one in wanted if one in others)
        what = f"no layout of {count} devices has it{beside}"
        problems.add(
            f"--fix {key}={wanted[key]}",
            f"{what}: {why[key]}" if key in why else what,
            _fix(key, wanted[key], possible),
        )
    return "\n".join([f"{machine.text}: no layout has what is fixed:", *map(str, problems.found)])


def _values(layout: Layout) -> dict[str, str]:
    """The values that `fix` may ask for, as text."""
    own = flatten_json(layout.changes) | {f"mesh.{axis}": layout.size(axis) for axis in AXES}
    own["num_microbatches"] = layout.num_microbatches
    return {key: _text(value) for key, value in own.items() if key in KEYS and value is not None}


def _fix(key: str, wanted: str, possible: set[str]) -> str:
    """The values that layouts have, the nearest first; of numbers those below and above."""
    if not possible:
        return f"leave {key} out"
    numbers = sorted(int(one) for one in possible if one.isdecimal())
    if len(numbers) == len(possible) and wanted.isdecimal():
        near = [*[one for one in numbers if one < int(wanted)][-1:], *[one for one in numbers if one > int(wanted)][:1]]
        return f"nearest: {' or '.join(f'{key}={one}' for one in near)}"
    if meant := nearest(_text(wanted), possible):
        return f"did you mean {key}={_written(meant)}?"
    shown = sorted(possible)[:SHOWN]
    more = f", and {len(possible) - SHOWN} more" if len(possible) > SHOWN else ""
    return f"possible: {', '.join(map(_written, shown))}{more}"


def _written(value: str) -> str:
    """A value as `fix` takes it."""
    return f"[{value}]" if "," in value else value


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
