"""Measures pictures a second that rows are read at, beside a `DataLoader` of PyTorch on the same files.

    python scripts/bench_images.py [--pictures 1024] [--edge 400] [--size 224] [--rounds 5] [--workers 1]

The files are JPEGs of random shapes, in a folder for each class, in the page cache. Both sides decode by Pillow, crop a
random part, mirror and stack batches of 64; rounds alternate, so that both see the same load, and numbers are medians.
PyTorch's data set is as one writes it: it decodes whole pictures. `reduced` decodes at a smaller scale there too. The
last line is the time that steps of a training wait for their rows, while the devices are busy for `--busy` seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from meshpar import Images
from meshpar.data.images.augment import random_part

BATCH = 64


def write(folder: Path, num: int, edge: int) -> None:
    """Smooth pictures with noise, of which a JPEG has about as many bytes as of a photograph."""
    draw = np.random.default_rng(0)
    for i in range(num):
        coarse = draw.integers(0, 255, (9, 9, 3), dtype=np.uint8)
        shape = (edge + int(draw.integers(edge // 4)), edge)
        pixels = np.asarray(Image.fromarray(coarse).resize(shape, Image.Resampling.BICUBIC))
        noisy = np.clip(pixels + draw.normal(0, 8, pixels.shape), 0, 255).astype(np.uint8)
        (folder / str(i % 4)).mkdir(exist_ok=True)
        Image.fromarray(noisy).save(folder / str(i % 4) / f"{i}.jpg", quality=90)


class Pictures(torch.utils.data.Dataset):
    """The files of a folder, as a data set of PyTorch."""

    def __init__(self, folder: Path, size: int, reduced: bool):
        self.files = sorted(folder.rglob("*.jpg"))
        self.size, self.reduced = size, reduced

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draw = np.random.default_rng(index)
        picture: Any = Image.open(self.files[index])
        width, height = picture.size
        size = (self.size, self.size)
        box = random_part(picture.size, (0.08, 1.0), (3 / 4, 4 / 3), size, draw)
        if self.reduced:
            scale = max(self.size / (box[2] - box[0]), self.size / (box[3] - box[1]))
            picture.draft("RGB", (int(width * scale), int(height * scale)))
        whole = picture.convert("RGB")
        x, y = whole.width / width, whole.height / height
        part = (box[0] * x, box[1] * y, min(box[2] * x, whole.width), min(box[3] * y, whole.height))
        pixels = np.asarray(whole.resize(size, Image.Resampling.BILINEAR, box=part, reducing_gap=2.0))
        if draw.random() < 0.5:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(pixels.astype(np.float32) / 255), int(self.files[index].parent.name)


def rate(batches: Any, num: int) -> float:
    """Pictures a second after the first batch, whose processes start."""
    next(batches)
    began = time.perf_counter()
    count = sum(1 for _ in islice(batches, num))
    return count * BATCH / (time.perf_counter() - began)


def of_torch(folder: Path, size: int, workers: int, reduced: bool, num: int) -> float:
    loader = torch.utils.data.DataLoader(Pictures(folder, size, reduced), BATCH, shuffle=True, num_workers=workers)
    return rate(iter(loader), num)


def data(folder: Path, size: int, workers: int) -> Any:
    return Images(path=str(folder), size=(size, size), batch_size=BATCH, workers=workers).datasets(0)[0]


def of_rows(folder: Path, size: int, workers: int, num: int) -> float:
    with closing(data(folder, size, workers).batches()) as batches:
        return rate(batches, num)


def waits(folder: Path, size: int, workers: int, busy: float, num: int) -> float:
    """The part of the time that steps of `busy` seconds wait."""
    waited = 0.0
    with closing(data(folder, size, workers).batches()) as batches:
        next(batches)
        time.sleep(2 * busy)
        began = time.perf_counter()
        for _ in range(num):
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
            time.sleep(busy)
        return waited / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in {"pictures": 1024, "edge": 400, "size": 224, "rounds": 5, "workers": 1, "batches": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--busy", type=float, default=1.0)
    given = parser.parse_args()
    rates: dict[str, list[float]] = {"meshpar": [], "PyTorch": [], "PyTorch, reduced": []}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write(folder, given.pictures, given.edge)
        for _ in range(given.rounds):
            rates["meshpar"].append(of_rows(folder, given.size, given.workers, given.batches))
            rates["PyTorch"].append(of_torch(folder, given.size, given.workers, False, given.batches))
            rates["PyTorch, reduced"].append(of_torch(folder, given.size, given.workers, True, given.batches))
        for name, found in rates.items():
            print(f"{name:17} {statistics.median(found):6.0f} pictures/s with {given.workers} workers")
        waited = waits(folder, given.size, given.workers, given.busy, given.batches)
        print(f"steps of {given.busy} s wait {waited:.1%} of the time")


if __name__ == "__main__":
    main()
