"""Collective matmul: products that gather an operand, or scatter the result, while they compute.

    all_gather_matmul:      x[S_a, K] @ w[K, N] -> y[S, N]                 multiplies each chunk of x as it arrives
    matmul_reduce_scatter:  x[S, K] @ w[K, N] {partial over a} -> y[S_a, N]  adds a chunk's product to each passing sum

The chunked dim is a letter of an einsum. It may be contracted: `x[M, K] @ w[K_a, N]` sums the products of the chunks
of w as they arrive. Each function is the other's transpose, so that forward and backward need only these two:

    y  = gather(x) w             dx = scatter(dy w')         dw = gather(x)' dy
    y  = scatter(x w)            dx = gather(dy) w'          dw = x' gather(dy)

No device ever holds the whole gathered array, in the forward or for the backward: for dw, the chunks of x are gathered
again.

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
from jax.custom_derivatives import SymbolicZero

from meshpar.collectives import ring
from meshpar.collectives.ring import Ring
from meshpar.errors import ShardingError
from meshpar.mesh.varying import varying_alike, varying_like

PRODUCT = "product"
"""The `checkpoint_name` of a product that needs communication: a policy that saves products saves it too."""
Equation = tuple[str, str, str]
"""The dims of two operands and of their product, one letter each."""
Equations = tuple[Equation, ...]
Operands = tuple[jax.Array, ...]


def all_gather_matmul(
    equation: str | Sequence[str], x: jax.Array, ws: Sequence[jax.Array], ring: Ring, *, dim: str
) -> tuple[jax.Array, ...]:
    """`einsum(equation, x, w)` for each w, where x is sharded over the ring and is never whole.

    Args:
      equation: as in `einsum`, for two operands; or one for each w, in which x has the same dims.
      x: the local shard. It is sent in the dtype of the ws, and its gradient is summed in its own dtype.
      ws: operands of one dtype, not sharded in `dim`.
      dim: the letter of the sharded dim of x.

    Returns:
      A product for each w, in its dtype; not sharded in `dim`.

    Communication: n-1 chunks of x; backward the same again if a w has a gradient, and n-1 chunks of x's gradient if it
      has one.
    Memory: see `ring.gather`; x and the ws are stored for the backward pass.
    Numerics: sums over chunks are in float32 at least.
    Raises:
      ShardingError: an axis is not manual here, or the `dim` of a w differs from that of the whole x.
      NotImplementedError: by JAX, outside of `jit`.

    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> local = lambda x, w: all_gather_matmul("sk,kn->sn", x, [w], Ring(("a",)), dim="s")[0]
    >>> spec = jax.sharding.PartitionSpec
    >>> f = jax.shard_map(local, mesh=mesh, in_specs=(spec("a"), spec(None, "a")), out_specs=spec(None, "a"))
    >>> jax.jit(f)(jnp.eye(4), jnp.arange(8.0).reshape(4, 2)).tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    """
    equations = tuple(map(_parse, [equation] * len(ws) if isinstance(equation, str) else equation))
    chunks = Chunks(dim, ring)
    for (of_x, of_w, _), w in zip(equations, ws, strict=True):
        chunks.require(w, of_w, x.shape[of_x.index(dim)] * ring.size)
    x, *ws = varying_alike(x, *ws)
    ys: Operands = _gathered(chunks, equations, x, tuple(ws))
    return tuple(checkpoint_name(y, PRODUCT) for y in ys)


def matmul_reduce_scatter(equation: str, x: jax.Array, w: jax.Array, ring: Ring, *, dim: str) -> jax.Array:
    """`einsum(equation, x, w)`, summed over the ring and scattered over `dim` of the result.

    Args:
      equation: as in `einsum`, for two operands.
      x, w: operands of one dtype, not sharded in `dim`.
      dim: the letter of the dim of the result that is scattered.

    Returns:
      This device's shard of the sum.

    Communication: n-1 chunks of the result; backward n-1 chunks of its gradient.
    Memory: see `ring.reduce_scatter`; x and w are stored for the backward pass.
    Numerics: products are summed over devices in the dtype of x.
    Raises:
      ShardingError: an axis is not manual here, or the ring size does not divide `dim`.
      NotImplementedError: by JAX, outside of `jit`.

    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> local = lambda x, w: matmul_reduce_scatter("sk,kn->sn", x, w, Ring(("a",)), dim="s")
    >>> spec = jax.sharding.PartitionSpec
    >>> f = jax.shard_map(local, mesh=mesh, in_specs=(spec(None, "a"), spec("a")), out_specs=spec("a"))
    >>> jax.jit(f)(jnp.eye(4), jnp.arange(8.0).reshape(4, 2)).tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    """
    of_x, of_w, of_y = _parse(equation)
    chunks = Chunks(dim, ring)
    chunks.require(x, of_x)
    chunks.require(w, of_w)
    x, w = varying_alike(x, w)
    return checkpoint_name(_scattered(chunks, ((of_x, of_w, of_y),), x.dtype, (x,), (w,)), PRODUCT)


@dataclass(frozen=True)
class Chunks:
    """A dim that is split into one chunk for each device of a ring."""

    dim: str
    ring: Ring

    def of(self, x: jax.Array, dims: str, owner: jax.Array) -> jax.Array:
        """A device's chunk of x; x itself if it does not have the dim."""
        if self.dim not in dims:
            return x
        axis = dims.index(self.dim)
        size = x.shape[axis] // self.ring.size
        return lax.dynamic_slice_in_dim(x, owner * size, size, axis)

    def join(self, whole: jax.Array | None, part: jax.Array, dims: str, owner: jax.Array) -> jax.Array:
        """Writes a device's chunk into the whole array; adds it to the sum if the dim was contracted."""
        if self.dim not in dims:
            return part if whole is None else whole + part
        axis = dims.index(self.dim)
        size = part.shape[axis]
        if whole is None:
            whole = jnp.zeros((*part.shape[:axis], size * self.ring.size, *part.shape[axis + 1 :]), part.dtype)
        return lax.dynamic_update_slice_in_dim(whole, part, owner * size, axis)

    def require(self, x: jax.Array, dims: str, size: int | None = None) -> None:
        """Raises ShardingError if the ring size does not divide the dim of x, or the dim differs from `size`."""
        if self.dim not in dims:
            return
        where = f"a collective matmul over {' x '.join(self.ring.axes)}: dim {self.dim}"
        found = x.shape[dims.index(self.dim)]
        if size is not None and found != size:
            raise ShardingError(f"{where} is {size} in the gathered operand, but {found} in the other")
        if found % self.ring.size:
            raise ShardingError(f"{where} = {found} is not divisible by {self.ring.size}, the devices of the ring")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(chunks: Chunks, equations: Equations, x: jax.Array, ws: Operands) -> Operands:
    """The product of the gathered x and a w, for each equation."""

    def visit(ys: Any, chunk: jax.Array, owner: jax.Array) -> list[jax.Array]:
        joined = []
        for y, (of_x, of_w, of_y), w in zip(ys or [None] * len(ws), equations, ws, strict=True):
            dtype = w.dtype if chunks.dim in of_y else np.promote_types(w.dtype, np.float32)
            part = _einsum((of_x, of_w, of_y), chunk, chunks.of(w, of_w, owner), dtype)
            joined.append(chunks.join(y, part, of_y, owner))
        return joined

    ys = ring.gather(chunks.ring, x.astype(ws[0].dtype), visit)
    return tuple(y.astype(w.dtype) for y, w in zip(ys, ws, strict=True))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scattered(chunks: Chunks, equations: Equations, dtype: Any, xs: Operands, ws: Operands) -> jax.Array:
    """The sum of all equations' products over all devices, scattered."""

    def make(owner: jax.Array) -> jax.Array:
        operands = zip(equations, xs, ws, strict=True)
        parts = [_einsum(e, chunks.of(x, e[0], owner), chunks.of(w, e[1], owner), dtype) for e, x, w in operands]
        return reduce(jnp.add, parts)

    return ring.reduce_scatter(chunks.ring, make)


# The forward rules call the functions themselves, so a `jax.checkpoint` policy sees one operation instead of its parts.
def _gathered_forward(chunks: Chunks, equations: Equations, x: Any, ws: Any) -> Any:
    x_and_ws, wanted = _primals(x, *ws)
    return _gathered(chunks, equations, x_and_ws[0], x_and_ws[1:]), (x_and_ws, wanted)


def _gathered_backward(chunks: Chunks, equations: Equations, kept: Any, grads: Any) -> Any:
    x_and_ws, (wants_x, *wants_w) = kept
    # Waits for the gradients. Otherwise the compiler may gather x during the forward pass, and hold it until now.
    grads = tuple(_instantiated(grad, x_and_ws[0]) for grad in grads)
    (x, *ws), grads = lax.optimization_barrier((x_and_ws, grads))
    for_x = tuple((of_y, of_w, of_x) for of_x, of_w, of_y in equations)
    for_w = tuple((of_x, of_y, of_w) for of_x, of_w, of_y in equations)
    dx = None if wants_x is None else _scattered(chunks, for_x, x.dtype, grads, tuple(ws))
    return dx, _gathered_where(wants_w, chunks, for_w, x, grads)


def _scattered_forward(chunks: Chunks, equations: Equations, dtype: Any, xs: Any, ws: Any) -> Any:
    operands, wanted = _primals(*xs, *ws)
    xs, ws = operands[: len(xs)], operands[len(xs) :]
    return _scattered(chunks, equations, dtype, xs, ws), (xs, ws, wanted)


def _scattered_backward(chunks: Chunks, equations: Equations, dtype: Any, kept: Any, grad: Any) -> Any:
    xs, ws, wanted = kept
    for_x = tuple((of_y, of_w, of_x) for of_x, of_w, of_y in equations)
    for_w = tuple((of_y, of_x, of_w) for of_x, of_w, of_y in equations)
    both = _gathered_where(wanted, chunks, for_x + for_w, _instantiated(grad, xs[0]), ws + xs)
    return both[: len(xs)], both[len(xs) :]


_gathered.defvjp(_gathered_forward, _gathered_backward, symbolic_zeros=True)
_scattered.defvjp(_scattered_forward, _scattered_backward, symbolic_zeros=True)


def _primals(*operands: Any) -> tuple[Operands, tuple[tuple[()] | None, ...]]:
    """The values of the operands, and for each operand `()` if its gradient is needed, else None.

    Residuals must be trees of arrays, so a bool is not possible. Frozen weights need no gradient, so none is sent.
    """
    values = tuple(x.value for x in operands)
    return values, tuple(() if x.perturbed else None for x in operands)


def _gathered_where(wanted: Sequence[Any], chunks: Chunks, equations: Equations, x: jax.Array, ws: Operands) -> Any:
    """`_gathered` for the products with a needed gradient; None for the others."""
    chosen = [i for i, want in enumerate(wanted) if want is not None]
    if not chosen:
        return (None,) * len(wanted)
    found: Operands = _gathered(chunks, tuple(equations[i] for i in chosen), x, tuple(ws[i] for i in chosen))
    products = dict(zip(chosen, found, strict=True))
    return tuple(products.get(i) for i in range(len(wanted)))


def _instantiated(grad: Any, like: jax.Array) -> jax.Array:
    """A cotangent as an array; zeros, typed like an operand, if nothing depends on the product."""
    is_zero = isinstance(grad, SymbolicZero)
    return varying_like(jnp.zeros(grad.shape, grad.dtype), like) if is_zero else grad  # pyright: ignore


def _einsum(equation: Equation, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    of_x, of_w, of_y = equation
    return jnp.einsum(f"{of_x},{of_w}->{of_y}", x, w, preferred_element_type=dtype)


def _parse(equation: str) -> Equation:
    operands, _, result = equation.partition("->")
    of_x, _, of_w = operands.partition(",")
    return of_x, of_w, result
