"""Maps parameters to the tensors of another library's checkpoint: their names and their layout, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Foreign:
    """A tensor of the other checkpoint, a matrix or a vector, that holds one or several of our parameters.

    Args:
      parts: paths of our parameters; their outputs are concatenated.
      inputs: the number of leading dims of a parameter, without `layers`, that are inputs; the others are outputs. 0
        for a vector.
      outputs_first: whether the tensor is `[out, in]`, as in PyTorch's Linear, instead of `[in, out]`.
    """

    parts: tuple[str, ...]
    inputs: int
    outputs_first: bool = False

    def shape(self, shapes: dict[str, Shape]) -> Shape:
        """The tensor's shape, from the shapes of its parts without `layers`.

        >>> linear("q", "k").shape({"q": (8, 2, 4), "k": (8, 1, 4)})
        (12, 8)
        """
        size_in = math.prod(shapes[self.parts[0]][: self.inputs])
        size_out = sum(math.prod(shapes[part][self.inputs :]) for part in self.parts)
        if not self.inputs:
            return (size_out,)
        return (size_out, size_in) if self.outputs_first else (size_in, size_out)


Names = dict[str, Foreign]
"""Name of a tensor, with `*` for the number of the layer -> its parameters."""


def linear(*parts: str, inputs: int = 1) -> Foreign:
    """A matrix `[out, in]`."""
    return Foreign(parts, inputs, outputs_first=True)


def rows(*parts: str, inputs: int = 1) -> Foreign:
    """A matrix `[in, out]`, such as an embedding, or GPT-2's Conv1D."""
    return Foreign(parts, inputs)


def vector(*parts: str) -> Foreign:
    """A vector `[out]`."""
    return Foreign(parts, inputs=0)
