"""Rewrites pydantic's errors in the words of a config file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import pydantic

from meshpar.config.annotations import chosen, fields, item_of, kinds
from meshpar.errors import excerpt, nearest
from meshpar.synonyms import new_name, words

_EXPECTED = {
    "int": "an integer", "float": "a number", "bool": "true or false", "string": "a string", "tuple": "a list",
    "list": "a list", "dict": "a mapping", "model": "a mapping", "path": "a path",
}  # fmt: skip
_BOUNDS = {
    # pydantic's error type: (our words, the key of the bound in its context)
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
    "multiple_of": ("a multiple of", "multiple_of"),
}


def explain(root: type[pydantic.BaseModel], data: Any, invalid: pydantic.ValidationError) -> list[tuple[str, str, str]]:
    """(dotted path, what is wrong, fix) of each error, without repetitions. The path of the whole data is empty."""
    found: list[tuple[str, str, str]] = []
    for error in invalid.errors():
        keys, holder, annotation = _locate(root, data, error["loc"])
        where = ".".join(keys)
        what, fix = _words(root, data, error, keys, holder if keys and not kinds(annotation) else annotation)
        if error["type"] == "missing":
            fix = getattr(holder, "if_missing", {}).get(keys[-1], "")
        if found and found[-1][0] == where and found[-1] != (where, what, fix) and what.startswith("expected "):
            # Each member of a union of plain types expects another one.
            expected = found.pop()[1].partition(", got ")[0]
            what = f"{expected} or {what.removeprefix('expected ')}"
        found.append((where, what, fix))
    return list(dict.fromkeys(found))


def _words(root: type[pydantic.BaseModel], data: Any, error: Any, keys: list[str], model: Any) -> tuple[str, str]:
    """What is wrong, and the fix."""
    kind = error["type"]
    context = error.get("ctx", {})
    got = excerpt(repr(error["input"]))
    if kind == "extra_forbidden":
        return "unknown key", _known_key(root, data, keys, model)
    if kind == "missing":
        return "required, but missing", ""
    if kind == "union_tag_not_found":
        return "has no kind", f"kind: {' or '.join(kinds(model))}"
    if kind == "union_tag_invalid":
        near = nearest(context["tag"], kinds(model))
        fix = f"did you mean {near}? " if near else ""
        return f"no kind is called {excerpt(repr(context['tag']))}", f"{fix}There are {', '.join(kinds(model))}"
    if kind == "value_error":
        return str(context["error"]).replace("\n", "\n    "), ""
    if kind == "literal_error":
        near = nearest(str(error["input"]), re.findall(r"'([^']+)'", context["expected"]))
        return f"expected {context['expected']}, got {got}", f"did you mean {near}?" if near else ""
    if kind == "finite_number":
        return f"must be finite, got {got}", ""
    if kind == "is_instance_of":
        return f"expected a {context['class'].lower()}, got {got}", ""
    if kind in _BOUNDS:
        relation, bound = _BOUNDS[kind]
        return f"must be {relation} {context[bound]}, got {got}", ""
    expected = _EXPECTED.get(kind.split("_")[0])
    if expected == "a mapping":
        return f"expected a mapping, got {got}", _form(
            model if kinds(model) or not keys else fields(model).get(keys[-1])
        )
    return (f"expected {expected}, got {got}" if expected else error["msg"]), ""


def _form(section: Any) -> str:
    """How the mapping of a section is written."""
    if of_section := kinds(section):
        return f"{{kind: {of_section[0]}, ...}}; there are {', '.join(of_section)}"
    known = fields(chosen(section, {}))
    return f"{{{next(iter(known))}: ..., ...}}; its keys are {', '.join(known)}" if known else ""


def _known_key(root: type[pydantic.BaseModel], data: Any, keys: list[str], model: Any) -> str:
    """Suggests a key: one of the same section, or one of another section that other frameworks give this name."""
    *section, name = keys
    everywhere = list(_paths(root, data, ()))
    if new := new_name(".".join(keys), everywhere):
        return f"{'.'.join(keys)} is now {new}"
    for word in words(name):
        # A misspelled key of this section is likelier than a key of another one.
        siblings = [".".join([*section, key]) for key in get_close_matches(word, fields(model), n=1, cutoff=0.85)]
        found = siblings or [path for path in everywhere if path == word or path.endswith(f".{word}")]
        if found:
            return f"did you mean {found[0]}?"
    if near := nearest(name, fields(model)):
        return f"did you mean {'.'.join([*section, near])}?"
    return f"there are {', '.join(fields(model))}"


def _paths(annotation: Any, data: Any, at: tuple[str, ...]) -> Iterator[str]:
    """The dotted paths of all keys; those of a section come before those of its subsections."""
    known = fields(chosen(annotation, data))
    yield from (".".join([*at, key]) for key in known)
    for key, inner in known.items():
        yield from _paths(inner, _item(data, key), (*at, key))


def _locate(root: type[pydantic.BaseModel], data: Any, loc: tuple[Any, ...]) -> tuple[list[str], Any, Any]:
    """The keys of a pydantic location without its union tags, the type that holds the last of them, and its own."""
    keys: list[str] = []
    holder: Any = root
    annotation: Any = root
    for part in loc:
        if isinstance(data, dict) and part not in data and data.get("kind") == part:
            continue
        if isinstance(part, str) and not isinstance(data, dict):
            continue  # the member of a union of plain types, such as `str`
        if not (isinstance(data, (list, tuple)) and isinstance(part, int)):
            holder = chosen(annotation, data)
        keys.append(str(part))
        annotation = item_of(annotation) if isinstance(data, (list, tuple)) else fields(holder).get(str(part), Any)
        data = _item(data, part)
    return keys, holder, annotation


def _item(data: Any, key: Any) -> Any:
    if isinstance(data, (list, tuple)) and isinstance(key, int):
        return data[key] if key < len(data) else None
    return data.get(key) if isinstance(data, dict) else None
