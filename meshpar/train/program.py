"""Traces and compiles programs: functions of global arrays, for a parallel context and placements.

Only this module calls `shard_map` and specifies how arguments and results of programs are sharded. The step, the
evaluation, a teacher's forward, the first state and the programs of generation are all made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshpar.errors import RunError
from meshpar.parallel.batch import Batch
from meshpar.parallel.context import ParallelContext, tracing
from meshpar.sharding.spec import ArraySpec
from meshpar.tree import flatten_with_paths

WHOLE = PartitionSpec()
"""Every device holds the whole array."""


def on_shards(local: Callable[..., Any], ctx: ParallelContext, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Turns a function of local shards into one of global arrays: a `shard_map` over all axes in the manual lowering.

    Under GSPMD `local` gets the global arrays themselves, and XLA partitions it.

    Args:
      local: traced with `ctx` as the current context.
      in_specs, out_specs: trees of `PartitionSpec`, of the arguments and the result.
    """

    def traced(*args: Any) -> Any:
        with tracing(ctx):
            return local(*args)

    if not ctx.manual:
        return traced
    return jax.shard_map(traced, mesh=ctx.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)


def on_each_device(local: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Turns a function of local shards into one of global arrays, where copies of an array may differ by a fault.

    JAX assumes that copies are equal, so its check of the axes over which values vary is off.
    """
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def pspecs(placements: Any) -> Any:
    """The partition specs of a tree of `Placement`."""
    return jax.tree.map(lambda p: p.pspec, placements)


def structs(placements: Any) -> Any:
    """A tree of placements as `ShapeDtypeStruct`s."""
    return jax.tree.map(lambda p: p.struct, placements)


def shardings(tree: Any) -> Any:
    """The shardings of a tree of `ShapeDtypeStruct`s."""
    return jax.tree.map(lambda s: s.sharding, tree)


def whole(mesh: Any) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, WHOLE)


def on_host(tree: Any) -> Any:
    """The values of global arrays, whole, on every process: tree of NumPy arrays. All processes call it.

    Communication: an all-gather of every array that several processes hold.
    """
    if all(x.is_fully_addressable for x in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    out_shardings = jax.tree.map(lambda x: whole(x.sharding.mesh), tree)
    return jax.device_get(jax.jit(lambda arrays: arrays, out_shardings=out_shardings)(tree))


def counts(arrays: Sequence[jax.Array]) -> list[int]:
    """The values of int32[] on every process; of int32[slices], their sums. All processes call it."""
    found = on_host(list(arrays)) if any(x.ndim for x in arrays) else jax.device_get(list(arrays))
    return [int(x.sum()) for x in found]


def batch_structs(ctx: ParallelContext, specs: dict[str, ArraySpec]) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch as structs, sharded by the rules of their dims. A dim without a name is not sharded."""

    def struct(spec: ArraySpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(ctx.mesh, ctx.pspec(*spec.dims))  # pyright: ignore
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

    return {name: struct(spec) for name, spec in specs.items()}


def batch_pspecs(ctx: ParallelContext, specs: dict[str, ArraySpec]) -> dict[str, PartitionSpec]:
    """The partition specs of the arrays of a batch, and of the indices of its rows."""
    return {name: ctx.pspec(*spec.dims) for name, spec in specs.items()} | {"rows": ctx.pspec("batch")}


def with_rows(batch: Batch) -> Batch:
    """Adds the index of each row to a batch. Dropout derives its masks from it."""
    num_rows = next(iter(batch.values())).shape[0]
    return batch | {"rows": jnp.arange(num_rows, dtype=jnp.int32)}


@dataclass(frozen=True)
class Program:
    """A compiled function of global arrays.

    Args:
      compiled: the executable.
      jaxpr: the traced program.
      lowered: the program before XLA changed it; None if it is not known.
    """

    compiled: jax.stages.Compiled
    jaxpr: ClosedJaxpr
    lowered: jax.stages.Lowered | None = None

    def __call__(self, *args: Any) -> Any:
        """Runs the program.

        Raises:
          RunError: an array was donated to an earlier call. With several CPU devices, jax 0.10 would end in SIGSEGV.
        """
        if any(_is_gone(x) for x in jax.tree.leaves(args)):
            path = next(path for path, x in flatten_with_paths(args).items() if _is_gone(x)).partition(".")[2]
            fix = "go on with the state that it returned: `state, metrics = step(state, batch)`"
            raise RunError(f"{path} was donated to an earlier call, which uses its memory again; {fix}")
        return self.compiled(*args)


def _is_gone(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.is_deleted()


def trace(
    function: Callable[..., Any], arguments: tuple[Any, ...], out_shardings: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Traced:
    """Traces a function for arguments that do not exist yet.

    Args:
      arguments: trees of `ShapeDtypeStruct` with shardings.
      out_shardings: shardings of the result.
      donate: positions of the arguments whose memory the program may reuse.
    """
    # The arguments say on which mesh a program is; a mesh that the user set, `jax.set_mesh`, may be another one.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.jit(function, out_shardings=out_shardings, donate_argnums=donate).trace(*arguments)


def compile_program(traced: jax.stages.Traced, options: dict[str, Any] | None = None) -> Program:
    """Compiles a traced function; nothing is allocated.

    Args:
      options: of the compiler.
    """
    lowered = traced.lower()
    return Program(lowered.compile(compiler_options=options), traced.jaxpr, lowered)
