"""Formats rows of text in columns, each as wide as its widest cell."""

from __future__ import annotations


def table(head: list[str] | None, rows: list[list[str]]) -> str:
    """Rows of left-aligned cells, with two blanks between columns.

    >>> print(table(["over", "bytes"], [["fsdp", "8"], ["tensor", "16"]]))
      over    bytes
      fsdp    8
      tensor  16
    """
    lines = [head, *rows] if head else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in lines)
    return "\n".join(line.rstrip() for line in padded)
