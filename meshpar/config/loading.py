"""Loads a config from a file, or from the JSON data of an earlier config: reads, merges, then checks it as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import to_jsonable_python

from meshpar.config.annotations import chosen, fields
from meshpar.config.files import read_file
from meshpar.config.model import Config, check
from meshpar.config.overrides import override
from meshpar.config.shorthand import expand
from meshpar.errors import Problems

Root = TypeVar("Root", bound=Config)


def load(root: type[Root], path: Path | str, overrides: Sequence[str] = ()) -> Root:
    """Reads a config file.

    Args:
      root: the model that describes the file.
      path: a YAML file. Its `extends` names another file, relative to its folder and inside it, which supplies the keys
        that this file leaves out. Mappings are merged key by key, even if `kind` changes.
      overrides: `a.b=value`, with the value in YAML. A mapping, `a={b: 1}`, replaces all of `a`.

    Raises:
      ConfigError: lists every problem of the file and of the overrides.
    """
    problems = Problems()
    sources: dict[str, str] = {}
    data = read_file(root, Path(path), sources, problems)
    return _built(root, data, overrides, str(path), sources, problems)


def build(root: type[Root], data: dict[str, Any], name: str, overrides: Sequence[str] = ()) -> Root:
    """Builds a config from the JSON data of an earlier config; errors refer to the data by `name`."""
    data = expand(root, _without_defaults(root, data) if overrides else data)
    return _built(root, data, overrides, name, {}, Problems())


def _built(
    root: type[Root], data: Any, overrides: Sequence[str], name: str, sources: dict[str, str], problems: Problems
) -> Root:
    data = override(root, data, overrides, sources, problems)
    validate = partial(super(Config, root).model_validate, data)  # pydantic's own, whose errors `check` collects
    return check(root, data, validate, name, "the file", sources, problems)


def _without_defaults(annotation: Any, data: Any) -> Any:
    """The data without keys that have their default values, so that the defaults of an overriding `kind` apply."""
    model = chosen(annotation, data)
    if model is None or not isinstance(data, dict):
        return data
    known = fields(model)
    defaults = {
        key: to_jsonable_python(field.get_default(call_default_factory=True))
        for key, field in model.model_fields.items()
        if key != "kind" and not field.is_required()
    }
    return {
        key: _without_defaults(known.get(key), value)
        for key, value in data.items()
        if key not in defaults or value != defaults[key]
    }
