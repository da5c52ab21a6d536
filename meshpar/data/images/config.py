"""The settings of data that are pictures with a class each."""

from __future__ import annotations

import hashlib
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from meshpar.config import DataPath, Positive, Section, default
from meshpar.data import array_record
from meshpar.data import tars as data_tars
from meshpar.data.images import columns, records, tars
from meshpar.data.images.augment import Augment, CenterCrop, Varied
from meshpar.data.images.decode import pillow
from meshpar.data.images.files import opened
from meshpar.data.images.folders import class_names, of_folders
from meshpar.data.images.shards import PictureShard, PictureShards
from meshpar.data.rows.config import RowData
from meshpar.data.rows.dataset import Transform
from meshpar.data.rows.source import Indexed, Source
from meshpar.data.rows.spec import RowSpec
from meshpar.errors import DataError
from meshpar.store import local


class Images(RowData):
    """Pictures with a class each: rows of `image`, [height, width, channels], and `label`. Needs the extra `images`.

    >>> Images(path="pictures/train", held_out_path="pictures/val", size=(224, 224)).format
    'folders'
    """

    held_out_key: ClassVar = "held_out_path"

    kind: Literal["images"] = "images"
    path: DataPath
    """The pictures: a folder, a file unless `format` is `folders`, or an address such as `s3://bucket/pictures`."""
    format: Literal["folders", "parquet", "webdataset", "array_record"] = "folders"
    """`folders`: a file for each picture, a folder for each class. `parquet`: columns. `webdataset`: tar files with
    `0017.jpg` and `0017.cls`. `array_record`: records of `tf.train.Example`."""
    glob: str | None = None
    """The pattern of the files below `path`. Default: that of the format."""
    image_field: str | None = None
    """The column, feature or suffix of the pictures. Default: `image`; in tar files that of any picture."""
    label_field: str | None = None
    """The column, feature or suffix of the labels. Default: `label`; in tar files `cls`."""
    num_classes: Positive | None = None
    """The number of classes, if labels are read from files; mixing needs it."""
    held_out_path: DataPath | None = None
    """The pictures of evaluations. Default: `held_out_fraction` of those at `path`."""
    size: tuple[Positive, Positive]
    """Height and width to which the pictures are resized."""
    channels: Literal[1, 3] = 3
    """3 for red, green and blue; 1 for gray."""
    dtype: Literal["float32", "uint8"] = "float32"
    """Of a row's image: `float32` from 0 to 1, or `uint8` from 0 to 255."""
    mean: tuple[float, ...] | None = None
    """A number for each channel, subtracted from numbers from 0 to 1: `image_mean` of a `preprocessor_config.json`."""
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """A number for each channel, which divides them then: `image_std`."""
    augment: Section[Augment | None] = default(Augment())
    """How the training's pictures vary; null for the center of each, as in evaluations."""
    center: float = Field(default=0.875, gt=0, le=1)
    """The part that is evaluated of the largest centered rectangle with the proportions of `size`, by its edges."""
    skip_corrupt: bool = False
    """Whether pictures that cannot be decoded are left out of losses and metrics, and counted."""

    @model_validator(mode="after")
    def _fits_the_format(self) -> Self:
        names = ("glob", "image_field", "label_field", "num_classes")
        if self.format == "folders" and (given := [name for name in names if getattr(self, name) is not None]):
            raise ValueError(f"{', '.join(given)}: of files with labels, and not of format: folders")
        mixes = self.augment is not None and self.augment.mixes
        if mixes and self.format != "folders" and self.num_classes is None:
            raise ValueError("augment mixes labels, which needs num_classes, the number of classes")
        return self

    @model_validator(mode="after")
    def _normalizes_each_channel(self) -> Self:
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if numbers is not None and self.dtype == "uint8":
                raise ValueError(f"{name}: of numbers from 0 to 1, and not of dtype: uint8")
            if numbers is not None and len(numbers) != self.channels:
                raise ValueError(f"{name}: has {len(numbers)} numbers for {self.channels} channels")
        return self

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes, by their numbers."""
        return class_names(local(self.path))

    @cached_property
    def sources(self) -> tuple[Source, Source | None]:
        source = self._source(self.path)
        if self.held_out_path is None:
            return source, None
        try:
            return source, self._source(self.held_out_path)
        except DataError as error:
            raise DataError(str(error).replace("data.path = ", "data.held_out_path = ")) from None

    @cached_property
    def row_spec(self) -> RowSpec:
        num_classes = self._whole.num_classes
        label = ((), np.dtype("int32")) if num_classes is None else ((num_classes,), np.dtype("float32"))
        return RowSpec({"image": ((*self.size, self.channels), np.dtype(self.dtype)), "label": label})

    def row_transform(self, chosen: np.ndarray | None) -> Transform:
        if self.augment is None:
            return self.held_out_transform
        return Varied(self._whole, self.augment, self._shards(self.sources[0]), chosen)

    @property
    def held_out_transform(self) -> Transform:
        return self._whole

    @property
    def label(self) -> str:
        return f"images {self.path}"

    @property
    def skips_corrupt(self) -> bool:
        return self.skip_corrupt

    def fingerprint(self) -> dict[str, str]:
        """Checksums of the first and last picture, and of names, places and labels of all."""
        digest = hashlib.sha256()
        for shard in self._shards(self.sources[0]).shards:
            digest.update(shard.signature)
        checksums = super().fingerprint() | {f"{self.label}, names and places": digest.hexdigest()[:32]}
        # Without the folder, which may be moved.
        return {name.removeprefix(f"{self.label}, "): value for name, value in checksums.items()}

    @property
    def _whole(self) -> CenterCrop:
        mixes = self.augment is not None and self.augment.mixes
        num_classes = self._num_classes if mixes else None
        return CenterCrop(self.size, self.channels, self.dtype, self.center, num_classes, self.mean, self.std)

    @property
    def _num_classes(self) -> int | None:
        return len(self.classes) if self.format == "folders" else self.num_classes

    def _source(self, path: str) -> Indexed:
        pillow()
        shards = PictureShards(self._files(local(path)), self._num_classes)
        return Indexed(path, shards, len(shards), shards.blocks)

    def _files(self, path: Path) -> tuple[PictureShard, ...]:
        image, label = self.image_field or "image", self.label_field or "label"
        match self.format:
            case "folders":
                return of_folders(path, self.classes)
            case "parquet":
                default, open_file = columns.GLOB, partial(columns.open_table, image=image, label=label)
            case "webdataset":
                fields = {"image": self.image_field, "label": self.label_field or "cls"}
                default, open_file = data_tars.GLOB, partial(tars.open_tar, **fields)
            case "array_record":
                default, open_file = array_record.GLOB, partial(records.open_records, image=image, label=label)
        return opened(path, self.glob or default, default, open_file)

    @staticmethod
    def _shards(source: Any) -> PictureShards:
        return source.items
