"""The base class of all config models, and the integer types that their fields share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePath
from textwrap import indent
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast, dataclass_transform

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import from_json

from meshpar.config.annotations import field_docs, fields, is_path, may_be_stored
from meshpar.config.explaining import explain
from meshpar.config.shorthand import expand, typed
from meshpar.errors import ConfigError, Problems, control_character, excerpt
from meshpar.regular_files import remote, stored

T = TypeVar("T")

LARGEST = 2**31 - 1
"""The largest size or count: JAX's steps, token ids and array indices are 32-bit integers."""

Positive = Annotated[int, pydantic.Field(gt=0, le=LARGEST)]
"""A size, or a count that is at least one."""
Count = Annotated[int, pydantic.Field(ge=0, le=LARGEST)]
"""A count that may be zero."""
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**32)]
"""JAX uses the lower 32 bits of a seed, so larger seeds would repeat the numbers of smaller ones."""
Target = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
"""`package.module:name` of a user's own code; `meshpar.interop.user_code` imports it."""


FIELDS = "\n\nFields:\n"
_PYDANTIC = {*dir(pydantic.BaseModel)} - {"__init__", "model_copy", "model_dump", "model_dump_json", "model_fields"}


@dataclass_transform(kw_only_default=True, field_specifiers=(pydantic.Field, pydantic.PrivateAttr))
class _Documented(type(pydantic.BaseModel)):
    """Makes `help` list the fields of a config, and not what pydantic has in each class."""

    @property
    def __doc__(cls: Any) -> str | None:  # pyright: ignore
        about = vars(cls).get("__doc__")
        if not about or cls is Config:
            return about
        docs = field_docs(cls)
        lines = (
            f"  {_with_default(name, field)}\n{indent(docs.get(name, ''), ' ' * 6)}"
            for name, field in cls.model_fields.items()
        )
        return f"{inspect.cleandoc(about)}{FIELDS}" + "\n".join(lines)

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if name not in _PYDANTIC and not name.startswith("__pydantic")]


def _with_default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return f"{name} (required)"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Config):
        changed = (
            f"{key}={getattr(default, key)!r}" for key in type(default).model_fields if key in default.model_fields_set
        )
        return f"{name} = {type(default).__name__}({', '.join(changed)})"
    return f"{name} = {default!r}"


def without_fields(about: str) -> str:
    """A docstring as it was written."""
    return about.partition(FIELDS)[0]


class Config(pydantic.BaseModel, metaclass=_Documented):
    """The base of everything that a config file can contain: frozen, keyword-only, without unknown keys.

    Python code may pass what a file may contain: a bare value for a mapping, a mapping with its `kind` for a config, a
    list for a tuple, a string for a path. Types are as strict as in a file: a string is not read as a number.
    `model_validate` and `model_validate_json` raise ConfigError, as the constructor does.
    """

    # Pydantic builds a validator at its first use, so importing meshpar stays cheap.
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False, strict=True)

    shorthand: ClassVar[str | None] = None
    """The key that a bare value stands for, where a mapping is expected."""
    shorthand_is_whole: ClassVar[bool] = False
    """Whether a bare value replaces the mapping of a lower layer, and not only that key of it."""
    is_default_kind: ClassVar[bool] = False
    """Whether a mapping without `kind` is of this kind, where several are expected."""
    any_text: ClassVar[tuple[str, ...]] = ()
    """The keys whose texts may contain control characters, because no name, path or line is made of them."""

    supplied: ClassVar[Mapping[str, str]] = {}
    """Required keys that may be missing where another key supplies them."""
    if_missing: ClassVar[Mapping[str, str]] = {}
    """Required key -> how it is set, or supplied, where that is not plain."""

    def __init__(self, /, **data: Any) -> None:
        """Checks the keys as those of a file.

        Raises:
          ConfigError: lists every problem.
        """
        _checked(type(self), data, partial(super().__init__, **data))

    # Within another config, pydantic validates this one itself, and reports all problems at once.
    __init__.__pydantic_base_init__ = True  # pyright: ignore

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """pydantic's `model_validate`, with the errors of the constructor."""
        return _checked(cls, obj, partial(super().model_validate, obj, **options))

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """pydantic's `model_validate_json`, with the errors of the constructor."""
        try:
            data = from_json(json_data)
        except ValueError:
            data = None  # pydantic reports why it is not JSON
        return _checked(cls, data, partial(super().model_validate_json, json_data, **options))

    @pydantic.field_validator("*", mode="after")
    @classmethod
    def _has_plain_texts(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Names and paths go to scripts, logs and terminals, so a character that would command these is refused.

        So is a remote address where a path is expected.
        """
        field = cls.model_fields[str(info.field_name)]
        is_own = field.annotation == dict[str, Any]  # data of the user's own code
        if not is_own and info.field_name not in cls.any_text:
            _check_printable(value)
        is_address = may_be_stored(field.annotation, field.metadata) and stored(str(value))
        if value is not None and is_path(field) and not is_address and (problem := remote(value)):
            raise ValueError("\n".join(problem))
        return value

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_plain_data(cls, data: Any, info: pydantic.ValidationInfo) -> Any:
        data = expand(cls, data)
        if not isinstance(data, dict):
            return data
        known = fields(cls)
        _check_printable([*data, *(value for key, value in data.items() if key not in known)])
        return {key: typed(known.get(key), value, info.mode == "json") for key, value in data.items()}


def _check_printable(value: Any) -> None:
    """Raises ValueError for a text with a control character, at any depth of plain data."""
    if isinstance(value, (str, PurePath)) and (found := control_character(str(value))):
        raise ValueError(f"{excerpt(repr(str(value)))} contains the control character {found}: leave it out")
    if isinstance(value, Mapping):
        _check_printable([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_printable(item)


def _checked(model: type[Config], data: Any, validate: Callable[[], T]) -> T:
    """The result of `validate`, whose errors become one ConfigError that names the class."""
    return check(model, data, validate, model.__name__, model.__name__, {}, Problems())


def check(
    model: type[Config], data: Any, validate: Callable[[], T], name: str, whole: str, sources: Mapping[str, str],
    problems: Problems,
) -> T:  # fmt: skip
    """The result of `validate`.

    Args:
      data: what `validate` validates, for the error.
      name: names the data in the heading of the error.
      whole: names the data where a problem concerns no single key.
      sources: the place of each dotted path, for the error.
      problems: found before, and reported with those of `validate`.

    Raises:
      ConfigError: lists every problem.
    """
    result = None
    try:
        result = validate()
    except pydantic.ValidationError as invalid:
        for where, what, fix in explain(model, expand(model, data), invalid):
            key = where
            while key and key not in sources:  # a missing key has the source of the section around it
                key = key.rpartition(".")[0]
            problems.add(f"{where or whole} ({sources[key]})" if key else where or whole, what, fix)
    problems.raise_any(ConfigError, f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {name}:")
    return cast(T, result)
