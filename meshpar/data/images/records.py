"""Pictures in ArrayRecord files of `tf.train.Example`, as TensorFlow Datasets writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshpar.data.array_record import features, record, source
from meshpar.data.images.files import integer
from meshpar.data.images.shards import PictureShard
from meshpar.data.rows.source import CorruptRow
from meshpar.errors import DataError


@dataclass(frozen=True)
class Records(PictureShard):
    """The pictures of an ArrayRecord file.

    Args:
      image, label: the names of the features.
    """

    image: str
    label: str

    @property
    def length(self) -> int:
        return len(source(self.path))

    @property
    def signature(self) -> bytes:
        return f"{self.path.name} {self.length}".encode()

    def read(self, row: int) -> tuple[bytes, int]:
        try:
            values = features(record(source(self.path), row))
        except ValueError as error:
            raise CorruptRow(*error.args[:1]) from None
        for key, name in {"image_field": self.image, "label_field": self.label}.items():
            if len(values.get(name, ())) != 1:
                raise DataError(f"it has no feature {name!r}\n    data.{key} is one of {', '.join(sorted(values))}")
        picture = values[self.image][0]
        if not isinstance(picture, bytes):
            raise DataError(f"its feature {self.image!r} is {picture!r}, not the bytes of a picture")
        return picture, integer(values[self.label][0])


def open_records(path: Path, image: str, label: str) -> Records:
    """Reads the end of an ArrayRecord file.

    Raises:
      ValueError: see `files.opened`.
    """
    source(path)
    return Records(path, image, label)
