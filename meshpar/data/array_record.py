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
from meshpar.data.reading import parsed
from meshpar.data.with_grain import array_records
from meshpar.errors import nearest

GLOB = "**/*.array_record*"
KINDS = ("bytes", "float", "int64")


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
        for where, _, content in parsed(_records(part), lambda read: self._content(read())):
            yield Content(where, content)

    def _content(self, found: bytes) -> str | np.ndarray:
        """Raises ValueError(what is wrong), or ValueError(what is wrong, fix)."""
        if self.feature is None:
            return found.decode("utf-8", "surrogateescape")
        try:
            values = features(found)
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
            found = source(path)
        except ValueError:
            yield str(path), partial(source, path)
            continue
        for row in range(len(found))[part.start : part.stop]:
            yield f"{path}, row {row}", partial(record, found, row)


def source(path: Path) -> Any:
    """The records of a file, by index.

    Raises:
      ValueError: (what is wrong, fix), it is not whole.
    """
    try:
        return _source(path)
    except (RuntimeError, ValueError) as error:
        raise cut_off(f"is no whole ArrayRecord file ({str(error).partition(';')[0] or 'it has no end'})") from None


def record(found: Any, row: int) -> bytes:
    """Raises ValueError if the record is damaged."""
    try:
        return found[row]
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"it cannot be read: {str(error).partition(';')[0] or 'it is damaged'}") from None


def features(example: bytes) -> Mapping[str, list[Any]]:
    """Name -> values of the features of a `tf.train.Example`.

    Raises:
      ValueError: the record is something else.
    """
    try:
        found = _example().FromString(example).features.feature
    except Exception:  # DecodeError of protobuf, which differs between its implementations
        raise ValueError("it is no tf.train.Example") from None
    return {name: [x for kind in KINDS for x in getattr(one, f"{kind}_list").value] for name, one in found.items()}


_source = lru_cache(64)(array_records)


@lru_cache(1)
def _example() -> Any:
    """The message `tf.train.Example`, whose schema TensorFlow publishes as example.proto and feature.proto."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="meshpar/example.proto", package="meshpar.tf", syntax="proto3")
    of_kinds = {"bytes": kinds.TYPE_BYTES, "float": kinds.TYPE_FLOAT, "int64": kinds.TYPE_INT64}
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(of_kinds.items(), 1):
        values = file.message_type.add(name=f"{name.title()}List")
        values.field.add(name="value", number=1, label=kinds.LABEL_REPEATED, type=kind)
        feature.field.add(name=f"{name}_list", number=number, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_MESSAGE,
                          type_name=f".meshpar.tf.{name.title()}List", oneof_index=0)  # fmt: skip
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_STRING)
    entry.field.add(name="value", number=2, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_MESSAGE,
                    type_name=".meshpar.tf.Feature")  # fmt: skip
    features.field.add(name="feature", number=1, label=kinds.LABEL_REPEATED, type=kinds.TYPE_MESSAGE,
                       type_name=".meshpar.tf.Features.FeatureEntry")  # fmt: skip
    example = file.message_type.add(name="Example")
    example.field.add(name="features", number=1, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_MESSAGE,
                      type_name=".meshpar.tf.Features")  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("meshpar.tf.Example"))
