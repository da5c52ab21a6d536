"""The closed forms: bytes that a device sends in one step of the manual lowering, by the axes that it sends over.

They count what `parallel.data` and `parallel.tensor` say; compiled programs are held to them, exactly. A collective
over n devices with a whole buffer of S bytes sends (n-1)/n S a device if it is an all-gather or a reduce-scatter, and
twice that if it is an all-reduce.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from meshpar.mesh.layout import AXES
from meshpar.parallel.buckets import bucket_shapes
from meshpar.parallel.data import copies, summed_axes
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
      declared: of a gradient as a declared `Reduce` sends it, which no compiler widens.
    """

    params: int
    compute: int
    gradients: int
    sums: int
    declared: int = 4


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
    frozen: Collection[str] = (),
) -> Traffic:
    """All that a step of a decoder sends, if its optimizer works element by element and a layer learns.

    Args:
      sharded: tree of `Placement`, of the parameters, as sharded as the rules can make them.
      hoists: whether the compiler moves ZeRO-3's gather of what lies outside the layers out of the loop over
        microbatches, as XLA does for CPUs.
      frozen: paths of parameters without gradients.
    """
    sent: Sums = defaultdict(Fraction)
    for path, placement in flatten_with_paths(sharded).items():
        again = _is_gathered_again(path, placement, activations.recomputed)
        in_loop = "layers" in placement.spec.dims or not hoists
        gathers = (1 + again) * (num_microbatches if in_loop else 1)
        _add_gathers(sent, placement, how, widths, gathers, path in frozen)
        if path not in frozen:
            _add_reductions(sent, path, placement, how, widths, num_microbatches)
    trained = {path: placement for path, placement in flatten_with_paths(sharded).items() if path not in frozen}
    if how.reduce:
        _add_buckets(sent, trained.values(), how, widths.declared)
    _add_activations(sent, how, widths, activations, embedding_learns=bool({"table", "positions"} & trained.keys()))
    _add_scalars(sent, trained.values(), how, widths)
    return {axes: bytes_ for axes, bytes_ in sent.items() if bytes_}


def teacher_traffic(sharded: Any, how: Lowering, widths: Widths, activations: Activations) -> Traffic:
    """What distillation adds to a step: the forward of a decoder, and five numbers of each token for its divergence.

    Args:
      sharded: tree of `Placement`, of the teacher's parameters as its rules can shard them.
      how: the teacher's; its rules shard the vocabulary as the student's do.
      activations: the teacher's.
    """
    sent: Sums = defaultdict(Fraction)
    for placement in flatten_with_paths(sharded).values() if how.rules.zero_stage > 1 else ():
        stored = _ordered(axis for dim in placement.spec.dims for axis in how.storage(dim))
        n = _size(how, stored)
        sent[stored] += share(n, math.prod(placement.local_shape) * n * widths.compute)
    stream = activations.tokens * activations.width * widths.compute
    for dim, times in (("heads", activations.num_layers), ("mlp", activations.num_layers), ("vocab", 1)):
        axes = _ordered(how.axes(dim))
        sent[axes] += 2 * times * share(_size(how, axes), stream)
    axes = _ordered(how.axes("vocab"))
    sent[axes] += 2 * 5 * share(_size(how, axes), activations.tokens * widths.sums)
    return {axes: bytes_ for axes, bytes_ in sent.items() if bytes_}


def _add_gathers(
    sent: Sums, placement: Placement, how: Lowering, widths: Widths, gathers: int, is_frozen: bool
) -> None:
    """Of a parameter that is stored in shards; so many under ZeRO-3. Under ZeRO-1 what was updated is gathered."""
    stored, whole = _stored(placement, how)
    each = {0: 0, 1: 0 if is_frozen else widths.params, 2: widths.compute, 3: gathers * widths.compute}
    sent[stored] += share(_size(how, stored), whole * each[how.rules.zero_stage])


def _add_reductions(
    sent: Sums, path: str, placement: Placement, how: Lowering, widths: Widths, num_microbatches: int
) -> None:
    """Of a gradient: over the devices that store a shard, those that hold a copy, and those that share in the whole."""
    (stored, whole), m = _stored(placement, how), num_microbatches
    times = m if how.rules.zero_stage == 3 else bool(how.rules.zero_stage)
    if how.reduce:
        _add_scatter(sent, placement, how, widths.declared, times)
    else:
        sent[stored] += times * share(_size(how, stored), whole * widths.gradients)
        copied = _ordered(sum(copies(placement.spec.dims, how), ()))
        sent[copied] += 2 * share(_size(how, copied), math.prod(placement.local_shape) * widths.gradients)
    users = _users(path, placement, how)
    sent[users] += 2 * m * share(_size(how, users), whole * widths.compute)


def _stored(placement: Placement, how: Lowering) -> tuple[Axes, int]:
    """The axes over which a parameter is stored, and the elements of what is gathered over them."""
    stored = _ordered(axis for dim in placement.spec.dims for axis in how.storage(dim))
    return stored, math.prod(placement.local_shape) * _size(how, stored)


def _users(path: str, placement: Placement, how: Lowering) -> Axes:
    """The axes whose devices each use the whole parameter, for heads or channels of their own.

    Their gradients of it are summed in each layer: of key heads that the rules do not shard, and of head norms. What
    is used once the region is left is no such parameter: the last bias.
    """
    region = {"attn": "heads", "mlp": "mlp"}.get(path.split(".")[1] if "." in path else "")
    if region is None or path.endswith(("attn.o.bias", "mlp.down.bias")):
        return ()
    return _ordered(set(how.axes(region)) - set(summed_axes(how)) - set(sharding_axes([placement])))


def _add_scatter(sent: Sums, placement: Placement, how: Lowering, width: int, times: int) -> None:
    """A declared reduce-scatter: dim after dim, and layer after layer."""
    dims, sizes = placement.spec.dims, how.mesh.shape
    layers = placement.local_shape[dims.index("layers")] if "layers" in dims else 1
    stored = [axes for dim in dims if (axes := how.storage(dim))]
    size = math.prod(placement.local_shape) // layers * math.prod(_size(how, axes) for axes in stored)
    for axes in reversed(stored):
        for spanned, num_bytes in how.reduce.scatter_sent(size, width, axes, sizes).items():
            sent[spanned] += times * layers * num_bytes
        size //= _size(how, axes)


def _add_buckets(sent: Sums, placements: Iterable[Placement], how: Lowering, width: int) -> None:
    """Declared sums over copies, of those that lie alike together."""
    streams: dict[Any, list[tuple[int, ...]]] = defaultdict(list)
    for one in placements:
        streams[copies(one.spec.dims, how), sharding_axes([one])].append(one.local_shape)
    for (axes, _), shapes in streams.items():
        for shape in bucket_shapes(shapes, how.reduce, width) if any(axes) else ():
            for spanned, num_bytes in how.reduce.sum_sent(shape, width, *axes, how.mesh.shape).items():
                sent[spanned] += num_bytes


def _is_gathered_again(path: str, placement: Placement, recomputed: bool) -> bool:
    """Whether the backward needs a parameter again under ZeRO-3, which forgets what it gathered.

    Not outside the layers: the backward of a lookup does not need its table, and that of the output projection begins
    where its forward ends. Not what is only added, unless the layer is computed again; and not its last bias even then.
    """
    if "layers" not in placement.spec.dims:
        return False
    return not path.endswith(".bias") or (recomputed and not path.endswith("down.bias"))


def _add_activations(sent: Sums, how: Lowering, widths: Widths, of: Activations, embedding_learns: bool) -> None:
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
    # The gradient of what is looked up comes back only to who learns, and only a scattered one has to travel.
    passes = 4 if embedding_learns or not scattered else 3
    sent[axes] += share(_size(how, axes), passes * stream + 2 * 3 * of.tokens * widths.sums)


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
