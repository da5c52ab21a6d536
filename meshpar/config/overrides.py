"""Applies `key=value` from the command line: a plain value sets one key, a mapping replaces a whole section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshpar.config.merging import Whole, merge
from meshpar.config.model import Config
from meshpar.config.yaml_text import MAX_DEPTH, MAX_KEY, UnreadableYaml, read
from meshpar.errors import Problems, excerpt

COMMAND_LINE = "command line"


def override(
    root: type[Config], data: Any, overrides: Sequence[str], sources: dict[str, str], problems: Problems
) -> Any:
    """The data with all overrides applied; `sources` receives their keys."""
    given = list(parsed(overrides, sources, problems))
    # A kind determines which other keys exist, so kinds are set first, and those of outer sections before inner ones.
    of_kinds = sorted([item for item in given if item[0][-1] == "kind"], key=lambda item: len(item[0]))
    others = [item for item in given if item[0][-1] != "kind"]
    for keys, value in of_kinds + others:
        nested: Any = {keys[-1]: value}
        if keys[-1] == "kind":
            dropped = {other[-1]: None for other, null in given if null is None and other[:-1] == keys[:-1]}
            nested = dropped | nested
        for key in reversed(keys[:-1]):
            nested = {key: nested}
        if isinstance(value, Whole):
            inside = ".".join(keys) + "."
            sources.update({known: COMMAND_LINE for known in sources if known.startswith(inside)})
        data = merge(root, data, nested, "", sources, problems)
    return data


def parsed(
    overrides: Sequence[str], sources: dict[str, str], problems: Problems
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The keys and the value of each override."""
    for text in overrides:
        name, equals, written = text.partition("=")
        keys = tuple(name.split("."))
        if not equals or not all(keys):
            problems.add(f"{excerpt(text)} ({COMMAND_LINE})", "not an override", "write key=value, as in mesh.tensor=4")
        elif len(keys) > MAX_DEPTH or max(map(len, keys)) > MAX_KEY:
            problems.add(f"{excerpt(name)} ({COMMAND_LINE})", "too long for a key")
        else:
            try:
                value = read(written, name, lambda line: COMMAND_LINE, sources, problems)
            except UnreadableYaml as error:
                fix = "quote it, or close its brackets" if error.is_syntax else ""
                problems.add(f"{name} ({COMMAND_LINE})", f"{excerpt(repr(written))} {error}", fix)
                continue
            sources[name] = COMMAND_LINE
            yield keys, Whole(value) if isinstance(value, dict) else value
