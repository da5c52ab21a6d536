"""What pydantic finds wrong, in words of the config and none of pydantic's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pydantic

from meshpar.config.annotations import chosen, fields, item_of, kinds
from meshpar.errors import excerpt, nearest
from meshpar.synonyms import words

_EXPECTED = {
    "int": "an integer", "float": "a number", "bool": "true or false", "string": "a text", "tuple": "a list",
    "list": "a list", "dict": "a mapping", "model": "a mapping", "path": "a path",
}  # fmt: skip
_BOUNDS = {
    "greater_than": "greater than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}
_LIMITS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}


def explain(
    root: type[pydantic.BaseModel], data: Any, invalid: pydantic.ValidationError
) -> Iterator[tuple[str, str, str]]:
    """(dotted path, what, fix) of each error, once."""
    told: set[tuple[str, str, str]] = set()
    for error in invalid.errors():
        keys, model = _locate(root, data, error["loc"])
        one = (".".join(keys) or "the file", *_words(root, data, error, keys, model))
        if one not in told:
            told.add(one)
            yield one


def _words(root: type[pydantic.BaseModel], data: Any, error: Any, keys: list[str], model: Any) -> tuple[str, str]:
    kind, context, got = error["type"], error.get("ctx", {}), excerpt(repr(error["input"]))
    if kind == "extra_forbidden":
        return "unknown key", _known_key(root, data, keys, model)
    if kind == "missing":
        return "required, but missing", ""
    if kind == "union_tag_not_found":
        return "has no kind", f"kind: {' or '.join(kinds(model))}"
    if kind == "union_tag_invalid":
        near = nearest(context["tag"], kinds(model))
        did = f"did you mean {near}? " if near else ""
        return f"no kind is called {excerpt(repr(context['tag']))}", f"{did}There are {', '.join(kinds(model))}"
    if kind == "value_error":
        return str(context["error"]).replace("\n", "\n    "), ""
    if kind == "literal_error":
        return f"expected {context['expected']}, got {got}", ""
    if kind == "finite_number":
        return f"must be finite, got {got}", ""
    if kind == "is_instance_of":
        return f"expected a {context['class'].lower()}, got {got}", ""
    if kind in _BOUNDS:
        return f"must be {_BOUNDS[kind]} {context[_LIMITS[kind]]}, got {got}", ""
    expected = _EXPECTED.get(kind.split("_")[0])
    return (f"expected {expected}, got {got}", "") if expected else (error["msg"], "")


def _known_key(root: type[pydantic.BaseModel], data: Any, keys: list[str], model: Any) -> str:
    """The key that was meant: one beside it, or one of another section that another framework calls so."""
    *section, name = keys
    everywhere = list(_paths(root, data, ()))
    for word in words(name):
        beside = [".".join([*section, key]) for key in fields(model) if key == word]
        found = beside or [path for path in everywhere if path == word or path.endswith(f".{word}")]
        if found:
            return f"did you mean {found[0]}?"
    if near := nearest(name, fields(model)):
        return f"did you mean {'.'.join([*section, near])}?"
    return f"there are {', '.join(fields(model))}"


def _paths(annotation: Any, data: Any, at: tuple[str, ...]) -> Iterator[str]:
    """The dotted paths of all keys, those of a section before those inside of them."""
    known = fields(chosen(annotation, data))
    yield from (".".join([*at, key]) for key in known)
    for key, inner in known.items():
        yield from _paths(inner, _item(data, key), (*at, key))


def _locate(root: type[pydantic.BaseModel], data: Any, loc: tuple[Any, ...]) -> tuple[list[str], Any]:
    """The keys of a pydantic location without its union tags, and the type that holds the last of them."""
    keys: list[str] = []
    holder: Any = root
    annotation: Any = root
    for part in loc:
        if isinstance(data, dict) and part not in data and data.get("kind") == part:
            continue
        if not (isinstance(data, (list, tuple)) and isinstance(part, int)):
            holder = chosen(annotation, data)
        keys.append(str(part))
        annotation = item_of(annotation) if isinstance(data, (list, tuple)) else fields(holder).get(str(part), Any)
        data = _item(data, part)
    return keys, holder if keys and not kinds(annotation) else annotation


def _item(data: Any, key: Any) -> Any:
    if isinstance(data, (list, tuple)) and isinstance(key, int):
        return data[key] if key < len(data) else None
    return data.get(key) if isinstance(data, dict) else None
