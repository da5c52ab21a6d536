"""The eight collectives on arrays, for use within a `jax.shard_map`. By default each runs its fastest algorithm.

Mesh axes name the group of a collective. A rank is the index along them, the first axis slowest. S is the size in bytes
of the larger of input and output, n the number of ranks. Costs are those of the rings, for the rank that sends most;
`meshpar/collectives/algorithms.py` has the costs of the other algorithms.

Every collective raises MeshError if an axis is not manual here, and ConfigError if the algorithm has no plan for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.algorithms import Algorithm, plan
from meshpar.collectives.execute import execute, manual_axes
from meshpar.collectives.plan import Operation, Plan
from meshpar.collectives.select import select
from meshpar.errors import ShardingError
from meshpar.mesh.varying import Axes, invariant, varying

Choice = Algorithm | Literal["auto"]


def all_reduce(x: jax.Array, axes: str | Axes, *, algorithm: Choice = "auto") -> jax.Array:
    """The sum over the axes, on every device: `x {partial over a} -> x`.

    Args:
      x: any shape, float or integer; padded to the plan's chunks.

    Returns:
      Like x; the same on all devices of the axes, and typed as invariant over them.

    Communication: 2(n-1)/n S; its transpose none.
    Numerics: summed in the dtype of x, in the same order on all devices.

    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> f = jax.shard_map(lambda x: all_reduce(x, "a"), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P())
    >>> jax.jit(f)(jnp.arange(4.0)).tolist()
    [2.0, 4.0]
    """
    axes = manual_axes(axes)
    chosen = _plan("all_reduce", algorithm, axes, x.nbytes)
    return same_sum(lambda x: join(execute(chosen, cut(x, chosen.input_slots.shape[1]), axes), x.shape), axes, x)


def broadcast(x: jax.Array, axes: str | Axes, *, root: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """The array of rank `root`, on every device; typed as invariant over the axes.

    Communication: 2(n-1)/n S, a scatter and an all-gather; its transpose is a reduction to the root.

    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> f = jax.shard_map(lambda x: broadcast(x, "a", root=1), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P())
    >>> jax.jit(f)(jnp.arange(4.0)).tolist()
    [2.0, 3.0]
    """
    axes = manual_axes(axes)
    chosen = _plan("broadcast", algorithm, axes, x.nbytes, root)
    return invariant(join(execute(chosen, cut(x, chosen.input_slots.shape[1]), axes), x.shape), axes)


def reduce(x: jax.Array, axes: str | Axes, *, root: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """The sum over the axes on rank `root`, in the shape and dtype of x; zeros on the other ranks.

    Communication: 2(n-1)/n S, a reduce-scatter and a gather; its transpose is a broadcast.

    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> f = jax.shard_map(lambda x: reduce(x, "a"), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    >>> jax.jit(f)(jnp.arange(4.0)).tolist()
    [2.0, 4.0, 0.0, 0.0]
    """
    chosen = _plan("reduce", algorithm, axes, x.nbytes, root)
    return join(execute(chosen, cut(x, chosen.input_slots.shape[1]), axes), x.shape)


def all_gather(x: jax.Array, axes: str | Axes, *, dim: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """The parts of all devices, concatenated along `dim`: `x[M_a] -> x[M]`. Its transpose is `reduce_scatter`.

    Communication: (n-1)/n S.

    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> f = jax.shard_map(lambda x: all_gather(x, "a"), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    >>> jax.jit(f)(jnp.arange(2.0)).tolist()  # [0, 1] on each device
    [0.0, 1.0, 0.0, 1.0]
    """
    chosen = _plan("all_gather", algorithm, axes, x.nbytes * _size(axes))
    return _concatenate(execute(chosen, x[None], axes), dim)


def reduce_scatter(x: jax.Array, axes: str | Axes, *, dim: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """This device's part, along `dim`, of the sum over the axes: `x[M] {partial over a} -> x[M_a]`.

    Communication: (n-1)/n S; its transpose is `all_gather`.
    Numerics: summed in the dtype of x.
    Raises:
      ShardingError: the dim is not divisible by the size of the group.

    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> f = jax.shard_map(lambda x: reduce_scatter(x, "a"), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    >>> jax.jit(f)(jnp.arange(4.0)).tolist()
    [2.0, 4.0]
    """
    chosen = _plan("reduce_scatter", algorithm, axes, x.nbytes)
    return execute(chosen, _parts("reduce_scatter", x, dim, axes), axes)[0]


def gather(x: jax.Array, axes: str | Axes, *, dim: int = 0, root: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """The parts of all devices, concatenated along `dim`, on rank `root`; zeros on the other ranks.

    Communication: (n-1)/n S; its transpose is `scatter`.

    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> f = jax.shard_map(lambda x: gather(x, "a"), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    >>> jax.jit(f)(jnp.arange(1.0, 3.0)).tolist()
    [1.0, 2.0, 0.0, 0.0]
    """
    chosen = _plan("gather", algorithm, axes, x.nbytes * _size(axes), root)
    return _concatenate(execute(chosen, x[None], axes), dim)


def scatter(x: jax.Array, axes: str | Axes, *, dim: int = 0, root: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """This device's part, along `dim`, of the array of rank `root`.

    Communication: (n-1)/n S, which the root sends; its transpose is `gather`.
    Raises:
      ShardingError: the dim is not divisible by the size of the group.

    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> f = jax.shard_map(lambda x: scatter(x, "a", root=1), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    >>> jax.jit(f)(jnp.arange(4.0)).tolist()
    [2.0, 3.0]
    """
    chosen = _plan("scatter", algorithm, axes, x.nbytes, root)
    return execute(chosen, _parts("scatter", x, dim, axes), axes)[0]


def all_to_all(
    x: jax.Array, axes: str | Axes, *, split_dim: int = 0, concat_dim: int = 0, algorithm: Choice = "auto"
) -> jax.Array:
    """`x[M, N_a] -> x[M_a, N]`: sends the i-th part along `split_dim` to rank i, and concatenates along `concat_dim`.

    Communication: (n-1)/n S; its transpose is an all-to-all with the two dims exchanged.
    Raises:
      ShardingError: the dim is not divisible by the size of the group.

    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> f = jax.shard_map(lambda x: all_to_all(x, "a"), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    >>> jax.jit(f)(jnp.arange(4.0)).tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    chosen = _plan("all_to_all", algorithm, axes, x.nbytes)
    return _concatenate(execute(chosen, _parts("all_to_all", x, split_dim, axes), axes), concat_dim)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _same_sum(summed: Callable[[jax.Array], jax.Array], axes: Axes, x: jax.Array) -> jax.Array:
    return invariant(summed(x), axes)


_same_sum.defvjp(
    lambda summed, axes, x: (_same_sum(summed, axes, x), None),
    lambda summed, axes, _, grad: (varying(grad, axes),),
)


def same_sum(summed: Callable[[jax.Array], jax.Array], axes: Axes, x: jax.Array) -> jax.Array:
    """The sum of x over `axes`, which `summed` computes on every device; typed as invariant.

    The gradient is the same on all devices too, so the transpose sends nothing.
    """
    return _same_sum(summed, axes, varying(x, axes))


def _plan(operation: Operation, algorithm: Choice, axes: str | Axes, num_bytes: int, root: int = 0) -> Plan:
    size = _size(axes)
    return plan(operation, select(operation, size, num_bytes) if algorithm == "auto" else algorithm, size, root)


def _size(axes: str | Axes) -> int:
    return lax.axis_size(manual_axes(axes))


def cut(x: jax.Array, num: int, multiple: int = 1) -> jax.Array:
    """[num, m]: the elements in `num` equal chunks, padded with zeros; m is divisible by `multiple`."""
    size = -(-x.size // (num * multiple)) * multiple
    return jnp.pad(x.reshape(-1), (0, size * num - x.size)).reshape(num, size)


def join(chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of `shape` from its chunks; the inverse of `cut`."""
    return chunks.reshape(-1)[: math.prod(shape)].reshape(shape)


def _parts(name: str, x: jax.Array, dim: int, axes: str | Axes) -> jax.Array:
    """[n, ...]: the equal parts of a dim."""
    size = _size(axes)
    if x.shape[dim] % size:
        where = f"{name} of {x.dtype}{list(x.shape)}"
        raise ShardingError(f"{where}: dim {dim} = {x.shape[dim]} is not divisible by {size}, the ranks of {axes}")
    shape = (*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0)


def _concatenate(parts: jax.Array, dim: int) -> jax.Array:
    x = jnp.moveaxis(parts, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
