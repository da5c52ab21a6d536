"""Typed, frozen config models, YAML and `key=value` overrides; knows no component.

A config file is data: a mapping, with at most one `extends: other.yaml` beside its keys. What is wrong in it,
or on the command line, is reported all at once, by dotted path and by file and line.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

import pydantic
import yaml

from meshpar.errors import ConfigError, Problems, nearest

COMMAND_LINE = "command line"


class Config(pydantic.BaseModel):
    """Base of everything that can be written in a config file: frozen, keyword-only, no unknown keys."""

    # Validators are built when they are first used: importing meshpar should cost next to nothing.
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", defer_build=True)

    shorthand: ClassVar[str | None] = None
    """The key that is meant where a file has a bare value in place of a mapping."""


Root = TypeVar("Root", bound=Config)


def load(root: type[Root], path: Path, overrides: Sequence[str] = ()) -> Root:
    """Reads a config.

    Args:
      root: what the file describes.
      path: a YAML file. Its `extends` names another, relative to its folder and not outside it, whose keys hold
        where this one says nothing. Mappings are merged; one of another `kind` replaces the other's whole.
      overrides: `a.b=value`, the value written as in YAML. `optim.kind=lion` begins that section anew.

    Raises:
      ConfigError: lists every problem of the file and of the overrides.
    """
    problems, sources = Problems(), {}
    return _built(root, _read(root, path, sources, problems, ()), str(path), overrides, sources, problems)


def build(root: type[Root], data: dict[str, Any], name: str, overrides: Sequence[str] = ()) -> Root:
    """A config from JSON data that was written from one; `name` says in errors where it is from."""
    return _built(root, _expand(root, data), name, overrides, {}, Problems())


def _built(
    root: type[Root], data: Any, name: str, overrides: Sequence[str], sources: dict[str, str], problems: Problems
) -> Root:
    for override in _overrides(overrides, sources, problems):
        data = _merge(data, _expand(root, override))
    config = None
    try:
        config = root.model_validate_json(json.dumps(data), strict=True)
    except pydantic.ValidationError as invalid:
        for where, what, fix in _explain(root, data, invalid):
            problems.add(f"{where}{_source(where, sources)}", what, fix)
    problems.raise_any(ConfigError, f"{len(problems)} problem{'s' * (len(problems) > 1)} in {name}:")
    assert config is not None
    return config


def to_yaml(config: Config) -> str:
    """The whole config, defaults written out, such that it loads to the same."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def schema(root: type[Config]) -> dict[str, Any]:
    """The JSON schema of a file for `root`, for editors: with the text that stands below each field."""
    described = root.model_json_schema()
    for model in _reachable(root):
        properties = (described if model is root else described["$defs"][model.__name__])["properties"]
        for field, text in _field_docs(model).items():
            properties[field] = properties[field] | {"description": text}
    inherited = {"type": "string", "description": "A file whose keys hold where this one says nothing."}
    described["properties"]["extends"] = inherited
    described["required"] = []
    return described


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key -> value, of everything that can be set."""
    return flatten_json(config.model_dump(mode="json"))


def flatten_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same, of a config as JSON data.

    >>> flatten_json({"mesh": {"data": 8}, "seed": 0})
    {'mesh.data': 8, 'seed': 0}
    """
    return dict(_leaves(data, "")) if data else {}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Dotted key -> the two values, where two configs as JSON data differ; None where one has no such key.

    >>> changed({"mesh": {"data": 8}, "seed": 0}, {"mesh": {"data": 2, "fsdp": 4}, "seed": 0})
    {'mesh.data': [8, 2], 'mesh.fsdp': [None, 4]}
    """
    old, new = flatten_json(before), flatten_json(after)
    keys = [*old, *(key for key in new if key not in old)]
    return {key: [old.get(key), new.get(key)] for key in keys if old.get(key) != new.get(key)}


def _reachable(model: type[Config]) -> set[type[Config]]:
    """The model, and all that its fields may hold."""
    inner = (m for annotation in _fields(model).values() for m in _models(annotation))
    return {model}.union(*map(_reachable, inner))


def _field_docs(model: type[Config]) -> dict[str, str]:
    """Field -> the string that follows it in the source of the class or of one that it inherits from."""
    docs: dict[str, str] = {}
    for cls in reversed([c for c in model.__mro__ if issubclass(c, Config)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # pyright: ignore
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                docs[field.target.id] = inspect.cleandoc(str(text.value.value))  # pyright: ignore
    return {field: text for field, text in docs.items() if field in model.model_fields}


# YAML --------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """SafeLoader, less its dates, and reading 1e-3 as the number that everybody means."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(inf|nan))$"
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


class _Dumper(yaml.SafeDumper):
    """SafeDumper, which quotes the texts that `_Loader` would read as something else: '0E0'."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_PLAIN = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


def _read(
    root: type[Config], path: Path, sources: dict[str, str], problems: Problems, seen: tuple[Path, ...]
) -> dict[str, Any]:
    """The mapping of a file, merged over those that it extends; `sources` gets file and line of each key."""
    if path.resolve() in seen:
        problems.add(str(path), "extends itself, by way of others", "remove one extends")
        return {}
    own: dict[str, str] = {}
    data = _expand(root, _parse(path, own, problems))
    parent = data.pop("extends", None)
    if parent is not None:
        within = isinstance(parent, str) and not Path(parent).is_absolute() and ".." not in Path(parent).parts
        if not within:
            problems.add(
                f"extends ({own['extends']})", f"{parent!r} is not a path within this folder", "a relative path"
            )
        else:
            data = _merge(_read(root, path.parent / parent, sources, problems, (*seen, path.resolve())), data)
    sources.update(own)
    return data


def _parse(path: Path, sources: dict[str, str], problems: Problems) -> dict[str, Any]:
    try:
        loader = _Loader(path.read_text())
        node = loader.get_single_node()
        value = _construct(loader, node, "", path, sources, problems) if node else {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{at} is not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {_kind_of(value)}, not a mapping of keys")
    return value


def _construct(
    loader: _Loader, node: yaml.Node, at: str, path: Path, sources: dict[str, str], problems: Problems
) -> Any:
    """The value of a node; where SafeLoader would take the last of two equal keys, a problem."""
    sources[at] = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN:
        raise yaml.constructor.ConstructorError(None, None, f"{node.tag} is no plain data", node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, n, f"{at}.{i}", path, sources, problems) for i, n in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    value: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node))
        inner = f"{at}.{key}" if at else key
        if key in value:
            problems.add(
                f"{inner} ({path}:{key_node.start_mark.line + 1})", "this key stands twice", "keep one of the two"
            )
        value[key] = _construct(loader, value_node, inner, path, sources, problems)
    return value


def _merge(under: Any, over: Any) -> Any:
    """`over`, and what `under` says beside it."""
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    if over.get("kind", under.get("kind")) != under.get("kind"):
        return over
    return under | {key: _merge(under[key], value) if key in under else value for key, value in over.items()}


def _expand(annotation: Any, data: Any) -> Any:
    """The data with every shorthand written out, so that it can be merged."""
    if isinstance(data, list) and _is_sequence(annotation):
        return [_expand(get_args(annotation)[0], item) for item in data]
    model = _chosen(annotation, data)
    if model is None:
        return data
    if model.shorthand and data is not None and not isinstance(data, dict):
        kind = {"kind": _kind(model)} if len(_models(annotation)) > 1 else {}
        data = kind | {model.shorthand: data}
    if not isinstance(data, dict):
        return data
    return {key: _expand(_fields(model).get(key), value) for key, value in data.items()}


def _overrides(overrides: Sequence[str], sources: dict[str, str], problems: Problems) -> Iterator[dict[str, Any]]:
    """Each override as a mapping."""
    # A change of kind begins its section anew, so it comes before the section's other keys.
    for text in sorted(overrides, key=lambda text: not text.partition("=")[0].endswith(".kind")):
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            problems.add(f"{text} ({COMMAND_LINE})", "not an override", "write key=value, as in mesh.tensor=4")
            continue
        try:
            parsed = yaml.load(value, _Loader)
        except yaml.YAMLError:
            problems.add(f"{key} ({COMMAND_LINE})", f"{value!r} is not YAML", "quote it, or close its brackets")
            continue
        for name in reversed(key.split(".")):
            parsed = {name: parsed}
        sources[key] = COMMAND_LINE
        yield parsed


# Errors ------------------------------------------------------------------------------------------------------

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


def _explain(root: type[Config], data: Any, invalid: pydantic.ValidationError) -> Iterator[tuple[str, str, str]]:
    """(dotted path, what, fix) of each error, in words of the config and none of pydantic's."""
    for error in invalid.errors():
        keys, model = _locate(root, data, error["loc"])
        where = ".".join(keys) or "the file"
        yield where, *_words(error, keys, model)


def _words(error: Any, keys: list[str], model: Any) -> tuple[str, str]:
    kind, context, got = error["type"], error.get("ctx", {}), error["input"]
    if kind == "extra_forbidden":
        near = nearest(keys[-1], _fields(model))
        return (
            "unknown key",
            f"did you mean {'.'.join([*keys[:-1], near])}?" if near else f"there are {', '.join(_fields(model))}",
        )
    if kind == "missing":
        return "required, but missing", ""
    if kind == "union_tag_not_found":
        return "has no kind", f"kind: {' or '.join(_kinds(model))}"
    if kind == "union_tag_invalid":
        near = nearest(context["tag"], _kinds(model))
        meant = f"did you mean {near}? " if near else ""
        return f"no kind is called {context['tag']!r}", f"{meant}There are {', '.join(_kinds(model))}"
    if kind == "value_error":
        return str(context["error"]).replace("\n", "\n    "), ""
    if kind == "literal_error":
        return f"expected {context['expected']}, got {got!r}", ""
    if kind in _BOUNDS:
        return f"must be {_BOUNDS[kind]} {context[_LIMITS[kind]]}, got {got!r}", ""
    expected = _EXPECTED.get(kind.split("_")[0])
    return (f"expected {expected}, got {got!r}", "") if expected else (error["msg"], "")


def _locate(root: type[Config], data: Any, loc: tuple[Any, ...]) -> tuple[list[str], Any]:
    """The keys of a pydantic location without its union tags, and the type that holds the last of them."""
    keys: list[str] = []
    holder: Any = root
    annotation: Any = root
    for part in loc:
        if isinstance(data, dict) and part not in data and data.get("kind") == part:
            continue
        if isinstance(data, list) and isinstance(part, int):
            keys.append(str(part))
            annotation, data = get_args(annotation)[0] if _is_sequence(annotation) else Any, _item(data, part)
            continue
        holder = _chosen(annotation, data)
        keys.append(str(part))
        annotation = _fields(holder).get(str(part), Any)
        data = _item(data, part)
    return keys, holder if keys and not _kinds(annotation) else annotation


def _item(data: Any, key: Any) -> Any:
    if isinstance(data, list) and isinstance(key, int):
        return data[key] if key < len(data) else None
    return data.get(key) if isinstance(data, dict) else None


def _chosen(annotation: Any, data: Any) -> Any:
    """The model that an annotation means for this data: of a union, the one of its kind."""
    models = _models(annotation)
    kind = data.get("kind") if isinstance(data, dict) else None
    return next((m for m in models if _kind(m) == kind), models[0] if models else None)


def _fields(model: Any) -> Mapping[str, Any]:
    return {name: field.annotation for name, field in model.model_fields.items()} if model in _models(model) else {}


def _kinds(annotation: Any) -> list[str]:
    return [kind for model in _models(annotation) if (kind := _kind(model))]


def _kind(model: type[Config]) -> str | None:
    return model.model_fields["kind"].default if "kind" in model.model_fields else None


def _models(annotation: Any) -> list[type[Config]]:
    """The config models in an annotation: itself, or those of its union or sequence."""
    if get_origin(annotation) in (Annotated, Union, types.UnionType) or _is_sequence(annotation):
        return [model for part in get_args(annotation) for model in _models(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, Config) else []


def _is_sequence(annotation: Any) -> bool:
    return get_origin(annotation) in (tuple, list)


def _source(where: str, sources: Mapping[str, str]) -> str:
    """Where the nearest enclosing key was written."""
    while where and where not in sources:
        where = where.rpartition(".")[0]
    return f" ({sources[where]})" if where in sources and where else ""


def _kind_of(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"the {type(value).__name__} {value!r}"


def _leaves(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{at}.{key}" if at else key)
    else:
        yield at, value
