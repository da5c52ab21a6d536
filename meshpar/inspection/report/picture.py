"""How an array lies on the mesh, drawn: a cell for each part, and in it the devices that hold it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

import numpy as np

from meshpar.sharding.resolve import Placement
from meshpar.tree import human_bytes


@dataclass(frozen=True)
class Picture:
    """A placement as a grid. Devices are numbered as the mesh counts them, last axis fastest.

    Of more than two sharded dims, all but the last are laid along the rows.
    """

    path: str
    placement: Placement

    @property
    def cells(self) -> np.ndarray:
        """Lists of device numbers, [rows, columns]."""
        mesh, rows, columns = self.placement.mesh, self._axes(self._rows), self._axes(self._columns)
        names = list(mesh.shape)
        numbers = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
        rest = [a for a in names if a not in rows + columns]
        ordered = numbers.transpose([names.index(a) for a in [*rows, *columns, *rest]])
        return ordered.reshape(self._count(rows), self._count(columns), -1)

    def text(self) -> str:
        """The picture for a terminal."""
        cells = [[" ".join(map(str, _few(cell))) for cell in row] for row in self.cells]
        width = max(len(cell) for row in cells for cell in row) + 2
        left = self._label(self._rows)
        pad = " " * len(left)
        rule = lambda a, b, c: pad + a + b.join(["─" * width] * len(cells[0])) + c
        lines = [f"{pad} {self._label(self._columns)}".rstrip(), rule("┌", "┬", "┐")]
        for i, row in enumerate(cells):
            side = left if i == 0 else pad
            lines += [rule("├", "┼", "┤")] * (i > 0) + [f"{side}│" + "│".join(f"{c:^{width}}" for c in row) + "│"]
        return "\n".join([*lines, rule("└", "┴", "┘"), self._caption()])

    def svg(self, top: int = 0) -> tuple[str, int, int]:
        """The picture as SVG elements from `top` down; the width and height that it takes."""
        cells, width, height, left = self.cells, 150, 46, 170
        rows, columns = cells.shape[:2]
        parts = [_text(10, top + 22, f"{self.path}  {self.placement.spec}", "bold")]
        parts += [_text(left, top + 52, self._label(self._columns)), _text(10, top + 98, self._label(self._rows))]
        for r in range(rows):
            for c in range(columns):
                x, y = left + c * width, top + 70 + r * height
                hue = 360 * (r * columns + c) // (rows * columns)
                fill = f"hsl({hue},55%,86%)"
                parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="#333"/>')
                parts.append(_text(x + 10, y + 28, "devices " + " ".join(map(str, _few(cells[r, c])))))
        parts.append(_text(10, top + 70 + rows * height + 28, self._caption()))
        return "".join(parts), max(left + columns * width + 20, 640), 70 + rows * height + 50

    @property
    def _sharded(self) -> list[int]:
        return [i for i, axes in enumerate(self.placement.axes) if axes]

    @property
    def _rows(self) -> list[int]:
        return self._sharded[:-1]

    @property
    def _columns(self) -> list[int]:
        return self._sharded[-1:]

    def _axes(self, dims: list[int]) -> list[str]:
        return [axis for i in dims for axis in self.placement.axes[i]]

    def _count(self, axes: list[str]) -> int:
        return math.prod(self.placement.mesh.shape[a] for a in axes)

    def _label(self, dims: list[int]) -> str:
        named = (f"{self.placement.spec.dims[i]} → {', '.join(self.placement.axes[i])}" for i in dims)
        return "  ".join(named) + " " * bool(dims)

    def _caption(self) -> str:
        shape = ", ".join(map(str, self.placement.local_shape))
        copies = self.cells.shape[2]
        held = f"each part is held by {copies} devices" if copies > 1 else "each part is held by one device"
        return f"a part: {self.placement.spec.dtype}[{shape}], {human_bytes(self.placement.local_bytes)}; {held}"


def stacked(pictures: Iterable[Picture]) -> str:
    """Pictures below each other, as a self-contained SVG document."""
    body, width, height = "", 0, 0
    for picture in pictures:
        drawn, its_width, its_height = picture.svg(height)
        body, width, height = body + drawn, max(width, its_width), height + its_height
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">{body}</svg>\n'


def _few(devices: np.ndarray) -> list[str]:
    """The device numbers, shortened in the middle where they are many."""
    names = [str(d) for d in devices]
    return names if len(names) <= 8 else [*names[:4], "…", *names[-2:]]


def _text(x: int, y: int, text: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-family="monospace" font-size="13" font-weight="{weight}">{escape(text)}</text>'
