"""Parquet and Arrow files: each value of a column is a document."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshpar.errors import DataError, Problems, nearest
from meshpar.train.data.corpus import Texts
from meshpar.train.data.documents import HEADING, Documents
from meshpar.train.data.encode import Content, check_ids
from meshpar.train.data.files import find_or_take
from meshpar.train.data.placed import Placed, placed
from meshpar.train.data.tokenizer import missing_extra


class _Column(Texts):
    """Files with columns, one of which holds the documents: text, or lists of token ids. Needs the extra `data`."""

    path: str
    """A file, or a folder, relative to the working directory."""
    glob: str
    """Which files below the folder."""
    column: str = "text"
    """The column that holds the documents."""

    @abstractmethod
    def open(self, path: Path) -> tuple[Any, Iterator[Any]]:
        """The schema of a file, and its column as one Arrow array after the other."""

    @property
    def root(self) -> Path:
        return Path(self.path)

    def files(self) -> list[Path]:
        files, problems = find_or_take(self.root, self.glob), Problems()
        for path in files:
            with _reading(path, problems):
                schema, _ = self.open(path)
                if fault := _fault(schema, self.column):
                    problems.add(str(path), *fault)
        problems.raise_any(DataError, HEADING)
        return files

    def read(self, files: list[Path]) -> Iterator[Content]:
        problems = Problems()
        for path in files:
            row = 0
            for values in self._values(path, problems):
                contents = _documents(_lists(values)) if _is_list(values.type) else values.to_pylist()
                yield from (Content(f"{path}, row {row + i}", content) for i, content in enumerate(contents))
                row += len(values)
        problems.raise_any(DataError, HEADING)

    def _values(self, path: Path, problems: Problems) -> Iterator[Any]:
        """The column, as far as nothing is missing in it. Offsets and UTF-8 are checked before they are believed."""
        with _reading(path, problems):
            for values in self.open(path)[1]:
                values.validate(full=True)
                nulls = values.null_count or (_is_list(values.type) and values.flatten().null_count)
                if nulls:
                    what = f"its column {self.column!r} holds nothing (null) in {nulls} places"
                    problems.add(str(path), what, "leave those rows out, or write an empty text")
                    return
                yield values


class Parquet(_Column):
    """Parquet files.

    >>> Parquet(path="corpus", column="content").glob
    '**/*.parquet'
    """

    kind: Literal["parquet"] = "parquet"
    glob: str = "**/*.parquet"

    def open(self, path: Path) -> tuple[Any, Iterator[Any]]:
        parquet = _pyarrow("parquet").ParquetFile(path)
        batches = parquet.iter_batches(batch_size=1024, columns=[self.column])
        return parquet.schema_arrow, (batch.column(0) for batch in batches)


class Arrow(_Column):
    """Arrow files, as files or as streams, mapped into memory; lists of token ids stay there.

    >>> Arrow(path="train.arrow", column="input_ids").glob
    '**/*.arrow'
    """

    kind: Literal["arrow"] = "arrow"
    glob: str = "**/*.arrow"

    def open(self, path: Path) -> tuple[Any, Iterator[Any]]:
        pyarrow = _pyarrow("ipc")
        try:
            reader = pyarrow.open_file(_pyarrow().memory_map(str(path)))
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except ValueError:  # then it is a stream, or nothing
            batches = reader = pyarrow.open_stream(_pyarrow().memory_map(str(path)))
        at = reader.schema.get_field_index(self.column)
        return reader.schema, (batch.column(at) for batch in batches)

    def documents(self) -> Documents:
        files, problems = self.files(), Problems()
        if not all(_is_list(self.open(path)[0].field(self.column).type) for path in files):
            return super().documents()
        found: list[Placed] = []
        for path in files:
            try:
                found += [_checked(_lists(values), self.vocab_size) for values in self._values(path, problems)]
            except DataError as error:
                problems.add(str(path), f"its column {self.column!r} {error}")
        problems.raise_any(DataError, HEADING)
        return placed(found, self.tokenizer.bos)


def _pyarrow(module: str = "") -> Any:
    """Imported when a file is read: the rest of the package works without it."""
    from importlib import import_module

    try:
        return import_module(f"pyarrow.{module}".rstrip("."))
    except ImportError:
        raise missing_extra("a Parquet or Arrow file", "pyarrow") from None


@contextmanager
def _reading(path: Path, problems: Problems) -> Iterator[None]:
    """What Arrow cannot read is a problem of the file."""
    try:
        yield
    except DataError:
        raise
    except (ValueError, OSError, _pyarrow().ArrowException) as error:
        problems.add(str(path), f"cannot be read: {str(error).splitlines()[0]}")


def _fault(schema: Any, column: str) -> tuple[str, str] | None:
    """What is wrong with a column, and the fix; None if nothing is."""
    if schema.names.count(column) > 1:
        return f"has {schema.names.count(column)} columns of the name {column!r}", "give each column its own name"
    if column not in schema.names:
        near = nearest(column, schema.names)
        fix = f"data.column={near}? " if near else ""
        return f"has no column {column!r}", f"{fix}It has {', '.join(schema.names)}"
    found = schema.field(column).type
    if not (_is_list(found) or _is_text(found)):
        return f"its column {column!r} is {found}, neither text nor lists of token ids", ""
    return None


def _is_text(found: Any) -> bool:
    types = _pyarrow("types")
    value = found.value_type if types.is_dictionary(found) else found
    return types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)


def _is_list(found: Any) -> bool:
    types = _pyarrow("types")
    lists = types.is_list(found) or types.is_large_list(found) or types.is_fixed_size_list(found)
    return lists and types.is_integer(found.value_type)


def _lists(values: Any) -> Placed:
    """Where the lists of an array lie; nothing is copied."""
    size = _pyarrow("compute").list_value_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    return Placed(values.flatten().to_numpy(zero_copy_only=True), np.cumsum(size) - size, size)


def _documents(lists: Placed) -> Iterator[np.ndarray]:
    return (lists.tokens[start : start + size] for start, size in zip(lists.start, lists.size, strict=True))


def _checked(lists: Placed, vocab_size: int) -> Placed:
    check_ids(lists.tokens, vocab_size)
    return lists
