"""Lists the keys of a config model, from the JSON schema that editors read."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from meshpar import config
from meshpar.config import Config
from meshpar.config.annotations import kind_of, reachable
from meshpar.config.json_schema import RELATIVE

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
    bases: tuple[type[Config], ...] = ()
    """Classes that have the other keys of the model, each with a section of its own."""

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
    def link(self) -> str:
        """A link on its page by the kind that selects the model, or by its name if no kind or several do."""
        has_kind = "const" in self.about["properties"].get("kind", {})
        label = f"`{kind_of(self.model)}`" if has_kind else self.model.__name__
        return f"[{label}](#{self.anchor})"

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


def divided(found: list[Section]) -> list[Section]:
    """The sections, with the keys that several inherit from one class in a section of that class."""
    declared = [{key: _declaring(section.model, key) for key in section.keys} for section in found]
    times = Counter(one for keys in declared for one in keys.items())
    result: dict[type[Config], Section] = {}
    for section, keys in zip(found, declared, strict=True):
        inherited = {key: base for key, base in keys.items() if base is not section.model and times[key, base] > 1}
        for base in dict.fromkeys(inherited.values()):
            about = {"description": inspect.getdoc(base)}
            theirs = [key for key in inherited if inherited[key] is base]
            result.setdefault(base, _with_keys(replace(section, model=base, about=section.about | about), theirs))
        own = _with_keys(section, [key for key in section.about["properties"] if key not in inherited])
        result.setdefault(section.model, replace(own, bases=tuple(dict.fromkeys(inherited.values()))))
    return list(result.values())


def _declaring(model: type[Config], key: str) -> type[Config]:
    """The public class whose key it is: the model itself, if it has an example of its own."""
    if f"{model.__name__}.{key}" in EXAMPLES:
        return model
    base = next(base for base in model.__mro__ if key in inspect.get_annotations(base))
    return model if base.__name__.startswith("_") else base


def _with_keys(section: Section, keys: list[str]) -> Section:
    properties = section.about["properties"]
    return replace(section, about=section.about | {"properties": {key: properties[key] for key in keys}})


def keys_page(root: type[Config], about: str, elsewhere: dict[type[Config], str] | None = None) -> str:
    """A page with a table for each model, and for each class from which several models inherit keys.

    Args:
      elsewhere: model -> a link to its table on another page.
    """
    others = elsewhere or {}
    found = divided([section for section in sections(root) if section.model not in others])
    links = {section.model.__name__: section.link for section in found}
    links |= {model.__name__: link for model, link in others.items()}
    lines = [about]
    for group, inside in groupby(found, key=lambda section: section.group):
        lines += [f"## {group}\n"] if group else []
        for section in inside:
            lines += [f"{'###' if group else '##'} {section.title}\n", _about(section, found), ""]
            if section.keys:
                lines += ["| key | meaning | type | default | example |", "|---|---|---|---|---|"]
                lines += [_row(section, key, about, links) for key, about in section.keys.items()]
                lines.append("")
    return "\n".join(lines)


def _row(section: Section, key: str, about: dict[str, Any], links: dict[str, str]) -> str:
    field = section.model.model_fields[key]
    default = "*required*" if field.is_required() else _default(about, field)
    kind = _type(about, links).removesuffix(" or null") if default == "`null`" else _type(about, links)
    meaning = _line(about.get("description", "")).removesuffix(f" {RELATIVE}")  # the page says it once
    cells = [f"`{key}`", meaning, kind, default, f"`{section.example(key)}`"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _about(section: Section, found: list[Section]) -> str:
    """The first paragraph of the docstring, how the section is selected, and where its other keys are."""
    text = _line((section.about.get("description") or "").partition("\n\n")[0])
    kind = kind_of(section.model)
    selected = section.path and kind and f"`{section.path}: {{kind: {kind}}}`. "
    bases = [f"[{one.model.__name__}](#{one.anchor})" for one in found if one.model in section.bases]
    return f"{selected or ''}{text}" + (f" Also the keys of {', '.join(bases)}." if bases else "")


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


def _type(about: dict[str, Any], links: dict[str, str]) -> str:
    if "$ref" in about:
        return links[_refs(about)[0]]
    if "anyOf" in about:
        return _union(about["anyOf"], links)
    if "enum" in about:
        return ", ".join(f"`{flow(value)}`" for value in about["enum"])
    if "const" in about:
        return f"`{about['const']}`"
    if about.get("type") in ("integer", "number"):
        return _number(about)
    if about.get("type") == "array":
        return f"list of {_type(about['items'], links)}" if "items" in about else "list"
    if about.get("type") == "string":
        is_target = "pattern" in about
        return "`module:name`" if is_target else about.get("format", "text")
    return {"boolean": "`true`, `false`", "object": "mapping", "null": "null"}.get(about.get("type", ""), "any")


def _union(alternatives: list[dict[str, Any]], links: dict[str, str]) -> str:
    """The sections by their kinds, then other types. A kind alone, which selects a section too, is not repeated."""
    linked = [links[_refs(one)[0]] for one in alternatives if "$ref" in one]
    kinds = {flow(value) for one in alternatives for value in one.get("enum", ())}
    is_repeated = kinds <= set(re.findall(r"\[`(.+?)`\]", " ".join(linked)))
    others = [
        _type(one, links)
        for one in alternatives
        if "$ref" not in one and not _is_notation(one) and not ("enum" in one and is_repeated)
    ]
    parts = ([", ".join(linked)] if linked else []) + sorted(dict.fromkeys(others), key="null".__eq__)
    return " or ".join(parts)


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
