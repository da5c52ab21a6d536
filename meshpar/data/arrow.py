"""Parquet and Arrow files: each value of a column is a document."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from meshpar.data.corpus import AtPath, TextCorpus
from meshpar.data.documents import HEADING, DocumentOffsets, Documents, no_data
from meshpar.data.encode import Content, check_ids
from meshpar.data.file_ranges import FileRange
from meshpar.data.tokenizer import missing_extra
from meshpar.errors import DataError, Problems, nearest

WHOLE = FileRange(())
STATE = "state.json"
SPLITS = "dataset_dict.json"
"""What `datasets` writes beside the files of a data set, and beside its splits."""


class Opened(NamedTuple):
    """A column of a file.

    Args:
      schema: of the whole file.
      arrays: Arrow arrays of the units that were asked for.
      first_row: the number of rows before the arrays.
    """

    schema: Any
    arrays: Iterator[Any]
    first_row: int


class _Column(AtPath, TextCorpus):
    """Files with columns, one of which contains the documents: text, or lists of token ids. Needs the extra `data`."""

    column: str = "text"
    """The column that contains the documents."""

    @abstractmethod
    def open(self, path: Path, start: int = 0, stop: int | None = None) -> Opened:
        """The column of a file, or of the units from `start` to `stop`."""

    def files(self) -> list[Path]:
        files = super().files()
        problems = Problems()
        for path in files:
            with _reading(path, problems):
                if fault := _fault(self.open(path).schema, self.column):
                    problems.add(str(path), *fault)
        problems.raise_any(DataError, HEADING)
        return files

    def read(self, part: FileRange) -> Iterator[Content]:
        problems = Problems()
        for path in part.files:
            row = self.open(path, part.start, part.stop).first_row if part.start else 0
            for values in self._values(path, problems, part):
                if _is_list(values.type):
                    ids, starts, sizes = _lists(values)
                    contents = (ids[start : start + size] for start, size in zip(starts, sizes, strict=True))
                else:
                    contents = values.to_pylist()
                yield from (Content(f"{path}, row {row + i}", content) for i, content in enumerate(contents))
                row += len(values)
        problems.raise_any(DataError, HEADING)

    def _values(self, path: Path, problems: Problems, part: FileRange = WHOLE) -> Iterator[Any]:
        """The arrays of the column, up to the first that has nulls. Offsets and UTF-8 are validated before use."""
        with _reading(path, problems):
            for values in self.open(path, part.start, part.stop).arrays:
                values.validate(full=True)
                nulls = values.null_count or (_is_list(values.type) and values.flatten().null_count)
                if nulls:
                    what = f"its column {self.column!r} has {nulls} null values"
                    problems.add(str(path), what, "remove those rows, or write an empty text")
                    return
                yield values


class Parquet(_Column):
    """Parquet files.

    >>> Parquet(path="corpus", column="content").glob
    '**/*.parquet'
    """

    kind: Literal["parquet"] = "parquet"
    glob: str = "**/*.parquet"

    def open(self, path: Path, start: int = 0, stop: int | None = None) -> Opened:
        parquet = pyarrow("pyarrow.parquet").ParquetFile(path)
        groups = range(parquet.num_row_groups)
        batches = parquet.iter_batches(batch_size=1024, columns=[self.column], row_groups=groups[start:stop])
        first = sum(parquet.metadata.row_group(i).num_rows for i in groups[:start])
        return Opened(parquet.schema_arrow, (batch.column(0) for batch in batches), first)

    def units(self, path: Path) -> int:
        return pyarrow("pyarrow.parquet").ParquetFile(path).num_row_groups


class Arrow(_Column):
    """Arrow files and streams, mapped into memory. Lists of token ids are used without copying them.

    A folder that `save_to_disk` of Hugging Face's `datasets` wrote is one of them.

    >>> Arrow(path="train.arrow", column="input_ids").glob
    '**/*.arrow'
    """

    kind: Literal["arrow"] = "arrow"
    glob: str = "**/*.arrow"

    def open(self, path: Path, start: int = 0, stop: int | None = None) -> Opened:
        schema, batches = _batches(path)
        first = sum(len(batch) for batch in islice(batches, start))
        at = schema.get_field_index(self.column)
        rest = islice(batches, None if stop is None else stop - start)
        return Opened(schema, (batch.column(at) for batch in rest), first)

    def files(self) -> list[Path]:
        """The files; of a data set that Hugging Face's `datasets` wrote, without what it cached beside them."""
        if (self.root / SPLITS).is_file():
            splits = sorted(path.parent.name for path in self.root.glob(f"*/{STATE}"))
            fix = f"data.path={self.root / splits[0]}" if splits else "the folder of one"
            raise no_data(f"data.path = {str(self.root)!r}", f"has several splits: {', '.join(splits)}", fix)
        return [path for path in super().files() if _is_of_data_set(path)]

    def units(self, path: Path) -> int:
        return sum(1 for _ in _batches(path)[1])

    def documents(self) -> Documents:
        files = self.files()
        if not all(_is_list(self.open(path).schema.field(self.column).type) for path in files):
            return super().documents()
        problems = Problems()
        documents: list[DocumentOffsets] = []
        for path in files:
            try:
                for values in self._values(path, problems):
                    lists = _lists(values)
                    check_ids(lists.tokens, self.vocab_size)
                    documents.append(lists)
            except DataError as error:
                problems.add(str(path), f"its column {self.column!r} {error}")
        problems.raise_any(DataError, HEADING)
        return Documents.in_place(documents, self.tokenizer.bos)


def _is_of_data_set(path: Path) -> bool:
    """Whether the data set in the file's folder, if there is one, has this file. Other files there cache others."""
    try:
        state = json.loads(path.with_name(STATE).read_text())
        return any(one["filename"] == path.name for one in state["_data_files"])
    except OSError:
        return True
    except (ValueError, KeyError, TypeError):
        what = f"is no state of a data set of the library datasets, and {path.name} is beside it"
        raise no_data(str(path.with_name(STATE)), what, "move one of the two elsewhere") from None


def _batches(path: Path) -> tuple[Any, Iterator[Any]]:
    """The schema and the batches of an Arrow file or stream, mapped into memory: what is not read is not copied."""
    ipc = pyarrow("pyarrow.ipc")
    memory_map = pyarrow("pyarrow").memory_map
    try:
        reader = ipc.open_file(memory_map(str(path)))
        return reader.schema, map(reader.get_batch, range(reader.num_record_batches))
    except ValueError:  # not a file: perhaps a stream
        reader = ipc.open_stream(memory_map(str(path)))
        return reader.schema, iter(reader)


def pyarrow(module: str) -> Any:
    """Imports pyarrow when a file is read: the rest of the package works without it."""
    try:
        return import_module(module)
    except ImportError:
        raise missing_extra("a Parquet or Arrow file", "pyarrow") from None


@contextmanager
def _reading(path: Path, problems: Problems) -> Iterator[None]:
    """Adds Arrow's errors to the problems of the file."""
    try:
        yield
    except DataError:
        raise
    except (ValueError, OSError, pyarrow("pyarrow").ArrowException) as error:
        problems.add(str(path), f"cannot be read: {str(error).splitlines()[0]}")


def _fault(schema: Any, column: str) -> tuple[str, str] | None:
    """What is wrong with a column, and the fix; None if it is valid."""
    if wrong := wrong_name(schema, "column", column):
        return wrong
    types = pyarrow("pyarrow.types")
    dtype = schema.field(column).type
    value = dtype.value_type if types.is_dictionary(dtype) else dtype
    is_text = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
    if not (is_text or _is_list(dtype)):
        return f"its column {column!r} is {dtype}, neither text nor lists of token ids", ""
    return None


def wrong_name(schema: Any, key: str, column: str) -> tuple[str, str] | None:
    """What is wrong if there is not one column of the name that `data.KEY` is, and the fix; None if there is."""
    num = schema.names.count(column)
    if num > 1:
        return f"has {num} columns named {column!r}", "give each column its own name"
    if num == 1:
        return None
    near = nearest(column, schema.names)
    fix = f"data.{key}={near}? " if near else ""
    return f"has no column {column!r}", f"{fix}It has {', '.join(schema.names)}"


def _is_list(dtype: Any) -> bool:
    types = pyarrow("pyarrow.types")
    lists = types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype)
    return lists and types.is_integer(dtype.value_type)


def _lists(values: Any) -> DocumentOffsets:
    """The lists of an array, without copying them."""
    size = pyarrow("pyarrow.compute").list_value_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    return DocumentOffsets(values.flatten().to_numpy(zero_copy_only=True), np.cumsum(size) - size, size)
