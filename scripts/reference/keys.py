"""Lists the keys of a config model, from the JSON schema that editors read."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from meshpar import config
from meshpar.config import Config
from meshpar.config.annotations import kind_of, reachable

EXAMPLES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "examples.yaml").read_text())
"""Key, or `Class.key` -> a value, where neither a list of alternatives nor a Boolean determines one."""
LARGEST = 2**20
"""Upper bounds from here on only keep numbers representable, and are not shown."""


@dataclass(frozen=True)
class Section:
    """A config model, and the first place in a config where it can stand."""

    model: type[Config]
    about: dict[str, Any]
    path: str
    in_list: bool

    @property
    def title(self) -> str:
        return f"{self.path}: {self.model.__name__}" if self.path else self.model.__name__

    @property
    def group(self) -> str:
        """The key of the root below which it stands."""
        return self.path.partition(".")[0]

    @property
    def anchor(self) -> str:
        """The anchor that Python-Markdown gives to the title."""
        return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", self.title).strip().lower())

    @property
    def keys(self) -> dict[str, dict[str, Any]]:
        """Key -> its schema, without `kind` if it has one value only, which the heading has."""
        properties = self.about["properties"].items()
        return {key: about for key, about in properties if key != "extends" and "const" not in about}

    def data(self, key: str) -> dict[str, Any]:
        """The key with its example, and all keys without which the model would refuse it."""
        required = [name for name, field in self.model.model_fields.items() if field.is_required()]
        kind = kind_of(self.model)
        whole = {"kind": kind} if kind else {}
        whole |= {name: self.value(name) for name in required}
        return whole | self.needed(key) | {key: self.value(key)}

    def needed(self, key: str) -> dict[str, Any]:
        return EXAMPLES.get(f"{self.model.__name__}.{key} needs", {})

    def example(self, key: str) -> str:
        """The key as on the command line of a shell, with others if it is refused without them."""
        if self.in_list:
            return quoted(f"{self.path}=[{flow(self.data(key))}]")
        changes = self.needed(key) | {key: self.value(key)}
        return " ".join(
            quoted(f"{self.path}.{name}={flow(value)}".removeprefix(".")) for name, value in changes.items()
        )

    def value(self, key: str) -> Any:
        """A value of a key that is not its default."""
        written = (f"{self.model.__name__}.{key}", key)
        if found := [EXAMPLES[name] for name in written if name in EXAMPLES]:
            return found[0]
        about = self.about["properties"][key]
        default = about.get("default")
        if about.get("type") == "boolean":
            return not default
        other = [value for value in _alternatives(about) if value != default]
        if not other:
            raise KeyError(f"scripts/reference/examples.yaml has no value for {' or '.join(written)}")
        return other[0]


def sections(root: type[Config]) -> list[Section]:
    """The root and all models below it, by the keys of the root; each at the shortest path where it can stand."""
    described = config.schema(root)
    models = {model.__name__: model for model in reachable(root)}
    found: dict[str, Section] = {}
    waiting = deque([(root.__name__, described, "", False)])
    while waiting:
        name, about, path, in_list = waiting.popleft()
        if name not in found:
            about = about if "properties" in about else about["anyOf"][0]
            found[name] = Section(models[name], about, path, in_list)
            for key, inner in found[name].keys.items():
                below = f"{path}.{key}".removeprefix(".")
                waiting += [(ref, described["$defs"][ref], below, "items" in inner) for ref in _refs(inner)]
    groups = ["", *root.model_fields]
    return sorted(found.values(), key=lambda section: groups.index(section.group))


def keys_page(root: type[Config], about: str) -> str:
    """A page with a table for each model."""
    found = sections(root)
    anchors = {section.model.__name__: section.anchor for section in found}
    lines = [about]
    for group, inside in groupby(found, key=lambda section: section.group):
        lines += [f"## {group}\n"] if group else []
        for section in inside:
            lines += [f"{'###' if group else '##'} {section.title}\n", _about(section), ""]
            if section.keys:
                lines += ["| key | what it sets | type | default | example |", "|---|---|---|---|---|"]
                lines += [_row(section, key, about, anchors) for key, about in section.keys.items()]
                lines.append("")
    return "\n".join(lines)


def _row(section: Section, key: str, about: dict[str, Any], anchors: dict[str, str]) -> str:
    field = section.model.model_fields[key]
    default = "*required*" if field.is_required() else _default(about, field)
    meaning = _line(about.get("description", ""))
    cells = [f"`{key}`", meaning, _type(about, anchors), default, f"`{section.example(key)}`"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _about(section: Section) -> str:
    """The first paragraph of the docstring, and how the section is selected."""
    text = _line((section.about.get("description") or "").partition("\n\n")[0])
    kind = kind_of(section.model)
    selected = section.path and kind and f"`{section.path}: {{kind: {kind}}}`. "
    return f"{selected or ''}{text}"


def _line(text: str) -> str:
    """A docstring in one line of Markdown."""
    return " ".join(text.split())


def _default(about: dict[str, Any], field: Any) -> str:
    value = about.get("default", field.get_default(call_default_factory=True))
    if isinstance(value, dict) and value:
        value = value.get("kind", value.get("preset"))
        return "see there" if value is None else f"`{flow(value)}`"
    if isinstance(value, list):
        value = [item.get("kind", item) if isinstance(item, dict) else item for item in value]
    return f"`{flow(value)}`"


def _type(about: dict[str, Any], anchors: dict[str, str]) -> str:
    if "$ref" in about:
        name = _refs(about)[0]
        return f"[{name}](#{anchors[name]})"
    if "anyOf" in about:
        members = [_type(one, anchors) for one in about["anyOf"] if not _is_notation(one)]
        return " or ".join(sorted(dict.fromkeys(members), key="null".__eq__))
    if "enum" in about:
        return ", ".join(f"`{flow(value)}`" for value in about["enum"])
    if "const" in about:
        return f"`{about['const']}`"
    if about.get("type") in ("integer", "number"):
        return _number(about)
    if about.get("type") == "array":
        return f"list of {_type(about['items'], anchors)}" if "items" in about else "list"
    if about.get("type") == "string":
        is_target = "pattern" in about
        return "`module:name`" if is_target else about.get("format", "text")
    return {"boolean": "`true`, `false`", "object": "mapping", "null": "null"}.get(about.get("type", ""), "any")


def _number(about: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {about[bound]:g}" for bound, sign in signs.items() if about.get(bound, LARGEST) < LARGEST]
    return " ".join([about["type"], ", ".join(bounds)]).strip()


def _is_notation(about: dict[str, Any]) -> bool:
    """Whether this is the text `1e-3`, which stands for a number."""
    return about.get("type") == "string" and "[eE]" in about.get("pattern", "")


def _refs(about: dict[str, Any]) -> list[str]:
    return re.findall(r'"#/\$defs/(\w+)"', json.dumps(about))


def _alternatives(about: dict[str, Any]) -> Iterator[Any]:
    yield from about.get("enum", ())
    for one in about.get("anyOf", ()):
        yield from _alternatives(one)


def flow(value: Any) -> str:
    """A value in YAML, in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*|<[\w/]+>|\d+[MG]iB", value):
        return value
    return json.dumps(value)


def quoted(override: str) -> str:
    """An override for a shell, in quotes where the shell would read its characters."""
    return f"'{override}'" if re.search(r'[\s"*<>]', override) else override
