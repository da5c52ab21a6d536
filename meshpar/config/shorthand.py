"""Expands shorthands and converts plain data: a bare value for a mapping, a list for a tuple, a string for a path.

`Config` uses this module for the keys of files and of Python code alike. Files are expanded earlier, before they are
merged.
"""

from __future__ import annotations

import numbers
from pathlib import Path, PurePath
from typing import Any, get_args, get_origin

import pydantic

from meshpar.config.annotations import alternatives, chosen, fields, is_sequence, item_of, kind_of, kinds, models


def expand(annotation: Any, data: Any) -> Any:
    """The data with every shorthand expanded. Lists remain lists, so that the data can still be merged."""
    if isinstance(data, (list, tuple)) and is_sequence(annotation):
        return [expand(item_of(annotation), item) for item in data]
    data = unfold(annotation, data)
    if not isinstance(data, dict):
        return data
    known = fields(chosen(annotation, data))
    return {key: expand(known.get(key), value) for key, value in data.items()}


def unfold(annotation: Any, data: Any) -> Any:
    """Expands the outermost level: a bare value to the mapping that it stands for, a single string to a list.

    Where kinds are expected, a word is a kind: `schedule: cosine`. Some kinds let a bare value stand for another key.
    Where one kind is the default, a mapping without `kind` is of that kind.
    """
    model = chosen(annotation, data)
    if model is None or is_sequence(annotation) or data is None or isinstance(data, pydantic.BaseModel):
        return data
    short = getattr(model, "shorthand", None)
    if getattr(model, "is_default_kind", False):
        if isinstance(data, dict) and "kind" not in data:
            return {"kind": kind_of(model)} | data
        if isinstance(data, str) and data.isidentifier():
            return {"kind": data}
    if short is None:
        return {"kind": data} if isinstance(data, str) and kinds(annotation) else data
    if not isinstance(data, dict):
        kind = {"kind": kind_of(model)} if len(models(annotation)) > 1 else {}
        data = kind | {short: data}
    if isinstance(data.get(short), str) and is_sequence(fields(model)[short]):
        data = data | {short: [data[short]]}
    return data


def typed(annotation: Any, value: Any, is_json: bool) -> Any:
    """Converts a plain value to the type of its field: tuples, paths, NumPy's numbers. Strings never become numbers.

    Args:
      is_json: pydantic validates JSON, and converts its paths itself.
    """
    holds = alternatives(annotation)
    if isinstance(value, (list, tuple)):
        sequence = next(filter(is_sequence, holds), None)
        # A key without a field may be a rule of AxisRules, whose value is a tuple too.
        if sequence is None and annotation is not None:
            return value
        return tuple(typed(item_of(sequence), item, is_json) for item in value)
    if isinstance(value, dict):
        mapping = next((part for part in holds if get_origin(part) is dict), None)
        return {key: typed(get_args(mapping)[1], item, is_json) for key, item in value.items()} if mapping else value
    if isinstance(value, str) and Path in holds and not is_json:
        return Path(value)
    if isinstance(value, PurePath) and str in holds:
        return str(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, int):  # a NumPy integer
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, (int, float)):
        return float(value)
    return value
