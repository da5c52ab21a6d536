"""A config from a file, or from what was kept of one: read, merged, and then checked as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
from pydantic_core import to_jsonable_python

from meshpar.config.annotations import chosen, fields
from meshpar.config.explaining import explain
from meshpar.config.files import read_file
from meshpar.config.model import Config
from meshpar.config.overrides import override
from meshpar.config.shorthand import expand
from meshpar.errors import ConfigError, Problems

Root = TypeVar("Root", bound=Config)


def load(root: type[Root], path: Path, overrides: Sequence[str] = ()) -> Root:
    """Reads a config.

    Args:
      root: what the file describes.
      path: a YAML file. Its `extends` names another, relative to its folder and not outside it, whose keys hold
        where this one says nothing. Mappings are merged key by key, through a change of `kind` too.
      overrides: `a.b=value`, the value written as in YAML. A mapping, `a={b: 1}`, replaces all of `a`.

    Raises:
      ConfigError: lists every problem of the file and of the overrides.
    """
    problems, sources = Problems(), {}
    data = read_file(root, path, sources, problems)
    return _built(root, override(root, data, overrides, sources, problems), str(path), sources, problems)


def build(root: type[Root], data: dict[str, Any], name: str, overrides: Sequence[str] = ()) -> Root:
    """A config from JSON data that was written from one; `name` says in errors where it is from."""
    problems, sources = Problems(), {}
    data = expand(root, _without_defaults(root, data) if overrides else data)
    return _built(root, override(root, data, overrides, sources, problems), name, sources, problems)


def _built(root: type[Root], data: Any, name: str, sources: dict[str, str], problems: Problems) -> Root:
    config = None
    try:
        config = root.model_validate(data)
    except pydantic.ValidationError as invalid:
        for where, what, fix in explain(root, data, invalid):
            problems.add(f"{where}{_source(where, sources)}", what, fix)
    problems.raise_any(ConfigError, f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {name}:")
    assert config is not None
    return config


def _without_defaults(annotation: Any, data: Any) -> Any:
    """The data without what a file need not say, so that another kind brings its own defaults."""
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


def _source(where: str, sources: dict[str, str]) -> str:
    """Where the nearest enclosing key was written."""
    while where and where not in sources:
        where = where.rpartition(".")[0]
    return f" ({sources[where]})" if where else ""
