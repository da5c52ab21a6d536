"""The closed forms: bytes that a device sends in one step of the manual lowering.

They count what `parallel.data` and `parallel.tensor` say; the tests hold compiled programs to them, exactly.
A collective over n devices with a whole buffer of S bytes sends (n-1)/n S a device if it is an all-gather or a
reduce-scatter, and twice that if it is an all-reduce.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from meshpar.parallel.data import summed_axes
from meshpar.sharding.constrain import Lowering
from meshpar.sharding.resolve import Placement, sharding_axes
from meshpar.tree import flatten_with_paths

SCALAR_BYTES = 4


def share(n: int, whole_bytes: int | Fraction) -> Fraction:
    """(n-1)/n S: what a device sends in an all-gather or a reduce-scatter.

    >>> share(8, 800)
    Fraction(700, 1)
    """
    return Fraction(n - 1, n) * whole_bytes


def parameter_bytes(sharded: Any, how: Lowering, num_microbatches: int = 1) -> Fraction:
    """Gathers of parameters and reductions of gradients: 2(n-1)/n P, or 3(n-1)/n P under ZeRO-3.

    ZeRO-3 sends 2(n-1)/n of what lies outside the scanned layers: the backward of a table of embeddings does not
    need it, and that of the output projection begins where its forward ends. (XLA moves their gather out of the
    loop over microbatches, too.)

    Args:
      sharded: tree of `Placement`, as sharded as the rules can make them.
    """
    arrays = flatten_with_paths(sharded)
    return sum((_one(placement, how, num_microbatches) for placement in arrays.values()), Fraction(0))


def _one(placement: Placement, how: Lowering, num_microbatches: int) -> Fraction:
    n = _size(how, (axis for dim in placement.spec.dims for axis in how.storage(dim)))
    copies = placement.copies(summed_axes(how))
    passes = 2
    if how.rules.zero_stage == 3:
        passes = 3 * num_microbatches if "layers" in placement.spec.dims else 1 + num_microbatches
    return passes * share(n, placement.local_bytes * n) + 2 * share(copies, placement.local_bytes)


def tensor_bytes(how: Lowering, num_layers: int, rows: int, seq: int, width: int, itemsize: int) -> Fraction:
    """Activations of a decoder: 8(t-1)/t X for each layer, X = b s d, with sequence parallelism or without.

    Embedding and output projection send 2(t-1)/t X each, the cross entropy three numbers for each token, twice.

    Args:
      rows: b, rows of the batch on one device.
      itemsize: bytes of an activation's element.
    """
    t = _size(how, how.axes("vocab"))
    tokens = rows * seq
    return (8 * num_layers + 4) * share(t, tokens * width * itemsize) + 2 * share(t, 3 * tokens * max(itemsize, 4))


def scalar_bytes(sharded: Any, how: Lowering) -> Fraction:
    """The loss, the number of tokens, and the squares of the gradient's norm."""
    norm = 2 * share(_size(how, sharding_axes(flatten_with_paths(sharded).values())), SCALAR_BYTES)
    return 2 * share(_size(how, how.axes("batch")), 2 * SCALAR_BYTES) + norm


def _size(how: Lowering, axes: Any) -> int:
    return math.prod(how.mesh.shape[axis] for axis in axes)
