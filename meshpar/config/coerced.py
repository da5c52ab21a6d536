"""The types of fields that plain data may set, as type checkers see them.

`Coerced[T, S]` is a field that is read as T and set from T or S: `Config` converts S. At runtime it is T alone.

>>> Coerced[tuple[str, ...], list[str]]
typing.Annotated[tuple[str, ...], list[str]]
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")

if TYPE_CHECKING:

    class Coerced(Generic[T, S]):
        """A descriptor: the types of `value` in `__set__` are those that type checkers accept in a constructor."""

        def __get__(self, config: Any, owner: type) -> T: ...
        def __set__(self, config: Any, value: T | S) -> None: ...
else:
    Coerced = Annotated

Section = Coerced[T, dict[str, Any]]
"""A config, or the mapping of its keys."""
Strings = Coerced[tuple[str, ...], list[str]]
FilePath = Coerced[Path, str]
PathText = Coerced[str, Path]


class Stored:
    """Marks a path of data or of a run to read, which may be an address of an object store: see `meshpar.store`."""


if TYPE_CHECKING:
    DataPath = Coerced[str, Path]
    RunPath = Coerced[Path | None, str]
else:
    DataPath = Annotated[str, Path, Stored]
    RunPath = Annotated[Path | None, str, Stored]


def default(value: Any) -> Any:
    """Returns the default of a `Coerced` field as `Any`: type checkers would compare its type with the descriptor's."""
    return value
