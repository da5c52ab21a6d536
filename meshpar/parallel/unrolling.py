"""Whether a program computes its layers in a loop."""

from __future__ import annotations

UNROLLED_WEIGHTS = 2**17
UNROLLED_LAYERS = 16


def is_unrolled(platform: str | None, weights: int, num_layers: int, recomputes: bool) -> bool:
    """Whether a step is faster without a loop over layers.

    On CPUs a loop copies the parameters of each layer and keeps XLA from fusing layers. The loop stays if layers are so
    small that it costs little, if they are so many that compiling takes long, and with remat, because layers without a
    loop need a tenth more memory. On GPUs and TPUs a loop reads parameters in place, and its program stays small.

    Args:
      weights: of a layer.
      recomputes: whether the backward recomputes activations.
    """
    is_worth_it = weights >= UNROLLED_WEIGHTS and num_layers <= UNROLLED_LAYERS
    return platform == "cpu" and is_worth_it and not recomputes
