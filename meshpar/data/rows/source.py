"""What a user's function may return as rows, under two protocols: rows by index, and rows in a stream."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshpar.errors import DataError

Row = Mapping[str, Any]
"""Name -> array, or a number."""


class CorruptRow(DataError):
    """The content of a row is damaged; a run may leave it out."""


@dataclass(frozen=True)
class Indexed:
    """Rows by index, which a run shuffles, and where it resumes at once.

    Args:
      name: of the source, for errors.
      items: has `__getitem__`; and, if a row has a place of its own, such as a file, `where(index)`.
      length: the number of rows.
      blocks: int64[n + 1]. Rows from each of these to the next are read together, as of a row group in Parquet, so that
        they are also shuffled together with those of few other blocks. None for rows that are read one by one.
    """

    name: str
    items: Any
    length: int
    blocks: np.ndarray | None = None

    def where(self, index: int) -> str:
        """Names a row for messages."""
        find = getattr(self.items, "where", None)
        return str(find(int(index))) if callable(find) else f"{self.name}, row {index}"

    def row(self, index: int) -> Row:
        """The row of this index, or a DataError that names the row."""
        where = self.where(index)
        try:
            item = self.items[int(index)]
        except CorruptRow:
            raise
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        except Exception as error:
            raise DataError(f"{where} cannot be read: {_said(error)}") from error
        return as_row(item, where)


@dataclass(frozen=True)
class Stream:
    """Rows of an iterator, in its own order. A run that resumes reads the rows before once more, and drops them.

    Args:
      name: of the source, for errors.
      start: returns a new iterator, at the first row.
    """

    name: str
    start: Callable[[], Iterator[Any]]

    def rows(self) -> Iterator[Row]:
        """All rows, once."""
        index = 0
        iterator = self.start()
        while True:
            where = f"{self.name}, row {index}"
            try:
                item = next(iterator)
            except StopIteration:
                return
            except DataError as error:
                raise DataError(f"{where}: {error}") from None
            except Exception as error:
                raise DataError(f"{where} cannot be read: {_said(error)}") from error
            yield as_row(item, where)
            index += 1


@dataclass(frozen=True)
class Columns:
    """A mapping of arrays as rows."""

    arrays: Mapping[str, Any]

    def __getitem__(self, index: int) -> Row:
        return {name: x[index] for name, x in self.arrays.items()}


Source = Indexed | Stream


def as_source(make: Callable[[], Any], name: str) -> Source:
    """The rows that `make` returns.

    Args:
      make: is called again for each pass over a stream.
      name: of the source, for errors.

    Raises:
      DataError: `make` returns something else, no rows, or an endless data set.
    """
    rows = make()
    if isinstance(rows, Mapping):
        return Indexed(name, Columns(rows), _length_of_columns(rows, name))
    if hasattr(rows, "with_format") and hasattr(rows, "features"):  # Hugging Face `datasets`
        rows = rows.with_format("numpy")
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
        length = len(rows)
        if length == 0:
            raise DataError(f"{name} has no rows")
        if length == sys.maxsize:
            raise DataError(f"{name} repeats its rows without end: leave out repeat(), since each epoch repeats them")
        return Indexed(name, rows, length)
    if hasattr(rows, "__iter__"):
        first = iter(rows)

        def start() -> Iterator[Any]:
            nonlocal first
            iterator, first = first, None  # pyright: ignore
            return iter(make()) if iterator is None else iterator

        return Stream(name, start)
    what = f"{name} returned {type(rows).__name__}, which has no rows"
    fix = "a Grain or Hugging Face data set, a mapping of arrays, __len__ with __getitem__, or an iterator"
    raise DataError(f"{what}; return {fix}")


def as_row(item: Any, where: str) -> Row:
    """A row with the names of nested mappings joined by dots.

    Raises:
      DataError: it is no mapping of names to arrays.
    """
    if item is None:
        raise DataError(f"{where} is None: a filtered data set has no rows by index; use its to_iter_dataset()")
    if not isinstance(item, Mapping) or not all(isinstance(name, str) for name in item):
        kind = type(item).__name__
        raise DataError(f"{where} is a {kind}, not a mapping of names to arrays; return {{'image': x, 'label': y}}")
    row: dict[str, Any] = {}
    for name, value in item.items():
        if isinstance(value, Mapping):
            row.update({f"{name}.{inner}": x for inner, x in as_row(value, where).items()})
        else:
            row[name] = value
    return row


def _length_of_columns(columns: Mapping[str, Any], name: str) -> int:
    counts = {key: len(x) if np.ndim(x) else 0 for key, x in columns.items()}
    if len({*counts.values()}) != 1 or not min(counts.values(), default=0):
        listed = ", ".join(f"{key} has {count}" for key, count in counts.items()) or "there are none"
        raise DataError(f"{name}: its arrays need the same number of rows as their first dims: {listed}")
    return next(iter(counts.values()))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
