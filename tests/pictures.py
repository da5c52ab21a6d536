"""The same pictures in every format that a run can read."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from tests.sources import field

CLASSES = ("bars", "dots", "rings")
NUM = 30
"""Pictures, a third of each class."""


def pictures(num: int = NUM, seed: int = 0, size: int = 24) -> list[tuple[bytes, int]]:
    """(encoded picture, class): PNGs of several shapes, ordered by their class."""
    draw = np.random.default_rng(seed)
    found = []
    for i in range(num):
        label = i * len(CLASSES) // num
        pixels = draw.integers(0, 255, (size + i % 3, size + i % 5, 3), dtype=np.uint8) // 2
        pixels[..., label] += 100
        found.append((encoded(pixels), label))
    return found


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write_folders(folder: Path, found: list[tuple[bytes, int]]) -> Path:
    for i, (picture, label) in enumerate(found):
        (folder / CLASSES[label]).mkdir(parents=True, exist_ok=True)
        (folder / CLASSES[label] / f"{i:03}.png").write_bytes(picture)
    return folder


def write_parquet(folder: Path, found: list[tuple[bytes, int]], rows_of_group: int = 4) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    for part, some in enumerate((found[:17], found[17:])):
        images = [{"bytes": picture, "path": None} for picture, _ in some]
        table = pa.table({"image": images, "label": [label for _, label in some]})
        parquet.write_table(table, folder / f"{part}.parquet", row_group_size=rows_of_group)
    return folder


def write_tars(folder: Path, found: list[tuple[bytes, int]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, some in enumerate((range(17), range(17, len(found)))):
        with tarfile.open(folder / f"{part}.tar", "w") as tar:
            for i in some:
                picture, label = found[i]
                for suffix, content in {"cls": str(label).encode(), "json": b"{}", "png": picture}.items():
                    member = tarfile.TarInfo(f"a/{i:03}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return folder


def write_records(folder: Path, found: list[tuple[bytes, int]]) -> Path:
    from array_record.python.array_record_module import ArrayRecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    for part, some in enumerate((found[:17], found[17:])):
        writer = ArrayRecordWriter(str(folder / f"{part}.array_record"), "group_size:1")
        for picture, label in some:
            writer.write(example(picture, label))
        writer.close()
    return folder


WRITERS = {
    "folders": write_folders,
    "parquet": write_parquet,
    "webdataset": write_tars,
    "array_record": write_records,
}


def example(picture: bytes, label: int) -> bytes:
    """A `tf.train.Example` in the wire format of protocol buffers, byte by byte."""
    image = field(1, b"image") + field(2, field(1, field(1, picture)))
    number = field(1, b"label") + field(2, field(3, field(1, bytes([label]))))
    return field(1, field(1, image) + field(1, number))
