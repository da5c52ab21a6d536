"""The closed forms: bytes that a device sends in one step of the manual lowering, by the axes that it sends over.

They count what `parallel.data` and `parallel.tensor` say; compiled programs are held to them, exactly. A collective
over n devices with a whole buffer of S bytes sends (n-1)/n S a device if it is an all-gather or a reduce-scatter, and
twice that if it is an all-reduce.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from meshpar.mesh.layout import AXES
from meshpar.parallel.data import summed_axes
from meshpar.sharding.constrain import Lowering
from meshpar.sharding.resolve import Placement, sharding_axes
from meshpar.tree import flatten_with_paths

Axes = tuple[str, ...]
Traffic = dict[Axes, Fraction]
"""Axes, in the order of the mesh -> bytes that a device sends over them."""
Sums = defaultdict[Axes, Fraction]


@dataclass(frozen=True)
class Widths:
    """Bytes of an element in each of the precisions of a step.

    Args:
      params: of a stored parameter.
      compute: of an activation, and of a parameter as it is gathered.
      gradients: of a gradient as it is reduced.
      sums: of the loss, and of the sums in it: at least 4.
    """

    params: int
    compute: int
    gradients: int
    sums: int


@dataclass(frozen=True)
class Activations:
    """What a decoder's layers pass on, on one device in a whole step.

    Args:
      num_layers: blocks.
      tokens: rows of the batch on one device, times the sequence.
      width: the model's.
      recomputed: whether the backward computes a block's residual stream again (any remat policy but `none`).
    """

    num_layers: int
    tokens: int
    width: int
    recomputed: bool


def share(n: int, whole_bytes: int | Fraction) -> Fraction:
    """(n-1)/n S: what a device sends in an all-gather or a reduce-scatter.

    >>> share(8, 800)
    Fraction(700, 1)
    """
    return Fraction(n - 1, n) * whole_bytes


def step_traffic(
    sharded: Any,
    how: Lowering,
    widths: Widths,
    activations: Activations,
    num_microbatches: int = 1,
    hoists: bool = True,
) -> Traffic:
    """All that a step of a decoder sends, if its optimizer works element by element.

    Args:
      sharded: tree of `Placement`, of the parameters, as sharded as the rules can make them.
      hoists: whether the compiler moves ZeRO-3's gather of what lies outside the layers out of the loop over
        microbatches, as XLA does for CPUs.
    """
    sent: Sums = defaultdict(Fraction)
    for path, placement in flatten_with_paths(sharded).items():
        again = _is_gathered_again(path, placement, activations.recomputed)
        in_loop = "layers" in placement.spec.dims or not hoists
        gathers = (1 + again) * (num_microbatches if in_loop else 1)
        _add_parameter(sent, path, placement, how, widths, num_microbatches, gathers)
    _add_activations(sent, how, widths, activations)
    _add_scalars(sent, flatten_with_paths(sharded).values(), how, widths)
    return {axes: bytes_ for axes, bytes_ in sent.items() if bytes_}


def _add_parameter(
    sent: Sums, path: str, placement: Placement, how: Lowering, widths: Widths, num_microbatches: int, gathers: int
) -> None:
    """Gathers of a parameter (so many under ZeRO-3) and reductions of its gradient: 2(n-1)/n P, or 3(n-1)/n P."""
    size, dims = math.prod(placement.local_shape), placement.spec.dims
    stored = _ordered(axis for dim in dims for axis in how.storage(dim))
    n, m = _size(how, stored), num_microbatches
    gather, scatter = {
        0: (0, 0),
        1: (widths.params, widths.gradients),
        2: (widths.compute, widths.gradients),
        3: (gathers * widths.compute, m * widths.gradients),
    }[how.rules.zero_stage]
    sent[stored] += share(n, size * n * (gather + scatter))
    copies = tuple(a for a in _ordered(summed_axes(how)) if a not in sharding_axes([placement]))
    sent[copies] += 2 * share(_size(how, copies), size * widths.gradients)
    users = _users(path, placement, how)
    sent[users] += 2 * m * share(_size(how, users), size * n * widths.compute)


def _users(path: str, placement: Placement, how: Lowering) -> Axes:
    """The axes whose devices each use the whole parameter, for heads or channels of their own.

    Their gradients of it are summed in each layer: of key heads that the rules do not shard, and of head norms. What
    is used once the region is left is no such parameter: the last bias.
    """
    region = {"attn": "heads", "mlp": "mlp"}.get(path.split(".")[1] if "." in path else "")
    if region is None or path.endswith(("attn.o.bias", "mlp.down.bias")):
        return ()
    return _ordered(set(how.axes(region)) - set(summed_axes(how)) - set(sharding_axes([placement])))


def _is_gathered_again(path: str, placement: Placement, recomputed: bool) -> bool:
    """Whether the backward needs a parameter again under ZeRO-3, which forgets what it gathered.

    Not outside the layers: the backward of a lookup does not need its table, and that of the output projection begins
    where its forward ends. Not what is only added, unless the layer is computed again; and not its last bias even then.
    """
    if "layers" not in placement.spec.dims:
        return False
    return not path.endswith(".bias") or (recomputed and not path.endswith("down.bias"))


def _add_activations(sent: Sums, how: Lowering, widths: Widths, of: Activations) -> None:
    """8(t-1)/t X a layer, X = b s d, with sequence parallelism or without; two more for recomputing, or three.

    Embedding and output projection send 2(t-1)/t X each, the cross entropy three numbers for each token, twice.
    """
    stream = of.tokens * of.width * widths.compute
    scattered = bool(how.axes("norm_seq"))
    for dim in ("heads", "mlp"):
        axes = _ordered(how.axes(dim))
        again = of.recomputed * ((2 if dim == "heads" else 1) if scattered else (2 if dim == "heads" else 0))
        sent[axes] += of.num_layers * (4 + again) * share(_size(how, axes), stream)
    axes = _ordered(how.axes("vocab"))
    sent[axes] += share(_size(how, axes), 4 * stream + 2 * 3 * of.tokens * widths.sums)


def _add_scalars(sent: Sums, placements: Iterable[Placement], how: Lowering, widths: Widths) -> None:
    """The loss and the number of tokens; the squares of the gradient's norm."""
    batch, sharding = _ordered(how.axes("batch")), sharding_axes(placements)
    sent[batch] += 2 * share(_size(how, batch), widths.sums + 4)
    sent[sharding] += 2 * share(_size(how, sharding), widths.sums)


def _ordered(axes: Iterable[str]) -> Axes:
    given = set(axes)
    return tuple(axis for axis in AXES if axis in given)


def _size(how: Lowering, axes: Iterable[str]) -> int:
    return math.prod(how.mesh.shape[axis] for axis in axes)
