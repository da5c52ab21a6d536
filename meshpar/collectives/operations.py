"""The eight collectives on arrays, for use within a `jax.shard_map`. By default each runs its fastest algorithm.

The group of a collective is given by mesh axes; a rank is the index along them, the first axis slowest. S is the size
in bytes of the larger of input and output. The module `algorithms` lists what a device sends with each algorithm.
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
    """The sum over the axes on rank `root`; zeros elsewhere."""
    chosen = _plan("reduce", algorithm, axes, x.nbytes, root)
    return join(execute(chosen, cut(x, chosen.given.shape[1]), axes), x.shape)


def all_gather(x: jax.Array, axes: str | Axes, *, dim: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """The parts of all devices, concatenated along `dim`: `x[M_a] -> x[M]`. Its transpose is `reduce_scatter`."""
    chosen = _plan("all_gather", algorithm, axes, x.nbytes * _size(axes))
    return _concatenate(execute(chosen, x[None], axes), dim)


def reduce_scatter(x: jax.Array, axes: str | Axes, *, dim: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """This device's part, along `dim`, of the sum over the axes: `x[M] {partial over a} -> x[M_a]`.

    Raises:
      ShardingError: the dim is not divisible by the group.
    """
    chosen = _plan("reduce_scatter", algorithm, axes, x.nbytes)
    return execute(chosen, _parts("reduce_scatter", x, dim, axes), axes)[0]


def gather(x: jax.Array, axes: str | Axes, *, dim: int = 0, root: int = 0, algorithm: Choice = "auto") -> jax.Array:
    """The parts of all devices, concatenated along `dim`, on rank `root`; zeros elsewhere."""
    chosen = _plan("gather", algorithm, axes, x.nbytes * _size(axes), root)
    return _concatenate(execute(chosen, x[None], axes), dim)


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
    """`x[M, N_a] -> x[M_a, N]`: sends the i-th part along `split_dim` to rank i, and concatenates along `concat_dim`.

    Raises:
      ShardingError: the dim is not divisible by the group.
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
    """The array of a shape from its chunks: undoes `cut`."""
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
