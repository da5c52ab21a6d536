"""The parallel context of a program: its mesh, rules and strategies, and the role that each mesh axis plays.

It is the only context variable of meshpar. Layers never receive a mesh. They ask the context over which axes a dim is
sharded, and get no axes on one device. Inside the manual lowering's `shard_map`, arrays are local shards and
communication is explicit; under GSPMD, `constrain` pins activations and XLA communicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.collectives.reduction import Reduce
from meshpar.errors import Problems, ShardingError, nearest
from meshpar.mesh.varying import Axes
from meshpar.parallel.local_updates import LocalUpdates
from meshpar.parallel.pipeline.schedule import Schedule
from meshpar.parallel.sequence import SequenceLayout
from meshpar.parallel.strategies import Parallel
from meshpar.sharding.resolve import AnyMesh, live, platform_of
from meshpar.sharding.rules import ACTIVATION_DIMS, AxisRules

Format = Literal["fp8", "int8"]
"""An 8-bit format of numbers, see `parallel.quantized`."""


@dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """A mesh, the rules on it, the strategies, and which of the two lowerings is traced.

    Args:
      manual: whether programs are one `shard_map` over all axes; else GSPMD partitions them.
      parallel: the strategies of the manual lowering.
      compute_dtype: the dtype in which the model computes; None for the dtype of its parameters.
      accum_dtype: the dtype in which gradients are summed over microbatches and devices; None for at least float32.
      num_microbatches: how many parts of a batch are computed one after the other. A pipeline cuts each part again.
      number_format: the 8-bit format in which layers multiply by their weights; None for `compute_dtype`.
      dcn_axes: axes that cross slices.
      slice_axes: axes whose devices train alone, see `in_slice`: values differ over them, and no sum runs over them.
      activation_dims: dims that only activations have, and whose axes may carry the batch; None for `ACTIVATION_DIMS`.
      reads_positions: whether programs read the places of tokens from the batch, so that a row may have them in another
        order.
      strict: whether a partitioned model may move only the activations that a rule or a constraint declares.
      is_planned: whether a program of whole arrays is traced, of which `partition` plans the local shards.

    >>> from meshpar.mesh.layout import MeshLayout
    >>> mesh = MeshLayout(fsdp=4, tensor=2).abstract()
    >>> ctx = ParallelContext(mesh=mesh, rules=AxisRules(preset=("fsdp", "megatron")))
    >>> ctx.axes("heads"), ctx.storage("embed"), ctx.shards("batch")
    (('tensor',), ('fsdp',), 4)
    """

    mesh: AnyMesh
    rules: AxisRules
    manual: bool = False
    parallel: Parallel = field(default_factory=Parallel)
    compute_dtype: Any = None
    accum_dtype: Any = None
    num_microbatches: int = 1
    number_format: Format | None = None
    dcn_axes: Axes = ()
    slice_axes: Axes = ()
    activation_dims: tuple[str, ...] | None = None
    reads_positions: bool = True
    strict: bool = False
    is_planned: bool = False

    @property
    def lowering(self) -> str:
        return "manual" if self.manual else "auto"

    def axes(self, dim: str) -> Axes:
        """The axes over which an activation's dim is partitioned, without axes of size 1."""
        if dim in (self.activation_dims or ()):
            return live(self.mesh, self.rules[dim])
        return live(self.mesh, self.rules.partition_axes(dim))

    def shards(self, dim: str) -> int:
        """The number of parts into which an activation's dim is partitioned."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(dim))

    def storage(self, dim: str) -> Axes:
        """The axes over which a parameter's dim is stored in shards, and gathered before use."""
        return live(self.mesh, self.rules.storage_axes(dim))

    def dispatch(self, dim: str) -> Axes:
        """The axes over which a parameter's dim is sharded, and whose devices send tokens to the shards."""
        return live(self.mesh, self.rules.dispatch_axes(dim))

    def pspec(self, *dims: str | None) -> PartitionSpec:
        """The sharding of a whole activation with these dims. A dim without a name is not sharded."""
        return PartitionSpec(*((dim and self.axes_of_whole(dim)) or None for dim in dims))

    def axes_of_whole(self, dim: str) -> Axes:
        """The axes that shard a dim of a whole activation. A local shard's `residual_seq` is a part of its `seq`."""
        return self.residual_axes if dim == "residual_seq" else self.axes(dim)

    # Roles of axes -----------------------------------------------------------------------------------------------

    @property
    def stage_axes(self) -> Axes:
        """The axes over which a pipeline's stages are placed."""
        return self.axes("stage")

    @property
    def residual_axes(self) -> Axes:
        """The axes over which the sequence of the residual stream is sharded: those of `seq` and of `residual_seq`."""
        return self.axes("seq") + self.axes("residual_seq")

    @property
    def is_local(self) -> bool:
        """Whether code computes local shards, which are the whole arrays on one device."""
        return self.manual or self.mesh.size == 1

    @property
    def row_shards(self) -> int:
        """The number of devices that share a row; 1 under GSPMD, where code has whole rows."""
        return self.shards("seq") if self.manual else 1

    @property
    def sequence(self) -> SequenceLayout:
        """Which tokens of a row each of these devices holds: consecutive ones, if programs count the places."""
        if not self.reads_positions:
            return SequenceLayout(self.row_shards)
        return self.parallel.attention.arranged(self.row_shards)

    @property
    def loss_axes(self) -> Axes:
        """The axes over which the loss is a partial sum: devices hold different tokens, or stages without a loss."""
        return self.axes("batch") + self.axes("seq") + self.stage_axes

    @property
    def gradient_axes(self) -> Axes:
        """The axes over which gradients are partial sums: devices hold different tokens or layers."""
        return self.axes("batch") + self.residual_axes + self.stage_axes

    def copy_axes(self, dims: tuple[str, ...]) -> tuple[Axes, Axes]:
        """The axes over which a parameter's gradient must be all-reduced: inside a slice, and across slices.

        If no axis is declared to cross slices, all axes count as crossing.
        """
        sharded = {axis for dim in dims for axis in live(self.mesh, self.rules[dim])}
        axes = tuple(axis for axis in self.gradient_axes if axis not in sharded)
        across = tuple(axis for axis in axes if not self.dcn_axes or axis in self.dcn_axes)
        return tuple(axis for axis in axes if axis not in across), across

    @property
    def in_slice(self) -> ParallelContext:
        """The context of a slice that trains alone, see `local_updates`; the context itself without local updates.

        Its batch is not sharded over the axis of the slices, so nothing in a slice is summed over that axis.
        """
        if self.local is None:
            return self
        batch = tuple(axis for axis in self.rules["batch"] if axis != self.local.axis)
        rules = AxisRules(preset=self.rules.preset, zero=self.rules.zero, **self.rules.explicit | {"batch": batch})
        return replace(self, rules=rules, slice_axes=(self.local.axis,))

    # Strategies --------------------------------------------------------------------------------------------------

    @property
    def num_passes(self) -> int:
        """The number of microbatches in which the layers compute a batch, those of the pipeline included."""
        return self.num_microbatches * self.parallel.num_microbatches

    @property
    def schedule(self) -> Schedule | None:
        """The pipeline's schedule, in the manual lowering."""
        return self.parallel.pipeline if self.manual else None

    @property
    def gradient_reduction(self) -> Reduce | None:
        """The declared reduction of gradients, in the manual lowering."""
        return self.parallel.gradient_reduction if self.manual else None

    @property
    def local(self) -> LocalUpdates | None:
        """The declared local updates, in the manual lowering."""
        return self.parallel.local if self.manual else None

    @property
    def layer_reduction(self) -> Reduce | None:
        """The declared reduction where a layer scatters gradients; None for XLA's own reduce-scatter.

        A pipeline needs the latter: its stages run different operations at a time, and the permutes of a declared
        algorithm run only when all devices of the mesh run them together.
        """
        return None if self.schedule else self.gradient_reduction

    @property
    def gathers_in_layers(self) -> bool:
        """Whether a layer gathers the parameters that are stored in shards and reduce-scatters their gradients."""
        return self.rules.zero_stage == 3 or (self.rules.zero_stage == 2 and self.num_passes == 1)

    @property
    def reduces_in_loop(self) -> bool:
        """Whether gradients are reduced in each microbatch: manual ZeRO-3 never holds a whole gradient."""
        return self.manual and self.rules.zero_stage == 3

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """Options of XLA for a step; none for GSPMD's program.

        XLA:CPU removes every `optimization_barrier` before it merges equal operations. In layers without a loop it
        would then merge the operations that ZeRO-3 and remat repeat in the backward with those of the forward, and hold
        their results.

        XLA:GPU and XLA:TPU start the first gathers of a layer when the layer needs them. With `prefetch_option` they
        gather the parameters of layer i + 1 while layer i computes, and send the same bytes.

        XLA:GPU copies what a conditional changes, unless it compares the regions in which values live, as XLA:CPU does.
        A pipeline would hold the activations and the sums of its stage twice, and copy all of them in each tick.
        """
        if not self.manual:
            return {}
        platform = platform_of(self.mesh)
        if platform == "cpu":
            return {"xla_disable_hlo_passes": "cse_barrier_expander"}
        early = prefetch_option(platform) if self.parallel.fsdp.overlap == "prefetch" else {}
        return early | IN_PLACE if self.schedule and platform == "gpu" else early

    def overlaps(self, dim: str) -> bool:
        """Whether layers whose weights are sharded in `dim` communicate activations while they multiply."""
        sequence = self.axes("residual_seq")
        return self.parallel.tensor.overlap != "none" and bool(sequence) and sequence == self.axes(dim)


IN_PLACE: dict[str, str | bool] = {"xla_gpu_copy_insertion_use_region_analysis": True}
"""The option by which XLA:GPU overwrites what a conditional changes, as XLA:CPU does."""


def prefetch_option(platform: str | None) -> dict[str, str | bool]:
    """The option that moves gathers of parameters to the previous iteration of a loop; XLA:CPU has none."""
    if platform == "tpu":
        return {"xla_tpu_enable_ici_ag_pipelining": True}
    if platform != "gpu":
        return {}
    if jax.__version_info__ < (0, 12):
        return {"xla_gpu_enable_pipelined_all_gather": True}
    return {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}


_current: ContextVar[ParallelContext | str | None] = ContextVar("meshpar_context", default=None)
_in_cache_keys = jax.make_user_context(None)
"""The same context as a part of the keys of JAX's caches. Otherwise a function that was traced for one context, such as
a `jax.jit` or the body of a `lax.scan`, would be reused for another one, with the constraints of the first."""


@cache
def _key(ctx: ParallelContext) -> object:
    """The same object for equal contexts: JAX compares the keys of its caches at each operation that it traces."""
    return object()


@contextmanager
def tracing(ctx: ParallelContext | str | None) -> Iterator[None]:
    """Traces the code inside the `with` block for this context, or for one device: of JAX, or of the platform named."""
    token = _current.set(ctx)
    try:
        with _in_cache_keys(_key(ctx) if isinstance(ctx, ParallelContext) else ctx):
            yield
    finally:
        _current.reset(token)


def current() -> ParallelContext | None:
    """The context of the program that is being traced; None on one device."""
    ctx = _current.get()
    return ctx if isinstance(ctx, ParallelContext) else None


def platform() -> str:
    """The platform that the program is compiled for, such as `cpu`. A mesh without devices counts as CPUs."""
    ctx = _current.get()
    if not isinstance(ctx, ParallelContext):
        return ctx or jax.default_backend()
    return platform_of(ctx.mesh) or "cpu"


def manual() -> ParallelContext | None:
    """The context, if the code is traced inside the manual lowering's `shard_map`; else None."""
    ctx = current()
    return ctx if ctx is not None and ctx.manual else None


def planned() -> ParallelContext | None:
    """The context, if a program of whole arrays is traced that `partition` plans; else None."""
    ctx = current()
    return ctx if ctx is not None and ctx.is_planned else None


def manual_axes(dim: str) -> Axes:
    """The axes over which the code holds a local shard of `dim`; empty when it holds the whole dim."""
    ctx = manual()
    return ctx.axes(dim) if ctx else ()


def dispatch_axes(dim: str) -> Axes:
    """The axes over whose devices the code sends tokens to the shards of `dim`; empty when it holds the whole dim."""
    ctx = manual()
    return ctx.dispatch(dim) if ctx else ()


def constrain(x: jax.Array, *dims: str) -> jax.Array:
    """Pins an activation to its rules under GSPMD; the identity on one device and in the manual lowering.

    Args:
      x: an activation of any shape.
      dims: a name for each dim.

    Raises:
      ShardingError: a dim has no name; or, within a training, no rule, or is not divisible (JAX would silently
        replicate it).

    Examples:
      >>> constrain(jax.numpy.ones((4, 8)), "batch", "embed").shape
      (4, 8)
    """
    if len(dims) != x.ndim or not all(dim and isinstance(dim, str) for dim in dims):
        fix = "give a name for each dim, as in constrain(x, 'batch', 'embed'); one that stays whole has the rule []"
        raise ShardingError(f"constrain{dims}: the array has {x.ndim} dims, {x.shape}; {fix}")
    ctx = current()
    if ctx is None or ctx.manual:
        return x
    _check(x.shape, dims, ctx)
    return jax.lax.with_sharding_constraint(x, NamedSharding(ctx.mesh, ctx.pspec(*dims)))  # pyright: ignore


def _check(shape: tuple[int, ...], dims: tuple[str, ...], ctx: ParallelContext) -> None:
    problems = Problems()
    for size, dim in zip(shape, dims, strict=True):
        if dim not in ctx.rules.table and dim not in ACTIVATION_DIMS:
            near = nearest(dim, set(ctx.rules.table))
            problems.add(dim, "no rule covers it", f"rules.{dim}=[]" + (f", or did you mean {near}?" if near else ""))
        elif size % math.prod(ctx.mesh.shape[axis] for axis in ctx.axes_of_whole(dim)):
            shards = " x ".join(f"{a} = {ctx.mesh.shape[a]}" for a in ctx.axes_of_whole(dim))
            problems.add(f"{dim} = {size}", f"is not divisible by {shards}", f"rules.{dim}=[] to leave it whole")
    problems.raise_any(ShardingError, f"constrain{dims}:")
