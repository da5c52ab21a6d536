"""The textbooks' formulas: bytes that a device sends in a step of a decoder, by the axes that it sends over.

An oracle that shares nothing with the count of the traced step: it knows the layers of a decoder, and no program. A
collective over n devices with a whole buffer of S bytes sends (n-1)/n S a device if it is an all-gather or a
reduce-scatter, and twice that if it is an all-reduce.

XLA's CPU compiler moves collectives out of loops and makes one of two equal ones; `on_cpu` says whether that counts.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass
from fractions import Fraction
from typing import Any

from meshpar.collectives import ring
from meshpar.cost import memory
from meshpar.experiment.config import Precision
from meshpar.experiment.prepare import Prepared
from meshpar.mesh.layout import AXES
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.data import streamed
from meshpar.parallel.pipeline.schedule import Schedule
from meshpar.sharding.resolve import Placement, sharding_axes
from meshpar.tree import flatten_with_paths
from tests.collectives.oracle import bucket_shapes, scatter_sent, sum_sent

Axes = tuple[str, ...]
Traffic = dict[Axes, Fraction]
"""Axes, in the order of the mesh -> bytes that a device sends over them."""
Sums = defaultdict[Axes, Fraction]


@dataclass(frozen=True)
class Widths(memory.Widths):
    """As of memory, and on the way.

    Args:
      declared: of a gradient as a declared `Reduce` sends it, which no compiler widens.
    """

    declared: int = 4


@dataclass(frozen=True)
class Activations:
    """What a decoder's layers pass on, on one device in a whole step.

    Args:
      num_layers: blocks that a device computes.
      tokens: rows of the batch on one device, times the sequence.
      width: the model's.
      recomputed: whether the backward computes a block's residual stream again (any remat policy but `none`).
      with_products: whether it computes the products of activations and weights again, too (`full`).
    """

    num_layers: int
    tokens: int
    width: int
    recomputed: bool
    with_products: bool


@dataclass(frozen=True)
class Stages:
    """What a pipeline adds to a step.

    Args:
      messages: activations and cotangents that a stage sends in a step, on average over the stages.
      num_passes: how often layers are moved to where the schedule wants them, and their gradients back.
      moved: layers that a stage sends on each way, on average.
      tokens: of a microbatch on one device.
      at_both_ends: the parameter that the first and the last stage use; under ZeRO-3 each gathers it for itself.
    """

    messages: Fraction
    num_passes: int
    moved: Fraction
    tokens: int
    at_both_ends: str | None = None


def share(n: int, whole_bytes: int | Fraction) -> Fraction:
    """(n-1)/n S: what a device sends in an all-gather or a reduce-scatter.

    >>> share(8, 800)
    Fraction(700, 1)
    """
    return Fraction(n - 1, n) * whole_bytes


def flops_per_token(matmul_params: int, num_layers: int, seq_len: int, attention_width: int) -> int:
    """Operations that a decoder needs for a token, forward and backward: 6 for each weight, and half of its scores.

    Args:
      matmul_params: weights of the products that a token takes part in: not the embedding table, unless it is tied.
      attention_width: num_heads x head_dim.

    >>> flops_per_token(100, 2, 10, 4)
    1080
    """
    return 6 * matmul_params + 6 * num_layers * seq_len * attention_width


def closed_form(run: Prepared, on_cpu: bool = False) -> Traffic:
    """What a step of a prepared run sends; its optimizer works element by element, and a layer learns.

    Args:
      on_cpu: what XLA:CPU makes of it, as it optimizes by default.
    """
    rows = run.run.data.batch_size // math.prod(run.mesh.shape[axis] for axis in run.ctx.axes("batch"))
    model, tokens = run.run.model, rows * run.run.data.seq_len // run.ctx.shards("seq")
    layers, stages = _in_stages(run, tokens) if run.pipeline else (model.num_layers, None)
    activations = Activations(
        layers, tokens, model.hidden_size, model.remat.policy != "none", model.remat.policy == "full"
    )
    widths = _widths(run.run.precision)
    sent = step_traffic(
        run.placement.sharded, run.ctx, widths, activations, run.ctx.num_passes, on_cpu, stages,
        run.placement.frozen,
    )  # fmt: skip
    if axes := run.ctx.axes("seq"):
        sent[axes] = sent.get(axes, Fraction(0)) + _shared_rows(run, tokens, widths)
    if not run.taught_by:
        return sent
    teacher = run.taught_by.run.model
    ctx = run.teacher.ctx
    spread = tuple(axis for axis in ctx.axes("batch") if axis not in run.ctx.axes("batch"))
    activations = Activations(teacher.num_layers, tokens // _size(ctx, spread), teacher.hidden_size, False, False)
    more = teacher_traffic(run.taught_by.placement.sharded, ctx, widths, activations, tokens)
    if spread:
        more[spread] = share(_size(ctx, spread), tokens * teacher.hidden_size * widths.compute)
    return {axes: sent.get(axes, Fraction(0)) + more.get(axes, Fraction(0)) for axes in sent | more}


def _shared_rows(run: Prepared, tokens: int, widths: Widths) -> Fraction:
    """What attention sends over the axes that share a row, without windows, forward and backward.

    JAX moves out of the loop over layers what is the same in each, the segments that the forward sends.
    """
    model, ctx = run.run.model, run.ctx
    n = ctx.shards("seq")
    of_head = tokens * model.head_size
    keys = 2 * model.kv_heads // ctx.shards("kv_heads") * of_head
    again = model.num_layers * (
        1 + (model.remat.policy == "full" and not model.remat.save)
    )  # passes of layers that send as the forward does
    segments = (n - 1) * 4 * tokens
    if ctx.parallel.context.kind == "ulysses":
        exchanged = (2 * model.num_heads // ctx.shards("heads") * of_head + keys) * widths.compute
        return (model.num_layers + again) * share(n, exchanged) + segments
    sent = (model.num_layers + again) * (n - 1) * keys * widths.compute + (again + 1) * segments
    # The gradients of the keys are scattered, or travel once round the ring.
    hops = n if ctx.parallel.context.kind == "ring" else n - 1
    return sent + model.num_layers * hops * keys * widths.sums


def _widths(precision: Precision) -> Widths:
    """XLA:CPU widens what travels in 16 bits."""
    of = precision.widths
    return Widths(*(max(width, 4) for width in astuple(of)), declared=of.gradients)


def _in_stages(run: Prepared, tokens: int) -> tuple[int, Stages]:
    """Layers that a stage computes, and what the pipeline sends."""
    cut = run.pipeline.cut(run.ctx)
    num_stages = len(cut.layers)
    passes = run.run.num_microbatches
    sent = Fraction(passes * num_messages(run.pipeline.schedule, num_stages), num_stages)
    stored = run.pipeline.parts.stacked_layers // num_stages
    elsewhere = [layer for stage in range(num_stages) for layer in cut.layers[stage].flat if layer // stored != stage]
    moved = Fraction(sum(layer >= 0 for layer in elsewhere) if run.ctx.axes("layers") else 0, num_stages)
    shared = "embedding" if run.run.model.tie_embeddings else None
    per_microbatch = tokens // run.ctx.num_passes
    return cut.layers[0].size, Stages(sent, passes, moved, per_microbatch, shared)


def num_messages(schedule: Schedule, num_stages: int) -> int:
    """Messages of all stages: each microbatch crosses each boundary between parts on two stages, there and back.

    >>> from meshpar.parallel.pipeline.schedule import OneFOneB
    >>> num_messages(OneFOneB(num_microbatches=8), 4)
    48
    """
    route = [schedule.stage_of(k, num_stages) for k in range(num_stages * schedule.chunks_per_stage)]
    return 2 * schedule.num_microbatches * sum(here != there for here, there in itertools.pairwise(route))


def step_traffic(
    sharded: Any,
    ctx: ParallelContext,
    widths: Widths,
    activations: Activations,
    num_microbatches: int = 1,
    on_cpu: bool = True,
    stages: Stages | None = None,
    frozen: Collection[str] = (),
) -> Traffic:
    """All that a step of a decoder sends, if its optimizer works element by element and a layer learns.

    Args:
      sharded: tree of `Placement`, of the parameters, as sharded as the rules can make them.
      on_cpu: whether XLA compiles for CPUs. There it moves ZeRO-3's gather of what lies outside the layers out of the
        loop over microbatches, and gathers once what a collective matmul and its backward gather in one computation.
      stages: of a pipeline. What only the first or the last stage sends counts as if one device sent both.
      frozen: paths of parameters without gradients.
    """
    sent: Sums = defaultdict(Fraction)
    for path, placement in flatten_with_paths(sharded).items():
        by_itself = _is_streamed(path, placement, ctx)
        again = _gathered_again(path, placement, activations, stages is not None)
        if by_itself and activations.with_products and not path.endswith("down.kernel"):
            again += not _merges(_stored(placement, ctx), ctx, on_cpu)
        in_loop = "layers" in placement.spec.dims or not on_cpu or stages is not None
        gathers = (1 + again) * (num_microbatches if in_loop else 1)
        num_users = 1 + (stages is not None and path == stages.at_both_ends)
        _add_gathers(sent, placement, ctx, widths, num_users * gathers, path in frozen)
        if path not in frozen:
            _add_reductions(sent, path, placement, ctx, widths, num_users * num_microbatches, by_itself)
        if stages:
            _add_moves(sent, placement, ctx, widths, stages, on_cpu, path in frozen)
    trained = {path: placement for path, placement in flatten_with_paths(sharded).items() if path not in frozen}
    if ctx.gradient_reduction:
        _add_buckets(sent, trained.values(), ctx, widths.declared)
    embedding_learns = bool({"embedding", "positions"} & trained.keys())
    head_learns = ("head" if "head" in flatten_with_paths(sharded) else "embedding") in trained
    _add_activations(sent, ctx, widths, activations, on_cpu, embedding_learns, head_learns)
    _add_scalars(sent, trained.values(), ctx, widths)
    if stages:
        part = ctx.shards("residual_seq")
        message = Fraction(stages.tokens * activations.width * widths.compute, part)
        sent[ctx.axes("stage")] += stages.messages * message
    return {axes: bytes_ for axes, bytes_ in sent.items() if bytes_}


def teacher_traffic(
    sharded: Any, ctx: ParallelContext, widths: Widths, activations: Activations, tokens: int
) -> Traffic:
    """What distillation adds to a step: the forward of a decoder, and five numbers of each token for its divergence.

    Args:
      sharded: tree of `Placement`, of the teacher's parameters as its rules can shard them.
      ctx: the teacher's; its rules shard the vocabulary as the student's do.
      activations: the teacher's.
      tokens: on one device, of the student.
    """
    sent: Sums = defaultdict(Fraction)
    for placement in flatten_with_paths(sharded).values() if ctx.rules.zero_stage > 1 else ():
        stored = _ordered(axis for dim in placement.spec.dims for axis in ctx.storage(dim))
        n = _size(ctx, stored)
        sent[stored] += share(n, math.prod(placement.local_shape) * n * widths.compute)
    stream = activations.tokens * activations.width * widths.compute
    for dim, times in (("heads", activations.num_layers), ("mlp", activations.num_layers), ("vocab", 1)):
        axes = _ordered(ctx.axes(dim))
        sent[axes] += 2 * times * share(_size(ctx, axes), stream)
    axes = _ordered(ctx.axes("vocab"))
    sent[axes] += 2 * 5 * share(_size(ctx, axes), tokens * widths.sums)
    return {axes: bytes_ for axes, bytes_ in sent.items() if bytes_}


def _add_gathers(
    sent: Sums, placement: Placement, ctx: ParallelContext, widths: Widths, gathers: int, is_frozen: bool
) -> None:
    """Of a parameter that is stored in shards; so many under ZeRO-3. Under ZeRO-1 what was updated is gathered."""
    stored = _stored(placement, ctx)
    n = _size(ctx, stored)
    each = {0: 0, 1: 0 if is_frozen else widths.params, 2: widths.compute, 3: gathers * widths.compute}
    sent[stored] += share(n, math.prod(placement.local_shape) * n * each[ctx.rules.zero_stage])


def _add_reductions(
    sent: Sums,
    path: str,
    placement: Placement,
    ctx: ParallelContext,
    widths: Widths,
    num_microbatches: int,
    by_itself: bool,
) -> None:
    """Of a gradient: over the devices that store a shard, those that hold a copy, and those that share in the whole.

    Args:
      num_microbatches: in which ZeRO-3 scatters it, for each stage that uses it.
    """
    stored, size, m = _stored(placement, ctx), math.prod(placement.local_shape), num_microbatches
    n = _size(ctx, stored)
    times = m if ctx.rules.zero_stage == 3 else bool(ctx.rules.zero_stage)
    if ctx.gradient_reduction:
        _add_scatter(sent, placement, ctx, widths.declared, times)
    else:
        sent[stored] += times * share(n, size * n * widths.gradients)
        copied = _ordered(sum(ctx.copy_axes(placement.spec.dims), ()))
        sent[copied] += 2 * share(_size(ctx, copied), size * widths.gradients)
    users = _users(path, placement, ctx)
    summed = size * widths.gradients if by_itself else size * n * widths.compute
    sent[users] += 2 * m * share(_size(ctx, users), summed)


def _users(path: str, placement: Placement, ctx: ParallelContext) -> Axes:
    """The axes whose devices each use the whole parameter, for heads or channels of their own.

    Their gradients of it are summed in each layer: of key heads that the rules do not shard, and of head norms. What
    is used once the region is left is no such parameter: the last bias.
    """
    region = {"attn": "heads", "mlp": "mlp"}.get(path.split(".")[1] if "." in path else "")
    if region is None or path.endswith(("attn.o.bias", "mlp.down.bias")):
        return ()
    return _ordered(set(ctx.axes(region)) - set(ctx.gradient_axes) - set(sharding_axes([placement])))


def _is_streamed(path: str, placement: Placement, ctx: ParallelContext) -> bool:
    """Whether a parameter is the kernel of a projection that is gathered while it is multiplied.

    It is never whole: if the product is computed again, too, it is gathered a third time.
    """
    dims = tuple(dim for dim in placement.spec.dims if dim != "layers")
    in_layer = "layers" in placement.spec.dims and path.endswith(".kernel")
    return in_layer and bool(streamed(dims, ctx))


def _add_scatter(sent: Sums, placement: Placement, ctx: ParallelContext, width: int, times: int) -> None:
    """A declared reduce-scatter: dim after dim, and layer after layer."""
    dims, sizes = placement.spec.dims, ctx.mesh.shape
    layers = placement.local_shape[dims.index("layers")] if "layers" in dims else 1
    stored = [axes for dim in dims if (axes := ctx.storage(dim))]
    size = math.prod(placement.local_shape) // layers * math.prod(_size(ctx, axes) for axes in stored)
    for axes in reversed(stored):
        for spanned, num_bytes in scatter_sent(ctx.gradient_reduction, size, width, axes, sizes).items():
            sent[spanned] += times * layers * num_bytes
        size //= _size(ctx, axes)


def _add_buckets(sent: Sums, placements: Iterable[Placement], ctx: ParallelContext, width: int) -> None:
    """Declared sums over copies, of those that lie alike together."""
    streams: dict[Any, list[tuple[int, ...]]] = defaultdict(list)
    for one in placements:
        streams[ctx.copy_axes(one.spec.dims), sharding_axes([one])].append(one.local_shape)
    for (axes, _), shapes in streams.items():
        for shape in bucket_shapes(shapes, ctx.gradient_reduction, width) if any(axes) else ():
            for spanned, num_bytes in sum_sent(ctx.gradient_reduction, shape, width, *axes, ctx.mesh.shape).items():
                sent[spanned] += num_bytes


def _add_moves(
    sent: Sums,
    placement: Placement,
    ctx: ParallelContext,
    widths: Widths,
    stages: Stages,
    on_cpu: bool,
    is_frozen: bool,
) -> None:
    """A layer as the step computes with it, and its gradient as it is summed."""
    dims = placement.spec.dims
    if "layers" not in dims or not stages.moved:
        return
    stored = [axis for dim in dims for axis in ctx.storage(dim)]
    in_shards = bool(stored) and ctx.gathers_in_layers
    layer = math.prod(placement.local_shape) // placement.local_shape[dims.index("layers")]
    size = layer * (1 if in_shards else _size(ctx, stored))
    # XLA for CPUs moves out of the loop over the parts of a batch what is the same in each.
    there = (widths.gradients if in_shards else widths.compute) * (1 if on_cpu else stages.num_passes)
    back = 0 if is_frozen else stages.num_passes * widths.gradients
    sent[ctx.axes("stage")] += stages.moved * size * (there + back)


def _gathered_again(path: str, placement: Placement, of: Activations, in_stages: bool) -> int:
    """How often the backward needs a parameter again under ZeRO-3, which forgets what it gathered.

    Not outside the layers: the backward of a lookup does not need its table, and that of the output projection begins
    where its forward ends. Not what is only added, unless the layer is computed again; and not its last bias even then.
    A stage works the gradient of its weights out apart: if products are kept and their inputs are not, it makes these
    anew, for which it needs the scale of a norm a second time.
    """
    if "layers" not in placement.spec.dims:
        return 0
    if path.endswith(".bias"):
        return of.recomputed and not path.endswith("down.bias")
    makes_inputs = in_stages and of.recomputed and not of.with_products
    return 1 + (makes_inputs and path.endswith(("attn_norm.scale", "mlp_norm.scale")))


def _add_activations(
    sent: Sums,
    ctx: ParallelContext,
    widths: Widths,
    of: Activations,
    on_cpu: bool,
    embedding_learns: bool,
    head_learns: bool,
) -> None:
    """8(t-1)/t X a layer, X = b s d, with sequence parallelism or without; and more for recomputing.

    The backward enters both regions again, and exits the first one again unless its product is saved.


    Embedding and output projection send 2(t-1)/t X each, the cross entropy three numbers for each token, twice. What is
    overlapped sends X once more for each of a layer's two regions and the output projection, if that learns: nothing
    whole is kept for the backward. But it is computed again only if the products are.
    """
    stream_bytes = of.tokens * of.width * widths.compute
    for dim in ("heads", "mlp"):
        axes = _ordered(ctx.axes(dim))
        again = _recomputed(dim, ctx, of, on_cpu)
        sent[axes] += of.num_layers * (4 + again) * share(_size(ctx, axes), stream_bytes)
    axes = _ordered(ctx.axes("vocab"))
    # The gradient of what is looked up comes back only to who learns, and only a scattered one has to travel.
    passes = 4 if embedding_learns or not ctx.axes("residual_seq") else 3
    stream_bytes *= passes + (head_learns and ctx.overlaps("vocab") and not _merges(axes, ctx, on_cpu))
    sent[axes] += share(_size(ctx, axes), stream_bytes + 2 * 3 * of.tokens * widths.sums)


def _recomputed(dim: str, ctx: ParallelContext, of: Activations, on_cpu: bool) -> int:
    """How often the backward of a region sends the residual stream beside its transposes."""
    if ctx.overlaps(dim):
        merged = _merges(ctx.axes(dim), ctx, on_cpu)
        return 1 + of.with_products * ((2 if dim == "heads" else 1) - merged)
    enters, exits = (1, 1) if ctx.axes("residual_seq") else (0, 2)
    return of.recomputed * enters + of.with_products * (dim == "heads") * exits


def _add_scalars(sent: Sums, placements: Iterable[Placement], ctx: ParallelContext, widths: Widths) -> None:
    """The loss and the number of tokens; the squares of the gradient's norm."""
    batch, sharding = _ordered(ctx.axes("batch") + ctx.axes("seq") + ctx.axes("stage")), sharding_axes(placements)
    sent[batch] += 2 * share(_size(ctx, batch), widths.sums + 4)
    sent[sharding] += 2 * share(_size(ctx, sharding), widths.sums)


def _merges(axes: Axes, ctx: ParallelContext, on_cpu: bool) -> bool:
    """Whether the compiler makes one of two equal gathers: barriers are nothing to XLA's CPU compiler, loops are."""
    return on_cpu and _size(ctx, axes) <= ring.UNROLLED


def _stored(placement: Placement, ctx: ParallelContext) -> Axes:
    return _ordered(axis for dim in placement.spec.dims for axis in ctx.storage(dim))


def _ordered(axes: Iterable[str]) -> Axes:
    given = set(axes)
    return tuple(axis for axis in AXES if axis in given)


def _size(ctx: ParallelContext, axes: Iterable[str]) -> int:
    return math.prod(ctx.mesh.shape[axis] for axis in axes)
