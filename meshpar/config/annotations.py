"""Finds the config models that a field's annotation allows, and the one that given data select."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo

from meshpar.config.coerced import Stored


def models(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """The config models in an annotation: itself, or those of its union or sequence."""
    if is_sequence(annotation):
        return [model for part in get_args(annotation) for model in models(part)]
    if get_origin(annotation) is not None:
        return [model for part in alternatives(annotation) if part != annotation for model in models(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel) else []


def alternatives(annotation: Any) -> list[Any]:
    """The members of a union, or the type itself, without `Annotated` metadata.

    >>> alternatives(Annotated[int, "at least 1"] | tuple[str, ...] | None)
    [<class 'int'>, tuple[str, ...], <class 'NoneType'>]
    """
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [found for part in get_args(annotation) for found in alternatives(part)]
    return [annotation]


def is_sequence(annotation: Any) -> bool:
    return get_origin(annotation) in (tuple, list)


def item_of(annotation: Any) -> Any:
    """The annotation of a sequence's items."""
    return get_args(annotation)[0] if is_sequence(annotation) else Any


def is_path(field: FieldInfo) -> bool:
    """Whether a field holds the path of a file or a folder: `FilePath`, `PathText`, or one of them or nothing."""
    return Path in (*_types_and_metadata(field.annotation), *field.metadata)


def may_be_stored(annotation: Any, metadata: Sequence[Any]) -> bool:
    """Whether a path may be an address of an object store: `DataPath`."""
    return Stored in (*_types_and_metadata(annotation), *metadata)


def _types_and_metadata(annotation: Any) -> Iterator[Any]:
    """The members of a union, or the type itself, and their `Annotated` metadata."""
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        yield from metadata
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _types_and_metadata(part)
    else:
        yield annotation


def kind_of(model: type[pydantic.BaseModel]) -> str | None:
    return model.model_fields["kind"].default if "kind" in model.model_fields else None


def kinds(annotation: Any) -> list[str]:
    return [kind for model in models(annotation) if (kind := kind_of(model))]


def chosen(annotation: Any, data: Any) -> Any:
    """The model in an annotation that has the kind of the data; the first model if none has that kind."""
    found = models(annotation)
    kind = data.get("kind") if isinstance(data, dict) else None
    return next((model for model in found if kind_of(model) == kind), found[0] if found else None)


def fields(model: Any) -> Mapping[str, Any]:
    """Field -> annotation; empty where `model` is no config model."""
    return {name: field.annotation for name, field in model.model_fields.items()} if model in models(model) else {}


def reachable(model: type[pydantic.BaseModel]) -> set[type[pydantic.BaseModel]]:
    """The model, and all models that its fields allow, at any depth."""
    inner = (found for annotation in fields(model).values() for found in models(annotation))
    return {model}.union(*map(reachable, inner))


def field_docs(model: type[pydantic.BaseModel]) -> dict[str, str]:
    """Field -> the docstring below it, in the source of the class or of a base class."""
    docs: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, pydantic.BaseModel) and cls is not pydantic.BaseModel:
            docs |= _docs_below_fields(cls)
    return {field: text for field, text in docs.items() if field in model.model_fields}


@cache  # Python parses the whole file to find the source of a class
def _docs_below_fields(cls: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # pyright: ignore
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[field.target.id] = inspect.cleandoc(str(text.value.value))  # pyright: ignore
    return docs
