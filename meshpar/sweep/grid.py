"""Reads a grid of values from overrides: a list is a dimension of the grid, any other value is the same in all runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from meshpar.config.annotations import alternatives, fields, is_sequence, models
from meshpar.config.overrides import parsed
from meshpar.errors import ConfigError, Problems
from meshpar.experiment.config import Run

_PLAIN = re.compile(r"[\w.,=+-]{1,120}")


@dataclass(frozen=True, eq=False)
class Point:
    """The values of one run."""

    values: Mapping[str, Any]

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={json.dumps(value)}" for key, value in self.values.items()]

    @property
    def name(self) -> str:
        """The name of its folder, which depends on the values alone: a larger grid keeps the runs of a smaller one.

        >>> Point({"optim.lr": 0.001, "seed": 1}).name
        'optim.lr=0.001,seed=1'
        """
        name = ",".join(f"{key}={text(value)}" for key, value in self.values.items())
        digest = hashlib.sha256(json.dumps(dict(self.values), sort_keys=True).encode()).hexdigest()
        return name if _PLAIN.fullmatch(name) else digest[:12]


def text(value: Any) -> str:
    """A value as a cell of a table."""
    return value if isinstance(value, str) else json.dumps(value)


def read(overrides: Sequence[str]) -> tuple[list[str], list[Point]]:
    """The overrides of all runs, and the points of the grid, the last key varying fastest.

    Raises:
      ConfigError: lists every dimension that is empty, repeats a value or a key, or is not told from a list.

    >>> fixed, points = read(["num_steps=4", "optim.lr=[1e-3,1e-2]", "seed=[0,1]"])
    >>> fixed, [point.name for point in points][:2]
    (['num_steps=4'], ['optim.lr=0.001,seed=0', 'optim.lr=0.001,seed=1'])
    """
    problems = Problems()
    fixed: list[str] = []
    dimensions: dict[str, list[Any]] = {}
    seen: set[str] = set()
    for override in overrides:
        for keys, value in parsed([override], {}, problems):
            key = ".".join(keys)
            if key in seen:
                problems.add(key, "is given twice", "give it once")
            seen.add(key)
            if isinstance(value, list):
                _check(key, keys, value, problems)
                dimensions[key] = value
            else:
                fixed.append(override)
    if not dimensions and not problems:
        problems.add("KEY=[...]", "no key has several values", "optim.lr=[1e-3,1e-2]")
    problems.raise_any(ConfigError, "these values make no grid:")
    return fixed, [Point(dict(zip(dimensions, values, strict=True))) for values in product(*dimensions.values())]


def _check(key: str, keys: Sequence[str], values: list[Any], problems: Problems) -> None:
    if key == "run_dir":
        problems.add(key, "each run has a folder of its own below it", "run_dir=FOLDER")
    elif not values:
        problems.add(f"{key}=[]", "has no values", f"{key}=[[]] for an empty list" if _is_list(Run, keys) else "")
    elif _is_list(Run, keys) and not all(isinstance(value, list) for value in values):
        whole = json.dumps(values)
        what = f"the key takes a list, so {whole} may be one value or {len(values)}"
        each = json.dumps([[value] for value in values])
        problems.add(key, what, f"{key}='[{whole}]' for one value, {key}='{each}' for {len(values)}")
    repeated = {json.dumps(value) for value in values if values.count(value) > 1}
    for value in sorted(repeated):
        problems.add(key, f"has {value} twice", "give each value once")


def _is_list(annotation: Any, keys: Sequence[str]) -> bool:
    """Whether a key takes a list, or a list in short for a section."""
    if keys:
        sections = models(annotation)
        if any(section.model_config.get("extra") == "allow" and keys[0] not in fields(section) for section in sections):
            return True  # a rule
        return any(_is_list(fields(section)[keys[0]], keys[1:]) for section in sections if keys[0] in fields(section))
    shorts = [fields(model)[short] for model in models(annotation) if (short := getattr(model, "shorthand", None))]
    return any(is_sequence(part) for one in [annotation, *shorts] for part in alternatives(one))
