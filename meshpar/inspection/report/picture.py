"""Draws how an array is sharded: a cell for each part, with the devices that hold it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

import numpy as np

from meshpar.sharding.resolve import Placement
from meshpar.tree import human_bytes

# Pixels: the margin left of the grid, the width and the height of a cell.
_LEFT = 170
_WIDTH = 150
_HEIGHT = 46


@dataclass(frozen=True)
class Picture:
    """A placement as a grid. Devices are numbered in the order of the mesh, the last axis fastest.

    The last sharded dim runs along the columns, all other sharded dims along the rows.
    """

    path: str
    placement: Placement

    @property
    def cells(self) -> np.ndarray:
        """Device numbers, [rows, columns, devices of a cell]."""
        sizes = self.placement.mesh.shape
        names = list(sizes)
        rows = [axis for dim in self._sharded[:-1] for axis in self.placement.axes[dim]]
        columns = [axis for dim in self._sharded[-1:] for axis in self.placement.axes[dim]]
        rest = [axis for axis in names if axis not in rows + columns]
        numbers = np.arange(self.placement.mesh.size).reshape(tuple(sizes.values()))
        ordered = numbers.transpose([names.index(axis) for axis in [*rows, *columns, *rest]])
        num_rows = math.prod(sizes[axis] for axis in rows)
        return ordered.reshape(num_rows, math.prod(sizes[axis] for axis in columns), -1)

    def text(self) -> str:
        """The picture for a terminal."""
        cells = [[" ".join(_few(cell)) for cell in row] for row in self.cells]
        width = max(len(cell) for row in cells for cell in row) + 2
        above, left = self._labels()
        pad = " " * len(left)
        bars = ["─" * width] * len(cells[0])
        lines = [f"{pad} {above}".rstrip(), f"{pad}┌{'┬'.join(bars)}┐"]
        for i, row in enumerate(cells):
            if i > 0:
                lines.append(f"{pad}├{'┼'.join(bars)}┤")
            lines.append(f"{pad if i else left}│{'│'.join(f'{cell:^{width}}' for cell in row)}│")
        return "\n".join([*lines, f"{pad}└{'┴'.join(bars)}┘", self._caption()])

    def svg(self, top: int = 0) -> tuple[str, int, int]:
        """The picture as SVG elements from `top` down, its width and its height."""
        cells = self.cells
        rows, columns = cells.shape[:2]
        column_label, row_label = self._labels()
        parts = [_text(10, top + 22, f"{self.path}  {self.placement.spec}", "bold")]
        parts += [_text(_LEFT, top + 52, column_label), _text(10, top + 98, row_label)]
        for r in range(rows):
            for c in range(columns):
                x = _LEFT + c * _WIDTH
                y = top + 70 + r * _HEIGHT
                hue = 360 * (r * columns + c) // (rows * columns)
                fill = f"hsl({hue},55%,86%)"
                parts.append(f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" fill="{fill}" stroke="#333"/>')
                parts.append(_text(x + 10, y + 28, "devices " + " ".join(_few(cells[r, c]))))
        parts.append(_text(10, top + 70 + rows * _HEIGHT + 28, self._caption()))
        return "".join(parts), max(_LEFT + columns * _WIDTH + 20, 640), 70 + rows * _HEIGHT + 50

    @property
    def _sharded(self) -> list[int]:
        return [i for i, axes in enumerate(self.placement.axes) if axes]

    def _labels(self) -> tuple[str, str]:
        """The dims along the columns and the dims along the rows, with their axes."""
        names = [f"{self.placement.spec.dims[i]} → {', '.join(self.placement.axes[i])}" for i in self._sharded]
        rows = "  ".join(names[:-1])
        return "".join(f"{name} " for name in names[-1:]), f"{rows} " if rows else ""

    def _caption(self) -> str:
        shape = ", ".join(map(str, self.placement.local_shape))
        copies = self.cells.shape[2]
        held = f"each part is held by {copies} devices" if copies > 1 else "each part is held by one device"
        return f"a part: {self.placement.spec.dtype}[{shape}], {human_bytes(self.placement.local_bytes)}; {held}"


def stacked(pictures: Iterable[Picture]) -> str:
    """Pictures below each other, as one SVG document."""
    body = ""
    width = 0
    height = 0
    for picture in pictures:
        elements, picture_width, picture_height = picture.svg(height)
        body += elements
        width = max(width, picture_width)
        height += picture_height
    paper = '<rect width="100%" height="100%" fill="#ffffff"/>'  # the words are black
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">{paper}{body}</svg>\n'


def _few(devices: np.ndarray) -> list[str]:
    """The device numbers; of more than 8, the first and the last."""
    names = [str(d) for d in devices]
    return names if len(names) <= 8 else [*names[:4], "…", *names[-2:]]


def _text(x: int, y: int, text: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-family="monospace" font-size="13" font-weight="{weight}">{escape(text)}</text>'
