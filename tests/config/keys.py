"""The keys of a config that hold texts, read from its models, so that a new key is among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pydantic

from meshpar.config.annotations import alternatives, kind_of, models
from meshpar.experiment.config import Run

PLAIN: dict[str, Any] = {
    "model": {"kind": "llama", "num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32},
    "data": {"kind": "synthetic", "batch_size": 8, "seq_len": 8},
    "optim": {"kind": "adamw", "lr": 1e-2},
    "mesh": {"data": 8},
    "num_steps": 12,
    "run_dir": "run",
}
"""A run without any other key."""
FITTING = {"target": "os.path:join", "weight": 1.0}
"""Values of keys that a section needs, perhaps unless another key is given, and that one of their type alone does not
fit."""


@dataclass(frozen=True)
class Key:
    """A key that holds a text, or several.

    Args:
      at: the keys that lead to it, with an index for an item of a list.
      around: the outermost section, with everything that the key needs beside it.
      annotation: of the value.
      metadata: the rest of the field's `Annotated`.
    """

    at: tuple[str | int, ...]
    around: Any
    annotation: Any
    metadata: tuple[Any, ...]

    def __str__(self) -> str:
        kinds = [part["kind"] for part in _along(self.around, self.at[1:]) if isinstance(part, dict) and "kind" in part]
        return ".".join(map(str, self.at)) + (f" of {kinds[-1]}" if kinds else "")

    @property
    def name(self) -> str:
        return str(self.at[-1])

    def data(self, text: str) -> dict[str, Any]:
        """A run in which the key has this text."""
        leaf = next(part for part in leaves(self.annotation) if part in (str, Path))
        of_list = any(get_origin(part) is tuple for part in alternatives(self.annotation))
        of_dict = next((get_args(part)[1] for part in alternatives(self.annotation) if get_origin(part) is dict), None)
        value: Any = [text] if of_list else text
        if of_dict is not None:
            value = {text: _filled(of_dict)} if leaf is str else {"x": text}
        return PLAIN | {str(self.at[0]): _with(self.around, self.at[1:], value)}


def text_keys() -> list[Key]:
    """All keys of a run that hold texts: names, paths, globs."""
    return [key for key in _keys(Run) if any(part in (str, Path) for part in leaves(key.annotation))]


def leaves(annotation: Any) -> Iterator[Any]:
    """The types of an annotation, without unions, lists and mappings around them."""
    for part in alternatives(annotation):
        if get_origin(part) in (tuple, list, dict):
            for inner in get_args(part):
                yield from leaves(inner)
        else:
            yield part


def _keys(model: type[pydantic.BaseModel]) -> Iterator[Key]:
    """The keys of a model, and those of the models that its keys may hold."""
    for name, field in model.model_fields.items():
        if name == "kind":
            continue
        yield Key((name,), _filled(field.annotation), field.annotation, tuple(field.metadata))
        of_list = any(get_origin(part) is tuple for part in alternatives(field.annotation))
        for inner in models(_item(field.annotation)):
            data = _of_model(inner)
            for key in _keys(inner):
                at = (name, 0, *key.at) if of_list else (name, *key.at)
                needed = data | {str(key.at[0]): key.around}
                around = [needed] if of_list else needed
                yield Key(at, around, key.annotation, key.metadata)


def _item(annotation: Any) -> Any:
    lists = [part for part in alternatives(annotation) if get_origin(part) is tuple]
    return get_args(lists[0])[0] if lists else annotation


def _of_model(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    required = {name: field for name, field in model.model_fields.items() if field.is_required() or name in FITTING}
    kind = {"kind": kind_of(model)} if kind_of(model) else {}
    return kind | {name: FITTING.get(name, _filled(field.annotation)) for name, field in required.items()}


def _filled(annotation: Any) -> Any:
    """Some value of a type."""
    first = alternatives(annotation)[0]
    if found := models(annotation):
        return [_of_model(found[0])] if get_origin(first) is tuple else _of_model(found[0])
    if get_origin(first) is Literal:
        return get_args(first)[0]
    if get_origin(first) is tuple:
        return [_filled(part) for part in get_args(first) if part is not ...]
    return {int: 1, float: 0.5, bool: False, str: "x", Path: "x"}.get(first, {})


def _with(around: Any, at: tuple[str | int, ...], value: Any) -> Any:
    if not at:
        return value
    if isinstance(at[0], int):
        return [_with(around[at[0]], at[1:], value)]
    return around | {at[0]: _with(around.get(at[0], {}), at[1:], value)}


def _along(around: Any, at: tuple[str | int, ...]) -> Iterator[Any]:
    yield around
    for part in at:
        around = around[part] if isinstance(part, int) else around.get(part, {})
        yield around
