"""The train state and its placements. The state is initialized sharded, and is described by one tree of structs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.errors import Problems, ShardingError
from meshpar.parallel.trainable import without
from meshpar.sharding.resolve import HOST, AnyMesh, Placement, platform_of, resolve
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.program import compile_program, shardings, structs, trace, whole
from meshpar.tree import flatten_with_paths, map_with_path

_LEVEL = "xla_backend_optimization_level"
OWN = 64
"""An optimizer's array that belongs to no parameter is replicated if it has at most this many elements."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "skipped", "carried"],
    meta_fields=["is_prepared"],
)
@dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes. A step donates it, and a checkpoint stores it.

    Args:
      step: int32[]. The number of steps so far, including skipped steps.
      params: nested dicts of arrays.
      opt_state: the Optax state.
      skipped: int32[]. How many steps were skipped because loss or gradients were not finite. With local updates
        int32[slices]: each slice skips a step alone.
      carried: state other than parameters that the loss passes from step to step, such as batch statistics.
      is_prepared: whether the layers are stored as the step needs them, see `stored_layers`; else in
        the model's stacks and order. A step's program accepts only one of the two.
    """

    step: Any
    params: Any
    opt_state: Any
    skipped: Any
    carried: Any = field(default_factory=dict)
    is_prepared: bool = False


@dataclass(frozen=True)
class StatePlacement:
    """How a train state is sharded.

    Args:
      sharded: tree of `Placement`: the parameters, sharded as far as the rules allow, and their gradients.
      params: the parameters as they are stored: whole over the storage axes under ZeRO-1.
      opt_state: tree of `Placement`, like the Optax state.
      carried: tree of `Placement`, of the carried state.
      frozen: paths of parameters that are not trained.
      slices: the axis of the slices that train alone, see `train.slices`; None without local updates.
    """

    mesh: AnyMesh
    sharded: Any
    params: Any
    opt_state: Any
    carried: Any = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    slices: str | None = None

    @property
    def trained(self) -> Any:
        """`sharded`, without the frozen parameters."""
        return without(self.sharded, self.frozen)

    @property
    def updated(self) -> list[tuple[Placement, Placement]]:
        """Each trained parameter, (as it is updated, as it is stored): under ZeRO-1 the one is a shard of the other."""
        stored = without(self.params, self.frozen)
        return list(zip(jax.tree.leaves(self.trained), jax.tree.leaves(stored), strict=True))

    @property
    def structs(self) -> TrainState:
        """The state as `ShapeDtypeStruct`s with shardings, for compile, init and restore."""
        scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole(self.mesh))
        skipped = scalar
        if self.slices:
            sharding = NamedSharding(self.mesh, PartitionSpec(self.slices))  # pyright: ignore
            skipped = jax.ShapeDtypeStruct((self.mesh.shape[self.slices],), jnp.int32, sharding=sharding)
        return TrainState(scalar, structs(self.params), structs(self.opt_state), skipped, structs(self.carried))

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Path -> names of the dims, of each array of the state that has dims."""
        placed = flatten_with_paths({"params": self.params, "opt_state": self.opt_state, "carried": self.carried})
        return {path: placement.spec.dims for path, placement in placed.items()}


def place(
    specs: Any,
    rules: AxisRules,
    mesh: AnyMesh,
    tx: optax.GradientTransformation,
    carried: Any = None,
    frozen: frozenset[str] = frozenset(),
    activation_dims: Collection[str] | None = None,
    is_offloaded: bool = False,
) -> StatePlacement:
    """Places parameters, optimizer state and carried state.

    Args:
      specs: tree of `ArraySpec`, of the parameters as they are stored.
      carried: the same, of the carried state.
      frozen: paths of parameters that `tx` does not see.
      activation_dims: see `resolve`.
      is_offloaded: whether the optimizer's state is stored in the host's memory, see `offloaded`.

    Raises:
      ShardingError: see `resolve`; or the optimizer has an array that is not sharded like any parameter.
    """
    carried = carried or {}
    sharded = resolve(specs, rules, mesh, carried, activation_dims)
    opt_state = place_opt_state(without(sharded, frozen), tx, mesh)
    if is_offloaded:
        opt_state = offloaded(opt_state)
    carried = resolve(carried, rules, mesh, specs, activation_dims)
    return StatePlacement(mesh, sharded, stored(sharded, rules), opt_state, carried, frozen)


def stored(sharded: Any, rules: AxisRules) -> Any:
    """The placements of parameters between steps: whole over the storage axes under ZeRO-1."""
    if rules.zero_stage != 1:
        return sharded
    return jax.tree.map(lambda p: p.gathered(rules), sharded)


def offloaded(placements: Any) -> Any:
    """The placements with every array in the host's memory, except for scalars and the optimizer's tiny arrays."""
    return jax.tree.map(lambda p: replace(p, memory_kind=HOST) if math.prod(p.spec.shape) > OWN else p, placements)


def on_device(arrays: Any, placements: Any) -> Any:
    """Moves arrays to the devices' own memory, within a program. Each device moves its own shards."""

    def move(x: jax.Array, placement: Placement) -> jax.Array:
        if placement.memory_kind is None:
            return x
        return jax.device_put(x, placement.sharding.with_memory_kind("device"))

    return jax.tree.map(move, arrays, placements)


def place_opt_state(sharded: Any, tx: optax.GradientTransformation, mesh: AnyMesh) -> Any:
    """Places an optimizer's state like its parameters.

    Args:
      sharded: tree of `Placement`, of the parameters that the optimizer updates.

    Raises:
      ShardingError: an array is not sharded like any parameter.
    """
    problems = Problems()
    params = flatten_with_paths(sharded)
    state = jax.eval_shape(tx.init, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.spec.shape, p.spec.dtype), sharded))

    def one(path: str, leaf: Any) -> Placement:
        # The parameter whose path the leaf's path ends in, or else contains.
        ends = [name for name in params if f".{path}".endswith(f".{name}")]
        names = ends or [name for name in params if f".{name}." in f".{path}."]
        placement = _inherit(leaf, params[max(names, key=len)] if names else None, mesh)
        if placement is None:
            problems.add(path, f"{leaf.dtype}{list(leaf.shape)} matches no parameter", "use another optimizer")
        return placement  # pyright: ignore

    placed = map_with_path(one, state)
    problems.raise_any(ShardingError, "the optimizer's state cannot be sharded like its parameters:")
    return placed


def _inherit(leaf: Any, owner: Placement | None, mesh: AnyMesh) -> Placement | None:
    """Shards an array of the optimizer like its parameter, dim by dim; None if that is impossible.

    A factored array has some of the parameter's dims; a memory of several steps has further dims before them. A tiny
    array without a parameter is the optimizer's own.
    """
    dtype = leaf.dtype if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.dtype(leaf.dtype)

    def placed(dims: tuple[str, ...], axes: tuple[tuple[str, ...], ...], reason: tuple[str, ...]) -> Placement:
        return Placement(ArraySpec(leaf.shape, dtype, dims), mesh, axes, reason)

    def unsharded(reason: str) -> Placement:
        return placed(("own",) * leaf.ndim, ((),) * leaf.ndim, (reason,) * leaf.ndim)

    owner = _of_some_layers(owner, leaf.shape)
    if leaf.size == 1:
        return unsharded("scalar")
    if owner is None:
        return unsharded("the optimizer's own") if leaf.size <= OWN else None
    more = leaf.ndim - len(owner.axes)
    if more > 0 and leaf.shape[more:] == owner.spec.shape:
        memory = ("memory",) * more
        return placed(memory + owner.spec.dims, ((),) * more + owner.axes, memory + owner.reason)
    kept = _subsequence(leaf.shape, owner.spec.shape)
    if kept is None:
        return None
    dims, axes, reason = zip(*((owner.spec.dims[i], owner.axes[i], owner.reason[i]) for i in kept), strict=True)
    return placed(dims, axes, reason)


def _of_some_layers(owner: Placement | None, shape: tuple[int, ...]) -> Placement | None:
    """The parameter with as many layers as the optimizer has, which knows no frozen ones; see `optim.frozen_layers`."""
    if owner is None or not shape or owner.spec.dims[:1] != ("layers",) or owner.axes[0]:
        return owner
    fewer = (shape[0], *owner.spec.shape[1:])
    fits = shape[0] < owner.spec.shape[0] and _subsequence(shape, fewer) and not _subsequence(shape, owner.spec.shape)
    return replace(owner, spec=replace(owner.spec, shape=fewer)) if fits else owner


def _subsequence(shape: tuple[int, ...], of: tuple[int, ...]) -> tuple[int, ...] | None:
    """The positions in `of` of the sizes in `shape`, in order; None if one is missing. Equal dims are interchangeable.

    >>> _subsequence((2, 64), (2, 64, 16))
    (0, 1)
    """
    kept = []
    start = 0
    for size in shape:
        found = next((i for i in range(start, len(of)) if of[i] == size), None)
        if found is None:
            return None
        kept.append(found)
        start = found + 1
    return tuple(kept)


def compile_init(
    init_params: Callable[[jax.Array], Any],
    init_others: Callable[[Any, jax.Array], tuple[Any, Any]],
    placement: StatePlacement,
    seed: int,
    options: Any = None,
    given: dict[str, jax.Array] | None = None,
) -> Callable[[], TrainState]:
    """A compiled function that initializes the state; each device computes only its own shards.

    Args:
      init_params: key -> params.
      init_others: (params, key) -> the optimizer's state, and carried state.
      options: the compiler's; by default few optimizations on CPUs, because the program runs only once.
      given: existing arrays by path, such as `params.head.kernel`, placed as `placement.structs`. They are donated, and
        replace the initialized ones.

    Communication: none: JAX's random numbers are a function of the element's position.
    """
    target = placement.structs
    given = given or {}

    def init(given: dict[str, jax.Array]) -> TrainState:
        key = jax.random.key(seed)
        drawn = _cast(init_params(key), target.params)
        params = map_with_path(lambda path, x: given.get(f"params.{path}", x), drawn)
        params = jax.lax.with_sharding_constraint(params, shardings(structs(placement.sharded)))
        opt_state, carried = init_others(params, key)
        skipped = jnp.zeros(target.skipped.shape, jnp.int32)
        return TrainState(jnp.int32(0), params, opt_state, skipped, _cast(carried, target.carried))

    placed = {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for path, x in given.items()}
    traced = trace(init, (placed,), shardings(target), donate=(0,))
    return partial(compile_program(traced, _for_one_call(placement.mesh) if options is None else options), given)


def _for_one_call(mesh: AnyMesh) -> dict[str, Any] | None:
    """Compiler options for a program that runs once: on CPUs half the time to compile, for the same speed and values.

    Level 0 would compile faster still, but is five times slower to run, and rounds differently.
    """
    return {_LEVEL: 1} if platform_of(mesh) == "cpu" and _LEVEL not in os.environ.get("XLA_FLAGS", "") else None


def _cast(arrays: Any, structs: Any) -> Any:
    return jax.tree.map(lambda x, struct: x.astype(struct.dtype), arrays, structs)
