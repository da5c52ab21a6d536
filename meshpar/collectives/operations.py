"""The eight collectives on arrays, for use within a `jax.shard_map`: with the algorithm that is fastest here.

Each takes the mesh axes of its group; a rank is the index along them, the first slowest. S is the size in bytes of the
larger of input and output. What a device sends stands with each algorithm in `algorithms`.
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
from meshpar.collectives.choose import choose
from meshpar.collectives.execute import Axes, execute, manual_axes
from meshpar.collectives.plan import Operation, Plan
from meshpar.errors import ShardingError
from meshpar.mesh.varying import invariant, varying

Choice = Algorithm | Literal["auto"]


def all_reduce(x: jax.Array, axes: str | Axes, *, algorithm: Choice = "auto") -> jax.Array:
    """The sum over the axes, on every device: `x {partial over a} -> x`.

    Args:
      x: any shape, float or integer; padded to the plan's chunks.

    Returns:
      Like x; the same on all devices of the axes, and typed so.

    Communication: 2(n-1)/n S; its transpose none.
    Numerics: added up in the dtype of x, in an order that is the same on all devices.
    """
    axes = manual_axes(axes)
    chosen = _plan("all_reduce", algorithm, axes, x.nbytes)
    return same_sum(lambda x: join(execute(chosen, cut(x, chosen.given.shape[1]), axes), x.shape), axes, x)


def broadcast(x: jax.Array, axes: str | Axes, *, root: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """The array of rank `root`, on every device."""
    axes = manual_axes(axes)
    chosen = _plan("broadcast", algorithm, axes, x.nbytes, root)
    return invariant(join(execute(chosen, cut(x, chosen.given.shape[1]), axes), x.shape), axes)


def reduce(x: jax.Array, axes: str | Axes, *, root: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """The sum over the axes on rank `root`, zeros elsewhere."""
    chosen = _plan("reduce", algorithm, axes, x.nbytes, root)
    return join(execute(chosen, cut(x, chosen.given.shape[1]), axes), x.shape)


def all_gather(x: jax.Array, axes: str | Axes, *, dim: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """The parts of all devices one after the other along `dim`: `x[M_a] -> x[M]`. Its transpose is `reduce_scatter`."""
    chosen = _plan("all_gather", algorithm, axes, x.nbytes * _size(axes))
    return _side_by_side(execute(chosen, x[None], axes), dim)


def reduce_scatter(x: jax.Array, axes: str | Axes, *, dim: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """This device's part, along `dim`, of the sum over the axes: `x[M] {partial over a} -> x[M_a]`.

    Raises:
      ShardingError: the dim is not divisible by the group.
    """
    chosen = _plan("reduce_scatter", algorithm, axes, x.nbytes)
    return execute(chosen, _parts("reduce_scatter", x, dim, axes), axes)[0]


def gather(x: jax.Array, axes: str | Axes, *, dim: int = 0, root: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """The parts of all devices on rank `root`, zeros elsewhere."""
    chosen = _plan("gather", algorithm, axes, x.nbytes * _size(axes), root)
    return _side_by_side(execute(chosen, x[None], axes), dim)


def scatter(x: jax.Array, axes: str | Axes, *, dim: int = 0, root: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """This device's part, along `dim`, of the array of rank `root`.

    Raises:
      ShardingError: the dim is not divisible by the group.
    """
    chosen = _plan("scatter", algorithm, axes, x.nbytes, root)
    return execute(chosen, _parts("scatter", x, dim, axes), axes)[0]


def all_to_all(
    x: jax.Array, axes: str | Axes, *, split_dim: int = 0, concat_dim: int = 0, algorithm: Choice = "auto"
) -> jax.Array:
    """`x[M, N_a] -> x[M_a, N]`: the i-th part along `split_dim` goes to rank i, what comes is put along `concat_dim`.

    Raises:
      ShardingError: the dim is not divisible by the group.
    """
    chosen = _plan("all_to_all", algorithm, axes, x.nbytes)
    return _side_by_side(execute(chosen, _parts("all_to_all", x, split_dim, axes), axes), concat_dim)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _same_sum(summed: Callable[[jax.Array], jax.Array], axes: Axes, x: jax.Array) -> jax.Array:
    return invariant(summed(x), axes)


_same_sum.defvjp(
    lambda summed, axes, x: (_same_sum(summed, axes, x), None),
    lambda summed, axes, _, grad: (varying(grad, axes),),
)


def same_sum(summed: Callable[[jax.Array], jax.Array], axes: Axes, x: jax.Array) -> jax.Array:
    """The sum of x over `axes` as `summed` makes it on every device, typed as the same on all.

    Its gradient is the same everywhere too, so that each device has that of its own x already.
    """
    return _same_sum(summed, axes, varying(x, axes))


def _plan(operation: Operation, algorithm: Choice, axes: str | Axes, num_bytes: int, root: int = 0) -> Plan:
    size = _size(axes)
    return plan(operation, choose(operation, size, num_bytes) if algorithm == "auto" else algorithm, size, root)


def _size(axes: str | Axes) -> int:
    return lax.axis_size(manual_axes(axes))


def cut(x: jax.Array, num: int, multiple: int = 1) -> jax.Array:
    """[num, m]: the elements in so many equal chunks of a multiple of elements, filled up with zeros."""
    size = -(-x.size // (num * multiple)) * multiple
    return jnp.pad(x.reshape(-1), (0, size * num - x.size)).reshape(num, size)


def join(chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return chunks.reshape(-1)[: math.prod(shape)].reshape(shape)


def _parts(name: str, x: jax.Array, dim: int, axes: str | Axes) -> jax.Array:
    """[n, ...]: the equal parts of a dim."""
    size = _size(axes)
    if x.shape[dim] % size:
        what = f"{x.dtype}{list(x.shape)}: dim {dim} = {x.shape[dim]} is not divisible by {size}"
        raise ShardingError(f"{name} of {what}, the ranks of {axes}")
    shape = (*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0)


def _side_by_side(parts: jax.Array, dim: int) -> jax.Array:
    x = jnp.moveaxis(parts, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
