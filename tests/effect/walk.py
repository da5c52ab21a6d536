"""Each key of `Run`, as a change of a small run: from its default to another legal value.

The keys and their values come from the schema, as those of the reference do (`reference.keys`): a new key is in the
list on the day that it is added. `cases.yaml` has what the schema does not say: sizes that fit a small model, and what
a section needs around it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from meshpar import Run
from reference import keys
from reference.keys import Section

CASES = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text())
BASES: dict[str, dict[str, Any]] = CASES["bases"]
AROUND: dict[str, dict[str, Any]] = CASES["around"]
VALUES: dict[str, Any] = CASES["values"]
FIRST: dict[str, Any] = CASES["first"]
EXCEPTIONS: dict[str, str] = CASES["exceptions"]

SECTIONS = {
    section.model.__name__: replace(section, path=CASES["paths"].get(section.model.__name__, section.path))
    for section in keys.sections(Run)
}
KEYS = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.keys]
"""`Class.key`, of all keys that a run can have."""


@dataclass(frozen=True)
class Change:
    """A run as a mapping, before and after a key was changed.

    Args:
      path: the key's place in the config.
    """

    path: str
    before: dict[str, Any]
    after: dict[str, Any]


def change(name: str, model: str, lowering: str) -> Change:
    """The change of the key `Class.key` in a run of this kind of model and lowering."""
    class_name, key = name.split(".")
    section = SECTIONS[class_name]
    base = copy.deepcopy(BASES[model]) | {"lowering": lowering}
    for around in (class_name, name, f"{class_name} {model}", f"{class_name} {lowering}"):
        for path, value in AROUND.get(around, {}).items():
            if model != "import" or not path.startswith("model."):
                _set(base, path, copy.deepcopy(value))
    data = section.data(key) if section.path else section.needed(key) | {key: section.value(key)}
    whole = {one: _written(FIRST, section, one, value) for one, value in data.items()}
    before = {one: value for one, value in whole.items() if one != key or _is_first(section, key)}
    if not section.path:  # the base has what the root requires
        before.pop(key, None)
    after = whole | {key: _written(VALUES, section, key, section.value(key))}
    if name == "Run.lowering":
        after = {key: {"manual": "auto", "auto": "manual"}[lowering]}
    path = f"{section.path}.{key}".removeprefix(".")
    runs = _with(base, section, before), _with(base, section, after)
    if model == "import":  # it reads tokens alone, so that documents of a row are not separate
        for run, value in zip(runs, ("joined", "separate" if key == "documents_in_row" else "joined"), strict=True):
            run["data"] = run["data"] | {"documents_in_row": value}
    return Change(path, *runs)


def _is_first(section: Section, key: str) -> bool:
    """Whether the key has a value before it is changed: it is required, or its default does not fit."""
    return section.model.model_fields[key].is_required() or _written(FIRST, section, key, None) is not None


def _written(table: dict[str, Any], section: Section, key: str, otherwise: Any) -> Any:
    return table.get(f"{section.model.__name__}.{key}", table.get(key, otherwise))


def _with(base: dict[str, Any], section: Section, data: dict[str, Any]) -> dict[str, Any]:
    """The run with the keys of a section."""
    if not section.path:
        return copy.deepcopy(base) | data
    run = copy.deepcopy(base)
    *above, last = section.path.split(".")
    at = run
    for name in above:
        at[name] = at[name] if isinstance(at.get(name), dict) else {}
        at = at[name]
    old = at.get(last) if isinstance(at.get(last), dict) else {}
    if "kind" in data and old.get("kind") != data["kind"]:
        old = {}
    at[last] = [data] if section.in_list else old | data
    return run


def _set(run: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for name in above:
        run = run.setdefault(name, {})
    run[last] = value
