"""From an encoded picture and its class to a row: the whole center for evaluations, random parts for the training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from meshpar.config import Config, default
from meshpar.data.images.decode import Box, Size, cropped, opened
from meshpar.data.images.shards import PictureShards
from meshpar.data.rows.source import CorruptRow, Row

TRIES = 10
"""Random parts that are tried, of which one must fit into the picture; otherwise it is the center."""


class Augment(Config):
    """How the pictures of a training vary. The random numbers follow from the seed, the epoch and the row."""

    crop_area: tuple[float, float] = default((0.08, 1.0))
    """The part of a picture's area that is kept, drawn between these two."""
    crop_ratio: tuple[float, float] = default((3 / 4, 4 / 3))
    """The proportions of the cropped part, relative to `size`, drawn between these two."""
    flip: float = Field(default=0.5, ge=0, le=1)
    """The fraction of pictures that are mirrored, left to right."""
    mixup: float | None = Field(default=None, gt=0)
    """Adds another picture and its class with a weight drawn from Beta(mixup, mixup)."""
    cutmix: float | None = Field(default=None, gt=0)
    """Replaces a rectangle by that of another picture, its area drawn from Beta(cutmix, cutmix). With `mixup`, each is
    done to half of the rows."""

    @field_validator("crop_area", "crop_ratio")
    @classmethod
    def _are_bounds(cls, bounds: tuple[float, float]) -> tuple[float, float]:
        if not 0 < bounds[0] <= bounds[1]:
            raise ValueError(f"{list(bounds)} are no bounds: the first must be above 0, and the second no less")
        return bounds

    @field_validator("crop_area")
    @classmethod
    def _are_parts(cls, bounds: tuple[float, float]) -> tuple[float, float]:
        if bounds[1] > 1:
            raise ValueError(f"{bounds[1]} is more than the whole picture, 1")
        return bounds

    @property
    def mixes(self) -> bool:
        return self.mixup is not None or self.cutmix is not None


@dataclass(frozen=True)
class CenterCrop:
    """Makes the row of an evaluation: the center of the picture, and nothing at random.

    Args:
      size: height and width.
      channels: 3 for red, green and blue, 1 for gray.
      dtype: float32 for numbers from 0 to 1, uint8 for 0 to 255.
      center: the part of the largest centered rectangle, of the proportions of `size`, by its edges.
      num_classes: the label becomes a weight for each class, float32[num_classes]; None for the number of the class.
      mean, std: of each channel, by which numbers from 0 to 1 are normalized; None for 0 and 1.
    """

    size: Size
    channels: int
    dtype: str
    center: float
    num_classes: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __call__(self, row: Row, draw: np.random.Generator) -> Row:
        picture = opened(row["picture"])
        box = central(picture.size, self.size[1] / self.size[0], self.center)
        return self.made(cropped(picture, box, self.size, self.channels), self.weights(row["label"]))

    def made(self, image: np.ndarray, label: Any) -> Row:
        """The row of an image uint8[height, width, channels]."""
        if self.dtype == "float32":
            image = np.divide(image, np.float32(255), dtype=np.float32)
            image = image if self.mean is None else image - np.array(self.mean, np.float32)
            image = image if self.std is None else image / np.array(self.std, np.float32)
        return {"image": image, "label": label}

    def weights(self, label: int) -> Any:
        if self.num_classes is None:
            return np.int32(label)
        return np.eye(1, self.num_classes, label, dtype=np.float32)[0]


@dataclass(frozen=True)
class Varied:
    """Makes a row of the training: a random part of the picture, perhaps mirrored, perhaps mixed with another.

    Args:
      whole: what does not vary.
      augment: what does.
      pictures: of which others are drawn to mix.
      chosen: int[n], those that are trained on; None for all.
    """

    whole: CenterCrop
    augment: Augment
    pictures: PictureShards
    chosen: np.ndarray | None = None

    def __call__(self, row: Row, draw: np.random.Generator) -> Row:
        image, label = self._part(row, draw)
        if self.augment.mixes:
            image, label = self._mixed(image, label, draw)
        return self.whole.made(image, label)

    def _part(self, row: Row, draw: np.random.Generator) -> tuple[np.ndarray, Any]:
        picture = opened(row["picture"])
        box = random_part(picture.size, self.augment.crop_area, self.augment.crop_ratio, self.whole.size, draw)
        image = cropped(picture, box, self.whole.size, self.whole.channels)
        if draw.random() < self.augment.flip:
            image = image[:, ::-1]
        return image, self.whole.weights(row["label"])

    def _mixed(self, image: np.ndarray, label: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The image and another; so too their labels."""
        mixup, cutmix = self.augment.mixup, self.augment.cutmix
        cuts = mixup is None or (cutmix is not None and draw.random() < 0.5)
        alpha: Any = cutmix if cuts else mixup
        kept = draw.beta(alpha, alpha)
        other, other_label = self._other(draw)
        if cuts:
            image, kept = _pasted(image, other, kept, draw)
        else:
            image = np.rint(image * kept + other * (1 - kept)).astype(np.uint8)
        return image, (label * kept + other_label * (1 - kept)).astype(np.float32)

    def _other(self, draw: np.random.Generator) -> tuple[np.ndarray, Any]:
        """Another picture of the training, and its label."""
        rows = self.pictures if self.chosen is None else self.chosen
        at = int(draw.integers(len(rows)))
        index = at if self.chosen is None else int(self.chosen[at])
        try:
            return self._part(self.pictures[index], draw)
        except CorruptRow as error:
            raise CorruptRow(f"the other picture, {self.pictures.where(index)}: {error}") from None


def central(picture: tuple[int, int], ratio: float, part: float) -> Box:
    """The largest centered rectangle with a ratio of width to height, reduced to a part of its edges.

    >>> central((400, 200), 1.0, 0.5)
    (150.0, 50.0, 250.0, 150.0)
    """
    width, height = picture
    w = min(width, height * ratio) * part
    h = min(height, width / ratio) * part
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def random_part(
    picture: tuple[int, int],
    area: tuple[float, float],
    ratio: tuple[float, float],
    size: Size,
    draw: np.random.Generator,
) -> Box:
    """A rectangle within a picture, of random area and proportions (Szegedy et al. 2014, arXiv:1409.4842).

    Args:
      picture: width and height.
      area: bounds of its area, as a part of the picture's.
      ratio: bounds of its width divided by its height, relative to the proportions of `size`.
    """  # fmt: skip
    width, height = picture
    wanted = size[1] / size[0]
    for _ in range(TRIES):
        of_area = width * height * draw.uniform(*area)
        of_ratio = wanted * math.exp(draw.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = math.sqrt(of_area * of_ratio), math.sqrt(of_area / of_ratio)
        if w <= width and h <= height:
            x, y = draw.uniform(0, width - w), draw.uniform(0, height - h)
            return x, y, x + w, y + h
    return central(picture, wanted, 1.0)


def _pasted(image: np.ndarray, other: np.ndarray, kept: float, draw: np.random.Generator) -> tuple[np.ndarray, float]:
    """The image with a rectangle of another, and the part of its pixels that it kept."""
    height, width = image.shape[:2]
    h, w = (round(edge * math.sqrt(1 - kept)) for edge in (height, width))
    y, x = int(draw.integers(height - h + 1)), int(draw.integers(width - w + 1))
    image = image.copy()
    image[y : y + h, x : x + w] = other[y : y + h, x : x + w]
    return image, 1 - h * w / (height * width)
