"""YAML to plain data, with the place of each key, and back. A file and an override are read by the same reader.

What is read is bounded, for a file may come from anywhere: how deep it is nested, how many values its aliases make, how
long a key and how large an integer is. Tags, which ask for other objects than plain data, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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


class NotRead(ValueError):
    """Text that is no config: where in it, and why."""

    def __init__(self, why: str, mark: Any = None, is_syntax: bool = False):
        super().__init__(f"is not YAML: {why}" if is_syntax else f"cannot be read: {why}")
        self.is_syntax = is_syntax
        self.place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""


def to_yaml(config: Config) -> str:
    """The whole config, defaults written out, such that it loads to the same."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def read(text: str, at: str, source: Callable[[int], str], sources: dict[str, str], problems: Problems) -> Any:
    """The value that a text holds; None where it is empty.

    Args:
      at: the dotted path of the value.
      source: number of a line -> how errors call it.
      sources: gets the source of each dotted path.

    Raises:
      NotRead: it is no YAML, or more than plain data of a bounded size.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return _Reading(loader, source, sources, problems).value(node, at) if node else None
    except yaml.YAMLError as error:
        why = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise NotRead(why, getattr(error, "problem_mark", None), is_syntax=True) from None
    except NotRead:
        raise
    except (ValueError, OverflowError) as error:  # of int() and chr(), which PyYAML lets through
        raise NotRead(str(error), is_syntax=True) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader without dates and tags, of bounded depth, which reads 1e-3 as the number that everybody means."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "tag", None):
            raise NotRead(f"the tag {excerpt(event.tag)} asks for more than plain data", event.start_mark)
        if self.depth == MAX_DEPTH:
            raise NotRead(f"it is nested more than {MAX_DEPTH} deep", event.start_mark)
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
    """SafeDumper, which quotes the texts that `_Loader` would read as something else: '0E0'."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


@dataclass
class _Reading:
    """Makes values of nodes; where SafeLoader would use the last of two equal keys, there is a problem."""

    loader: _Loader
    source: Callable[[int], str]
    sources: dict[str, str]
    problems: Problems
    enclosing: list[yaml.Node] = field(default_factory=list)
    num_values: int = 0

    def value(self, node: yaml.Node, at: str) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise NotRead(f"it holds more than {MAX_VALUES} values", node.start_mark)
        if any(node is outer for outer in self.enclosing):
            raise NotRead("an alias stands inside of what it names", node.start_mark)
        self.sources[at] = self.source(node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self.enclosing.append(node)
        value = self._mapping(node, at) if isinstance(node, yaml.MappingNode) else self._list(node, at)
        self.enclosing.pop()
        return value

    def _list(self, node: yaml.Node, at: str) -> list[Any]:
        return [self.value(item, f"{at}.{i}") for i, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, at: str) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            inner = f"{at}.{key}" if at else key
            if key in value:
                where = f"{inner} ({self.source(key_node.start_mark.line + 1)})"
                self.problems.add(where, "this key stands twice", "keep one of the two")
            value[key] = self.value(value_node, inner)
        return value

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise NotRead("a list or a mapping stands as a key", node.start_mark)
        if node.tag.endswith(":merge"):
            raise NotRead("<< does not merge here; use extends", node.start_mark)
        if len(node.value) > MAX_KEY:
            raise NotRead(f"a key of {len(node.value)} characters", node.start_mark)
        return self._text(node)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag.endswith((":str", ":value", ":merge")):
            return self._text(node)
        try:
            value = self.loader.construct_object(node)
        except ValueError:  # more digits than Python converts, or none after 0x
            raise NotRead(f"{excerpt(node.value)} is not a number", node.start_mark) from None
        if isinstance(value, int) and value not in _INTEGERS:
            raise NotRead(f"{excerpt(node.value)} is beyond 64 bits", node.start_mark)
        return value

    def _text(self, node: yaml.ScalarNode) -> str:
        if found := _UNWRITABLE.search(node.value):
            raise NotRead(f"a text holds the character {found.group()!r}", node.start_mark)
        return node.value
