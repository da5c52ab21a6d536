"""The textbooks' formulas for the bytes that a device sends in a step of a decoder, by axes.

The oracle shares nothing with the count of the traced step: it knows the layers of a decoder, but no program. An
all-gather or a reduce-scatter of a whole buffer of S bytes over n devices sends (n-1)/n S from each device, and an
all-reduce twice that.

XLA's CPU compiler moves collectives out of loops and merges equal ones; `on_cpu` asks for the bytes after that.
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
    """The widths of memory, and of what is sent.

    Args:
      declared: bytes of a gradient's element in a declared `Reduce`, which no compiler widens.
    """

    declared: int = 4


@dataclass(frozen=True)
class Activations:
    """The activations of a decoder's layers, on one device in a whole step.

    Args:
      num_layers: blocks that a device computes.
      tokens: rows of the batch on one device, times the sequence.
      width: the model's hidden size.
      recomputed: whether the backward computes a block's residual stream again (any remat policy but `none`).
      with_products: whether it also computes the products of activations and weights again (`full`).
    """

    num_layers: int
    tokens: int
    width: int
    recomputed: bool
    with_products: bool


@dataclass(frozen=True)
class Stages:
    """The communication that a pipeline adds to a step.

    Args:
      messages: activations and cotangents that a stage sends in a step, on average over the stages.
      num_passes: how often layers are moved to the stages of the schedule, and their gradients back.
      moved: layers that a stage sends in each direction, on average.
      tokens: tokens of a microbatch on one device.
      at_both_ends: the parameter that the first and the last stage use; under ZeRO-3 each of them gathers it.
    """

    messages: Fraction
    num_passes: int
    moved: Fraction
    tokens: int
    at_both_ends: str | None = None


def share(n: int, whole_bytes: int | Fraction) -> Fraction:
    """(n-1)/n S, the bytes that a device sends in an all-gather or a reduce-scatter.

    >>> share(8, 800)
    Fraction(700, 1)
    """
    return Fraction(n - 1, n) * whole_bytes


def flops_per_token(matmul_params: int, num_layers: int, seq_len: int, attention_width: int) -> int:
    """FLOPs that a decoder needs for a token, forward and backward: 6 for each weight, and those of half the scores.

    Args:
      matmul_params: weights that multiply a token: the embedding table only if it is tied.
      attention_width: num_heads x head_dim.

    >>> flops_per_token(100, 2, 10, 4)
    1080
    """
    return 6 * matmul_params + 6 * num_layers * seq_len * attention_width


def closed_form(run: Prepared, on_cpu: bool = False) -> Traffic:
    """The bytes that a step of a prepared run sends, if its optimizer is elementwise and a layer is trained.

    Args:
      on_cpu: the bytes after XLA:CPU's default optimizations.
    """
    rows = run.run.data.batch_size // math.prod(run.mesh.shape[axis] for axis in run.ctx.axes("batch"))
    model = run.run.model
    tokens = rows * run.run.data.seq_len // run.ctx.shards("seq")
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
        sent[axes] = sent.get(axes, Fraction(0)) + _shared_rows(run, layers, tokens, widths)
    if not run.taught_by:
        return sent
    teacher = run.taught_by.run.model
    ctx = run.added[0].ctx
    spread = tuple(axis for axis in ctx.axes("batch") if axis not in run.ctx.axes("batch"))
    activations = Activations(teacher.num_layers, tokens // _size(ctx, spread), teacher.hidden_size, False, False)
    more = teacher_traffic(run.taught_by.placement.sharded, ctx, widths, activations, tokens)
    if spread:
        more[spread] = share(_size(ctx, spread), tokens * teacher.hidden_size * widths.compute)
    return {axes: sent.get(axes, Fraction(0)) + more.get(axes, Fraction(0)) for axes in sent | more}


def _shared_rows(run: Prepared, layers: int, tokens: int, widths: Widths) -> Fraction:
    """The bytes that attention sends over the axes that share a row, forward and backward, without windows.

    Segments travel with the keys. Those that devices gather for exchanged heads are the same in all layers, so JAX
    moves that communication out of the loop over layers.
    """
    model = run.run.model
    ctx = run.ctx
    context = ctx.parallel.attention
    n = ctx.shards("seq")
    g = n if context.kind == "ulysses" else context.group or 1  # devices that exchange tokens for heads
    k = n // g  # shards whose keys meet
    of_head = tokens * model.head_size
    keys = 2 * model.kv_heads // ctx.shards("kv_heads") * of_head
    is_repeated = model.remat.policy == "full" and not model.remat.save
    passes = layers * (2 + is_repeated)  # of layers that send as the forward does
    exchanged = (2 * model.num_heads // ctx.shards("heads") * of_head + keys) * widths.compute
    sent = passes * share(g, exchanged) + (g - 1) * 4 * tokens
    sent += passes * (k - 1) * (keys * widths.compute + 4 * g * tokens)
    # The gradients of the keys are scattered, or exchanged in pairs, or travel once round the ring.
    hops = k if context.kind in ("ring", "hybrid") and not run.pipeline else k - 1
    return sent + layers * hops * keys * widths.sums


def _widths(precision: Precision) -> Widths:
    """XLA:CPU widens 16 bits to 32 when it sends them."""
    of = precision.widths
    return Widths(*(max(width, 4) for width in astuple(of)), declared=of.gradients)


def _in_stages(run: Prepared, tokens: int) -> tuple[int, Stages]:
    """The layers that a stage computes, and the communication of the pipeline."""
    cut = run.pipeline.cut(run.ctx)
    num_stages = len(cut.layers)
    passes = run.run.num_microbatches
    sent = Fraction(passes * num_messages(run.pipeline.schedule, num_stages), num_stages)
    stored = run.pipeline.parts.layer_counts().stacked // num_stages
    elsewhere = [layer for stage in range(num_stages) for layer in cut.layers[stage].flat if layer // stored != stage]
    is_moved = run.ctx.axes("layers") and not run.layer_order  # else the state has the schedule's order between steps
    moved = Fraction(sum(layer >= 0 for layer in elsewhere) if is_moved else 0, num_stages)
    shared = "embedding" if run.run.model.tie_embeddings else None
    per_microbatch = tokens // run.ctx.num_passes
    return cut.layers[0].size, Stages(sent, passes, moved, per_microbatch, shared)


def num_messages(schedule: Schedule, num_stages: int) -> int:
    """The messages of all stages: each microbatch crosses each boundary between two stages forward and backward.

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
    """The bytes that a step of a decoder sends, if its optimizer is elementwise and a layer is trained.

    Args:
      sharded: tree of `Placement` of the parameters, sharded over all axes of their rules.
      on_cpu: whether XLA compiles for CPUs. It then moves ZeRO-3's gathers of parameters outside the layers out of the
        loop over microbatches, and gathers once for a collective matmul and its backward in one computation.
      stages: of a pipeline. What only the first and what only the last stage send count as if one device sent both.
      frozen: paths of parameters without gradients.
    """
    sent: Sums = defaultdict(Fraction)
    for path, placement in flatten_with_paths(sharded).items():
        by_itself = _is_streamed(path, placement, ctx)
        again = _gathered_again(path, placement, activations)
        again += stages is not None and _makes_inputs(path, activations, ctx, flatten_with_paths(sharded), frozen)
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
    """The bytes that distillation adds to a step: the teacher's forward, and five numbers a token for the divergence.

    Args:
      sharded: tree of `Placement` of the teacher's parameters, sharded over all axes of its rules.
      ctx: the teacher's, whose rules shard the vocabulary as the student's do.
      activations: the teacher's.
      tokens: the student's tokens on one device.
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
    """The gathers of a parameter stored in shards: `gathers` of them under ZeRO-3, one of the update under ZeRO-1."""
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
    """The sums of a gradient over the devices that store its shards, that hold copies of it, and that use it whole.

    Args:
      num_microbatches: microbatches, times the stages that use the parameter; ZeRO-3 scatters in each.
    """
    stored = _stored(placement, ctx)
    size = math.prod(placement.local_shape)
    m = num_microbatches
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
    """The axes whose devices each use the whole parameter, for their own heads or channels.

    Their gradients are summed in each layer. These are key heads that the rules do not shard, and norms of heads; not
    the last bias, which is added after the region.
    """
    region = {"attn": "heads", "mlp": "mlp"}.get(path.split(".")[1] if "." in path else "")
    if region is None or path.endswith(("attn.o.bias", "mlp.down.bias")):
        return ()
    return _ordered(set(ctx.axes(region)) - set(ctx.gradient_axes) - set(sharding_axes([placement])))


def _is_streamed(path: str, placement: Placement, ctx: ParallelContext) -> bool:
    """Whether a parameter is a projection's kernel that is gathered in chunks while it is multiplied.

    No device ever holds it whole, so it is gathered a third time if the product is computed again.
    """
    is_used = ctx.manual and ctx.parallel.fsdp.in_chunks and ctx.gathers_in_layers
    in_layer = "layers" in placement.spec.dims and path.endswith(".kernel")
    return is_used and in_layer and sum(bool(ctx.storage(dim)) for dim in placement.spec.dims if dim != "layers") == 1


def _add_scatter(sent: Sums, placement: Placement, ctx: ParallelContext, width: int, times: int) -> None:
    """The bytes of a declared reduce-scatter, by dim and by layer."""
    dims = placement.spec.dims
    sizes = ctx.mesh.shape
    layers = placement.local_shape[dims.index("layers")] if "layers" in dims else 1
    stored = [axes for dim in dims if (axes := ctx.storage(dim))]
    size = math.prod(placement.local_shape) // layers * math.prod(_size(ctx, axes) for axes in stored)
    for axes in reversed(stored):
        for spanned, num_bytes in scatter_sent(ctx.gradient_reduction, size, width, axes, sizes).items():
            sent[spanned] += times * layers * num_bytes
        size //= _size(ctx, axes)


def _add_buckets(sent: Sums, placements: Iterable[Placement], ctx: ParallelContext, width: int) -> None:
    """The bytes of declared sums over copies; gradients with the same axes share a stream of buckets."""
    streams: dict[Any, list[tuple[int, ...]]] = defaultdict(list)
    for placement in placements:
        streams[ctx.copy_axes(placement.spec.dims), sharding_axes([placement])].append(placement.local_shape)
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
    """The bytes of layers that move to their stages in the dtype of the computation, and of their gradients back."""
    dims = placement.spec.dims
    if "layers" not in dims or not stages.moved:
        return
    stored = [axis for dim in dims for axis in ctx.storage(dim)]
    in_shards = bool(stored) and ctx.gathers_in_layers
    layer = math.prod(placement.local_shape) // placement.local_shape[dims.index("layers")]
    size = layer * (1 if in_shards else _size(ctx, stored))
    # XLA:CPU moves out of the loop over microbatches what is the same in each.
    there = (widths.gradients if in_shards else widths.compute) * (1 if on_cpu else stages.num_passes)
    back = 0 if is_frozen else stages.num_passes * widths.gradients
    sent[ctx.axes("stage")] += stages.moved * size * (there + back)


def _gathered_again(path: str, placement: Placement, of: Activations) -> int:
    """How often the backward gathers a parameter again under ZeRO-3.

    Parameters outside the layers are not gathered again: the backward of a lookup does not need its table, and the
    backward of the output projection follows its forward. The bias of a norm is needed again because every norm is
    computed again, another bias only if the layer is recomputed, and the last bias not even then.
    """
    if "layers" not in placement.spec.dims:
        return 0
    if path.endswith("_norm.bias"):
        return 1
    if path.endswith(".bias"):
        return of.recomputed and not path.endswith("down.bias")
    return 1


def _makes_inputs(
    path: str, of: Activations, ctx: ParallelContext, paths: Iterable[str], frozen: Collection[str]
) -> bool:
    """Whether the gradients of weights need the scale of a norm once more on a stage, which computes them separately.

    The output of a norm is not held. It is computed again for the products that it is the input of, if one is trained.
    It is held where devices gather it for them and no activation is recomputed, and is there after `full` recomputing.
    """
    part = path.removesuffix("_norm.scale")
    is_held = of.with_products or (not of.recomputed and ctx.shards("residual_seq") > 1)
    is_input = path.endswith(("attn_norm.scale", "mlp_norm.scale"))
    return is_input and not is_held and any(x.startswith(f"{part}.") and x not in frozen for x in paths)


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


    Embedding and output projection send 2(t-1)/t X each, the cross entropy three numbers for each token, twice. With
    overlap, each of a layer's two regions sends X once more, and so does the output projection if it is trained,
    because nothing whole is kept for the backward; but a region is computed again only if the products are.
    """
    stream_bytes = of.tokens * of.width * widths.compute
    for dim in ("heads", "mlp"):
        axes = _ordered(ctx.axes(dim))
        again = _recomputed(dim, ctx, of, on_cpu)
        sent[axes] += of.num_layers * (4 + again) * share(_size(ctx, axes), stream_bytes)
    axes = _ordered(ctx.axes("vocab"))
    # The gradient of a lookup is sent only if the table is trained, or if it is not scattered.
    passes = 4 if embedding_learns or not ctx.axes("residual_seq") else 3
    stream_bytes *= passes + (head_learns and ctx.overlaps("vocab") and not _merges(axes, ctx, on_cpu))
    sent[axes] += share(_size(ctx, axes), stream_bytes + 2 * 3 * of.tokens * widths.sums)


def _recomputed(dim: str, ctx: ParallelContext, of: Activations, on_cpu: bool) -> int:
    """How often the backward of a region sends the residual stream in addition to its transposes."""
    if ctx.overlaps(dim):
        merged = _merges(ctx.axes(dim), ctx, on_cpu)
        return 1 + of.with_products * ((2 if dim == "heads" else 1) - merged)
    enters, exits = (1, 1) if ctx.axes("residual_seq") else (0, 2)
    return of.recomputed * enters + of.with_products * (dim == "heads") * exits


def _add_scalars(sent: Sums, placements: Iterable[Placement], ctx: ParallelContext, widths: Widths) -> None:
    """The bytes of the loss, of the number of tokens, and of the squares of the gradients' norm."""
    batch = _ordered(ctx.axes("batch") + ctx.axes("seq") + ctx.axes("stage"))
    sharding = sharding_axes(placements)
    sent[batch] += 2 * share(_size(ctx, batch), widths.sums + 4)
    sent[sharding] += 2 * share(_size(ctx, sharding), widths.sums)


def _merges(axes: Axes, ctx: ParallelContext, on_cpu: bool) -> bool:
    """Whether the compiler merges two equal gathers: XLA:CPU ignores barriers between them, but not loops."""
    return on_cpu and _size(ctx, axes) <= ring.UNROLLED


def _stored(placement: Placement, ctx: ParallelContext) -> Axes:
    return _ordered(axis for dim in placement.spec.dims for axis in ctx.storage(dim))


def _ordered(axes: Iterable[str]) -> Axes:
    given = set(axes)
    return tuple(axis for axis in AXES if axis in given)


def _size(ctx: ParallelContext, axes: Iterable[str]) -> int:
    return math.prod(ctx.mesh.shape[axis] for axis in axes)
