"""How a model's parameters are called, and how they lie, in a checkpoint that another library wrote: as data."""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Foreign:
    """One tensor of such a checkpoint, a matrix or a vector, that holds one of our parameters or several.

    Args:
      parts: paths of parameters, their outputs one after the other.
      inputs: how many of a parameter's dims, `layers` aside, are inputs; the others are outputs. 0 for a vector.
      outputs_first: whether it is `[out, in]`, as PyTorch's Linear has it, and not `[in, out]`.
    """

    parts: tuple[str, ...]
    inputs: int
    outputs_first: bool = False

    def shape(self, shapes: dict[str, Shape]) -> Shape:
        """Its shape, from those of its parts without `layers`.

        >>> linear("q", "k").shape({"q": (8, 2, 4), "k": (8, 1, 4)})
        (12, 8)
        """
        size_in = math.prod(shapes[self.parts[0]][: self.inputs])
        size_out = sum(math.prod(shapes[part][self.inputs :]) for part in self.parts)
        if not self.inputs:
            return (size_out,)
        return (size_out, size_in) if self.outputs_first else (size_in, size_out)


Names = dict[str, Foreign]
"""Name of a tensor, with `*` for the number of the layer -> what it holds."""


def linear(*parts: str, inputs: int = 1) -> Foreign:
    """`[out, in]`."""
    return Foreign(parts, inputs, outputs_first=True)


def rows(*parts: str, inputs: int = 1) -> Foreign:
    """`[in, out]`, as a table of embeddings has it, and GPT-2's Conv1D."""
    return Foreign(parts, inputs)


def vector(*parts: str) -> Foreign:
    """`[out]`."""
    return Foreign(parts, inputs=0)
