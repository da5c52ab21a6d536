"""ArrayRecord files: each record is a document, or a `tf.train.Example` with one, as TensorFlow Datasets writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshpar.data.corpus import AtPath, TextCorpus
from meshpar.data.encode import Content
from meshpar.data.file_ranges import FileRange
from meshpar.data.files import cut_off
from meshpar.data.reading import read_each
from meshpar.data.with_grain import array_records
from meshpar.errors import nearest

GLOB = "**/*.array_record*"


class ArrayRecord(AtPath, TextCorpus):
    """ArrayRecord files. Each record has a document: text, or a list of token ids.

    >>> ArrayRecord(path="corpus").glob
    '**/*.array_record*'
    """

    kind: Literal["array_record"] = "array_record"
    glob: str = GLOB
    feature: str | None = "text"
    """The feature of `tf.train.Example` that contains the document; null if the record is the text."""

    def units(self, path: Path) -> int:
        try:
            return len(source(path))
        except ValueError:  # which reading it reports
            return 1

    def read(self, part: FileRange) -> Iterator[Content]:
        for where, _, content in read_each(_records(part), lambda read: self._content(read())):
            yield Content(where, content)

    def _content(self, stored: bytes) -> str | np.ndarray:
        """Raises ValueError(what is wrong), or ValueError(what is wrong, fix)."""
        if self.feature is None:
            return stored.decode("utf-8", "surrogateescape")
        try:
            values = features(stored)
        except ValueError as error:
            raise ValueError(*error.args, "data.feature=null, if the record is the text") from None
        if self.feature not in values:
            near = nearest(self.feature, values)
            fix = f"data.feature={near}?" if near else f"it has {', '.join(sorted(values))}"
            raise ValueError(f"has no feature {self.feature!r}", fix)
        content = values[self.feature]
        if len(content) == 1 and isinstance(content[0], bytes):
            return content[0].decode("utf-8", "surrogateescape")
        if all(isinstance(i, int) for i in content):
            return np.array(content, np.int64)
        raise ValueError(f"its feature {self.feature!r} is neither a text nor a list of token ids")


def _records(part: FileRange) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(place, what reads it) of each record; of a file that is not whole one, which raises its error."""
    for path in part.files:
        try:
            records = source(path)
        except ValueError:
            yield str(path), partial(source, path)
            continue
        for row in range(len(records))[part.start : part.stop]:
            yield f"{path}, row {row}", partial(record, records, row)


def source(path: Path) -> Any:
    """The records of a file, by index.

    Raises:
      ValueError: (what is wrong, fix), it is not whole.
    """
    try:
        return _source(path)
    except (RuntimeError, ValueError) as error:
        raise cut_off(f"is no whole ArrayRecord file ({str(error).partition(';')[0] or 'it has no end'})") from None


def record(records: Any, row: int) -> bytes:
    """Raises ValueError if the record is damaged."""
    try:
        return records[row]
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"it cannot be read: {str(error).partition(';')[0] or 'it is damaged'}") from None


def features(example: bytes) -> Mapping[str, list[Any]]:
    """Name -> values of the features of a `tf.train.Example`.

    Raises:
      ValueError: the record is something else.
    """
    try:
        entries = _example().FromString(example).features.feature
    except Exception:  # DecodeError of protobuf, which differs between its implementations
        raise ValueError("it is no tf.train.Example") from None
    lists = ("bytes_list", "float_list", "int64_list")  # of which one has values
    return {entry.key: [x for name in lists for x in getattr(entry.value, name).value] for entry in entries}


_source = lru_cache(64)(array_records)


EXAMPLE = """
name: "meshpar/example.proto" package: "meshpar.tf" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: "BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: "FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: "Int64List" oneof_index: 0 }
}
message_type {
  name: "Features"
  nested_type {
    name: "Entry"
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Feature" }
  }
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Entry" }
}
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
"""
"""The message `tf.train.Example`, whose schema TensorFlow publishes as example.proto and feature.proto."""


@lru_cache(1)
def _example() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("meshpar.tf.Example"))
