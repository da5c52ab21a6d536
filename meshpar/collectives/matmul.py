"""Collective matmul: products whose operand is gathered, or whose result is scattered, while they are computed.

    all_gather_matmul:      x[S_a, K] @ w[K, N] -> y[S, N]                 a chunk of x is multiplied as it comes
    matmul_reduce_scatter:  x[S, K] @ w[K, N] {partial over a} -> y[S_a, N]  a sum gets a chunk's product as it passes

Which dim is chunked is a letter of an einsum, and may as well be contracted: `x[M, K] @ w[K_a, N]` adds up as the
chunks of w come. Each is the other's transpose, so two functions are all that forward and backward need:

    y  = gather(x) w             dx = scatter(dy w')         dw = gather(x)' dy
    y  = scatter(x w)            dx = gather(dy) w'          dw = x' gather(dy)

Nothing is gathered whole, nor kept for the backward: that lets the chunks of x come round once more, for dw.

Source: Wang et al. 2023, ASPLOS; the second gather, Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshpar.collectives import stream
from meshpar.collectives.stream import Ring
from meshpar.errors import ShardingError
from meshpar.mesh.varying import varying_alike

PRODUCT = "collective_matmul"
"""What a `jax.checkpoint` policy knows the results by."""
Equation = tuple[str, str, str]
"""The dims, a letter each, of two operands and of their product."""
Equations = tuple[Equation, ...]
Operands = tuple[jax.Array, ...]


def all_gather_matmul(
    equation: str, x: jax.Array, ws: Sequence[jax.Array], ring: Ring, *, dim: str
) -> tuple[jax.Array, ...]:
    """`einsum(equation, x, w)` for each w, of an x that is sharded over the ring and never whole.

    Args:
      equation: as in `einsum`, of two operands.
      x: the local shard. It travels in the dtype of the ws, and its gradient is summed in its own.
      ws: operands of one dtype; whole in `dim`, if they have it.
      dim: the letter of the dim of x that is sharded.

    Returns:
      A product for each w, in its dtype; whole in `dim`, if that is not contracted.

    Communication: n-1 chunks of x; backward the same again, and n-1 of its gradient.
    Memory: see `stream.gather`; kept for the backward are x and the ws.
    Numerics: a sum over chunks is taken in float32 at least.
    Raises:
      ShardingError: an axis is not manual here; a w has another `dim` than the whole of x.

    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> local = lambda x, w: all_gather_matmul("sk,kn->sn", x, [w], Ring(("a",)), dim="s")[0]
    >>> spec = jax.sharding.PartitionSpec
    >>> f = jax.shard_map(local, mesh=mesh, in_specs=(spec("a"), spec(None, "a")), out_specs=spec(None, "a"))
    >>> f(jnp.eye(4), jnp.arange(8.0).reshape(4, 2)).tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    """
    one, chunks = _parse(equation), Chunks(dim, ring)
    whole = x.shape[one[0].index(dim)] * ring.size
    for w in ws:
        chunks.require(w, one[1], whole)
    x, *ws = varying_alike(x, *ws)
    ys: Operands = _gathered(chunks, (one,) * len(ws), x, tuple(ws))
    return tuple(checkpoint_name(y, PRODUCT) for y in ys)


def matmul_reduce_scatter(equation: str, x: jax.Array, w: jax.Array, ring: Ring, *, dim: str) -> jax.Array:
    """`einsum(equation, x, w)`, summed over the ring and scattered over `dim` of the result.

    Args:
      equation: as in `einsum`, of two operands.
      x, w: operands, whole in `dim`; of one dtype.
      dim: the letter of the dim of the result that is scattered.

    Returns:
      This device's shard of the sum.

    Communication: n-1 chunks of the result; backward n-1 of its gradient.
    Memory: see `stream.reduce_scatter`; kept for the backward are x and w.
    Numerics: products are summed over devices in the dtype of x.
    Raises:
      ShardingError: an axis is not manual here; the ring does not divide `dim`.

    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> local = lambda x, w: matmul_reduce_scatter("sk,kn->sn", x, w, Ring(("a",)), dim="s")
    >>> spec = jax.sharding.PartitionSpec
    >>> f = jax.shard_map(local, mesh=mesh, in_specs=(spec(None, "a"), spec("a")), out_specs=spec("a"))
    >>> f(jnp.eye(4), jnp.arange(8.0).reshape(4, 2)).tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    """
    one, chunks = _parse(equation), Chunks(dim, ring)
    chunks.require(x, one[0])
    chunks.require(w, one[1])
    x, w = varying_alike(x, w)
    return checkpoint_name(_scattered(chunks, (one,), x.dtype, (x,), (w,)), PRODUCT)


@dataclass(frozen=True)
class Chunks:
    """A dim that is cut into a chunk for each device of a ring."""

    dim: str
    ring: Ring

    def of(self, x: jax.Array, dims: str, owner: jax.Array) -> jax.Array:
        """A device's chunk of x, or x itself, if it has no such dim."""
        if self.dim not in dims:
            return x
        axis = dims.index(self.dim)
        size = x.shape[axis] // self.ring.size
        return lax.dynamic_slice_in_dim(x, owner * size, size, axis)

    def join(self, whole: jax.Array | None, part: jax.Array, dims: str, owner: jax.Array) -> jax.Array:
        """Puts a device's chunk into the whole; adds it to the sum, if its dim was contracted."""
        if self.dim not in dims:
            return part if whole is None else whole + part
        axis = dims.index(self.dim)
        size = part.shape[axis]
        if whole is None:
            whole = jnp.zeros((*part.shape[:axis], size * self.ring.size, *part.shape[axis + 1 :]), part.dtype)
        return lax.dynamic_update_slice_in_dim(whole, part, owner * size, axis)

    def require(self, x: jax.Array, dims: str, size: int | None = None) -> None:
        """Raises ShardingError if the ring does not divide the dim of x, or it is not of the size that it must be."""
        if self.dim not in dims:
            return
        got, over = x.shape[dims.index(self.dim)], " x ".join(self.ring.axes)
        if size is not None and got != size:
            what = f"is {size} with all chunks of one operand, but {got} in the other"
            raise ShardingError(f"a collective matmul over {over}: dim {self.dim} {what}")
        if got % self.ring.size:
            what = f"= {got} is not divisible by its {self.ring.size} devices"
            raise ShardingError(f"a collective matmul over {over}: dim {self.dim} {what}")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(chunks: Chunks, equations: Equations, x: jax.Array, ws: Operands) -> Operands:
    """For each equation the product of the gathered x and its w."""

    def visit(ys: Any, chunk: jax.Array, owner: jax.Array) -> list[jax.Array]:
        joined = []
        for y, (of_x, of_w, of_y), w in zip(ys or [None] * len(ws), equations, ws, strict=True):
            dtype = w.dtype if chunks.dim in of_y else np.promote_types(w.dtype, np.float32)
            part = _einsum((of_x, of_w, of_y), chunk, chunks.of(w, of_w, owner), dtype)
            joined.append(chunks.join(y, part, of_y, owner))
        return joined

    ys = stream.gather(chunks.ring, x.astype(ws[0].dtype), visit)
    return tuple(y.astype(w.dtype) for y, w in zip(ys, ws, strict=True))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scattered(chunks: Chunks, equations: Equations, dtype: Any, xs: Operands, ws: Operands) -> jax.Array:
    """The sum of all equations' products, over all devices, scattered."""

    def make(owner: jax.Array) -> jax.Array:
        operands = zip(equations, xs, ws, strict=True)
        return reduce(jnp.add, (
            _einsum(e, chunks.of(x, e[0], owner), chunks.of(w, e[1], owner), dtype) for e, x, w in operands
        ))  # fmt: skip

    return stream.reduce_scatter(chunks.ring, make)


def _gathered_backward(chunks: Chunks, equations: Equations, kept: Any, grads: Operands) -> Any:
    # Not before the gradients are there: else its chunks could as well be kept since the forward.
    (x, ws), grads = lax.optimization_barrier((kept, grads))
    for_x = tuple((of_y, of_w, of_x) for of_x, of_w, of_y in equations)
    for_w = tuple((of_x, of_y, of_w) for of_x, of_w, of_y in equations)
    return _scattered(chunks, for_x, x.dtype, grads, ws), _gathered(chunks, for_w, x, grads)


def _scattered_backward(chunks: Chunks, equations: Equations, dtype: Any, kept: Any, grad: jax.Array) -> Any:
    xs, ws = kept
    for_x = tuple((of_y, of_w, of_x) for of_x, of_w, of_y in equations)
    for_w = tuple((of_y, of_x, of_w) for of_x, of_w, of_y in equations)
    both: Operands = _gathered(chunks, for_x + for_w, grad, ws + xs)
    return both[: len(xs)], both[len(xs) :]


# The forward calls what it differentiates, so that a policy of `jax.checkpoint` sees one thing and not its parts.
_gathered.defvjp(lambda *args: (_gathered(*args), args[2:]), _gathered_backward)
_scattered.defvjp(lambda *args: (_scattered(*args), args[3:]), _scattered_backward)


def _einsum(equation: Equation, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    of_x, of_w, of_y = equation
    return jnp.einsum(f"{of_x},{of_w}->{of_y}", x, w, preferred_element_type=dtype)


def _parse(equation: str) -> Equation:
    operands, _, result = equation.partition("->")
    of_x, _, of_w = operands.partition(",")
    return of_x, of_w, result
