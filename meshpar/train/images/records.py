"""Pictures in ArrayRecord files of `tf.train.Example`, as TensorFlow Datasets writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshpar.errors import DataError
from meshpar.train.data import grain_alone
from meshpar.train.images.files import cut_off, integer
from meshpar.train.rows.source import CorruptRow

GLOB = "**/*.array_record*"


@dataclass(frozen=True)
class Records:
    """The pictures of an ArrayRecord file.

    Args:
      image, label: the names of the features.
    """

    path: Path
    length: int
    image: str
    label: str
    blocks: None = None

    @property
    def signature(self) -> bytes:
        return f"{self.path.name} {self.length}".encode()

    def read(self, row: int) -> tuple[bytes, int]:
        try:
            record = _source(self.path)[row]
        except (RuntimeError, ValueError) as error:
            raise CorruptRow(f"it cannot be read: {str(error).partition(';')[0] or 'it is damaged'}") from None
        found = features(record)
        for key, name in {"image_field": self.image, "label_field": self.label}.items():
            if len(found.get(name, ())) != 1:
                raise DataError(f"it has no feature {name!r}\n    data.{key} is one of {', '.join(sorted(found))}")
        picture = found[self.image][0]
        if not isinstance(picture, bytes):
            raise DataError(f"its feature {self.image!r} is {picture!r}, not the bytes of a picture")
        return picture, integer(found[self.label][0])

    def where(self, row: int) -> str:
        return f"{self.path}, row {row}"


def open_records(path: Path, image: str, label: str) -> Records:
    """Reads the end of an ArrayRecord file.

    Raises:
      ValueError: see `files.opened`.
    """
    try:
        return Records(path, len(_source(path)), image, label)
    except (RuntimeError, ValueError) as error:
        raise cut_off(f"is no whole ArrayRecord file ({str(error).partition(';')[0] or 'it has no end'})") from None


def features(record: bytes) -> Mapping[str, list[Any]]:
    """Name -> values of the features of a `tf.train.Example`.

    Raises:
      CorruptRow: the record is something else.
    """
    try:
        found = _example().FromString(record).features.feature
    except Exception:  # DecodeError of protobuf, which differs between its implementations
        raise CorruptRow("it is no tf.train.Example") from None
    return {name: [x for kind in KINDS for x in getattr(one, f"{kind}_list").value] for name, one in found.items()}


KINDS = ("bytes", "float", "int64")


@lru_cache(64)
def _source(path: Path) -> Any:
    return grain_alone.load().sources.ArrayRecordDataSource([str(path)])


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
