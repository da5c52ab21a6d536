"""Represents configs as dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshpar.config.model import Config


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key -> value, for every key that can be set."""
    return flatten_json(config.model_dump(mode="json"))


def flatten_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """`flatten` for a config that is JSON data already.

    >>> flatten_json({"mesh": {"data": 8}, "seed": 0})
    {'mesh.data': 8, 'seed': 0}
    """
    return dict(_leaves(data, "")) if data else {}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Dotted key -> [old value, new value] where two configs as JSON data differ; None where a config has no such key.

    >>> changed({"mesh": {"data": 8}, "seed": 0}, {"mesh": {"data": 2, "fsdp": 4}, "seed": 0})
    {'mesh.data': [8, 2], 'mesh.fsdp': [None, 4]}
    """
    old = flatten_json(before)
    new = flatten_json(after)
    return {key: [old.get(key), new.get(key)] for key in old | new if old.get(key) != new.get(key)}


def _leaves(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{at}.{key}" if at else key)
    else:
        yield at, value
