"""Converts YAML to plain data, with the line of each key, and back. Files and overrides are read by the same code.

A file may come from anywhere, so these are limited: the depth of nesting, the number of values that aliases expand to,
the length of a key, and the size of an integer. Tags, which could create other objects than plain data, are refused.

PyYAML alone reports no positions, no duplicate keys and no limits; ruamel.yaml reports positions, but only the first
duplicate key, interprets keys and dates, and has no limits either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from meshpar.config.model import Config
from meshpar.errors import Problems, excerpt

MAX_DEPTH = 32
MAX_VALUES = 20_000
MAX_KEY = 200
_INTEGERS = range(-(2**63), 2**64)
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")


class UnreadableYaml(ValueError):
    """The text is not YAML, or exceeds what a config may contain; `place` is `:line:column` in the text."""

    def __init__(self, why: str, mark: Any = None, is_syntax: bool = False):
        super().__init__(f"is not YAML: {why}" if is_syntax else f"cannot be read: {why}")
        self.is_syntax = is_syntax
        self.place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""


def to_yaml(content: Config | Mapping[str, Any]) -> str:
    """Plain data as YAML; or a whole config with its defaults, which loads as an equal config."""
    plain = content.model_dump(mode="json") if isinstance(content, Config) else content
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False)


def read(text: str, at: str, source: Callable[[int], str], sources: dict[str, str], problems: Problems) -> Any:
    """The value of a YAML text; None where it is empty.

    Args:
      at: the dotted path of the value.
      source: line number -> the name of this place in errors.
      sources: receives the source of each dotted path.
      problems: receives duplicate keys.

    Raises:
      UnreadableYaml: the text is not YAML, or is more than plain data within the limits.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return _Reading(loader, source, sources, problems).value(node, at) if node else None
    except yaml.YAMLError as error:
        why = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise UnreadableYaml(why, getattr(error, "problem_mark", None), is_syntax=True) from None
    except UnreadableYaml:
        raise
    except (ValueError, OverflowError) as error:  # PyYAML passes on the errors of int() and chr()
        raise UnreadableYaml(str(error), is_syntax=True) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader without dates and tags and with limited depth, which reads 1e-3 as a number, as YAML 1.2 does."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "tag", None):
            raise UnreadableYaml(
                f"the tag {excerpt(event.tag)} is refused: a config holds only plain data", event.start_mark
            )
        if self.depth == MAX_DEPTH:
            raise UnreadableYaml(f"it is nested more than {MAX_DEPTH} levels deep", event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(inf|nan))$"
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


class _Dumper(yaml.SafeDumper):
    """SafeDumper, which quotes strings that `_Loader` would read as another type, such as '0E0'."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


@dataclass
class _Reading:
    """Converts nodes to values, and reports duplicate keys, of which SafeLoader would silently use the last."""

    loader: _Loader
    source: Callable[[int], str]
    sources: dict[str, str]
    problems: Problems
    enclosing: list[yaml.Node] = field(default_factory=list)
    num_values: int = 0

    def value(self, node: yaml.Node, at: str) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise UnreadableYaml(f"it holds more than {MAX_VALUES} values", node.start_mark)
        if any(node is outer for outer in self.enclosing):
            raise UnreadableYaml("an alias refers to the value that contains it", node.start_mark)
        self.sources[at] = self.source(node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self.enclosing.append(node)
        if isinstance(node, yaml.MappingNode):
            value = self._mapping(node, at)
        else:
            value = [self.value(item, f"{at}.{i}") for i, item in enumerate(node.value)]
        self.enclosing.pop()
        return value

    def _mapping(self, node: yaml.MappingNode, at: str) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            inner = f"{at}.{key}" if at else key
            if key in value:
                where = f"{inner} ({self.source(key_node.start_mark.line + 1)})"
                self.problems.add(where, "this key appears twice", "remove one of the two")
            value[key] = self.value(value_node, inner)
        return value

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise UnreadableYaml("a list or a mapping is used as a key", node.start_mark)
        if node.tag.endswith(":merge"):
            raise UnreadableYaml("<< is not supported; use extends", node.start_mark)
        if len(node.value) > MAX_KEY:
            raise UnreadableYaml(f"a key has {len(node.value)} characters, more than {MAX_KEY}", node.start_mark)
        return self._text(node)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag.endswith((":str", ":value", ":merge")):
            return self._text(node)
        try:
            value = self.loader.construct_object(node)
        except ValueError:  # too many digits for Python, or none after 0x
            raise UnreadableYaml(f"{excerpt(node.value)} is not a number", node.start_mark) from None
        if isinstance(value, int) and value not in _INTEGERS:
            raise UnreadableYaml(f"{excerpt(node.value)} is beyond 64 bits", node.start_mark)
        return value

    def _text(self, node: yaml.ScalarNode) -> str:
        if found := _UNWRITABLE.search(node.value):
            raise UnreadableYaml(f"a string holds the character {found.group()!r}", node.start_mark)
        return node.value
