"""Writes handwritten digits as PNG files, a folder for each class: `python digits_pictures.py`. Needs scikit-learn."""

from pathlib import Path

import numpy as np


def write(folder: Path) -> None:
    """Scikit-learn's 1,797 digits, 8 x 8 pixels: the last 397 are held out."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for i, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / ("train" if i < 1400 else "held_out") / str(label) / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype(np.uint8)).save(path)


if __name__ == "__main__":
    write(Path("runs/digits"))
