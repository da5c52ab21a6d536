"""Products of 8-bit operands, with gradients: the matrices of the layers in `fp8` or `int8`.

Each operand is divided by its scales, rounded to 8 bits and multiplied; the product is multiplied by the scales. A row
of x and a column of w has a scale of its own: its largest element over the largest number of the format.

    y[B, S, N]  = (qx @ qw) * sx * sw         sx[B, S, 1] and sw[1, N]: the largest over K
    dx[B, S, K] = (q(dy * sw) @ qw') * s      s[B, S, 1]: the largest over N
    dw[K, N]    = (qx' @ q(dy * sx)) * s      s[1, 1, N]: the largest over B and S

A scale can be factored out of a sum that does not run over its dim. The backward sums over the dims of sx and sw, so
dy is multiplied by them before it is rounded; x is needed in 8 bits only.

If devices hold shards of a summed dim, the largest element is that of all shards. So all devices together round as one
device would, and the result does not depend on the layout.

Source: Micikevicius et al. 2022, arXiv:2209.05433 (formats). Qwix multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshpar.collectives.codec import encode, largest_code
from meshpar.collectives.matmul import PRODUCT
from meshpar.mesh.varying import Axes, varying_alike
from meshpar.parallel.context import Format
from meshpar.parallel.precision import wide

OPERANDS: dict[Format, Any] = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}
"""The dtype of inputs and weights."""
GRADIENTS: dict[Format, Any] = {"fp8": jnp.float8_e5m2, "int8": jnp.int8}
"""The dtype of gradients: e5m2 has one bit of precision less than e4m3, and a range of 2^32 instead of 2^18."""


@dataclass(frozen=True)
class Shards:
    """The axes over which devices hold shards of the dims of `x[tokens, inputs] @ w[inputs, outputs]`."""

    tokens: Axes = ()
    inputs: Axes = ()
    outputs: Axes = ()


def matmuls(
    x_BSK: jax.Array, ws_KN: Sequence[jax.Array], number_format: Format, shards: Shards
) -> tuple[jax.Array, ...]:
    """`x[B, S, K] @ w[K, N]` in 8 bits, for each w. Gradients ignore the rounding (straight-through).

    Returns:
      [B, S, N] for each w, in the dtype of x; a partial sum where the inputs are sharded.

    Communication: all-reduces of the largest elements, in float32: forward, where the inputs are sharded, [B, S] and an
      [N] for each w; backward, for each w, [B, S] where the outputs are sharded and [N] where the tokens are.
    Memory: x is stored for the backward in 8 bits, and the ws in their own dtype.
    Numerics: scales and sums are float32 (int8: sums are int32); float64 where x is float64.
    """
    operands = varying_alike(x_BSK, *ws_KN)
    products: tuple[jax.Array, ...] = _matmuls(number_format, shards, operands[0], operands[1:])
    return tuple(checkpoint_name(y, PRODUCT) for y in products)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmuls(number_format: Format, shards: Shards, x: jax.Array, ws: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return _forward(number_format, shards, x, ws)[0]


def _forward(number_format: Format, shards: Shards, x: jax.Array, ws: tuple[jax.Array, ...]) -> tuple[Any, Any]:
    dtype = OPERANDS[number_format]
    qx = _quantize(x, dtype, largest(x, (2,), shards.inputs))
    tops = [largest(w, (0,), shards.inputs) for w in ws]
    qws = [_quantize(w, dtype, top) for w, top in zip(ws, tops, strict=True)]
    products = tuple(_multiply(qx, qw, (2,), (0,)).astype(x.dtype) for qw in qws)
    # The backward rounds the weights again: stored rounded weights would be a second copy of all layers, gathered ones
    # under ZeRO-3. x is stored as integers: `jax.checkpoint` rounds the floats that it saves to their own precision
    # with `lax.reduce_precision`, which supports no format without infinities, and turns elements of e4m3fn above 240
    # into NaN.
    bits = lax.bitcast_convert_type(qx.qvalue, jnp.int8)
    return products, (replace(qx, qvalue=bits), ws, tops)


def _backward(number_format: Format, shards: Shards, saved: Any, grads: tuple[jax.Array, ...]) -> Any:
    saved_x, ws, tops = saved
    qx = replace(saved_x, qvalue=lax.bitcast_convert_type(saved_x.qvalue, OPERANDS[number_format]))
    dtype = GRADIENTS[number_format]
    dx = jnp.zeros((), qx.dtype)
    dws = []
    for w, top, grad in zip(ws, tops, grads, strict=True):
        qw = _quantize(w, OPERANDS[number_format], top)
        for_x = wide(grad) * qw.scale
        for_w = wide(grad) * qx.scale
        q_for_x = _quantize(for_x, dtype, largest(for_x, (2,), shards.outputs))
        q_for_w = _quantize(for_w, dtype, largest(for_w, (0, 1), shards.tokens))
        dx += _multiply(q_for_x, qw.qvalue, (2,), (1,))
        dws.append(_multiply(qx.qvalue, q_for_w, (0, 1), (0, 1)).astype(w.dtype))
    return dx.astype(grads[0].dtype), tuple(dws)


_matmuls.defvjp(_forward, _backward)


def largest(x: jax.Array, dims: tuple[int, ...], axes: Axes) -> jax.Array:
    """The largest magnitude over these dims, which keep size 1, and over the devices of the axes; 1 if all are zero."""
    top = jnp.abs(wide(x)).max(dims, keepdims=True)
    top = lax.pmax(top, axes) if axes else top
    return jnp.where(top == 0, jnp.ones_like(top), top)


def _quantize(x: jax.Array, dtype: Any, top: jax.Array) -> qwix.QArray:
    """`x`, whose magnitudes are at most `top`, in 8 bits with its scales."""
    # Qwix would scale the range of int8 to [-127.5, 127.5], whose ends are ties: rounding errors, and so the layout,
    # would decide them. Here the largest element becomes 127.
    step = jnp.ones_like(top) / largest_code(dtype)
    return qwix.QArray(encode(wide(x) / top, step, dtype), step * top)


def _multiply(x: Any, y: Any, of_x: tuple[int, ...], of_y: tuple[int, ...]) -> jax.Array:
    """The product that sums over these dims of x and y, times their scales, where they have any."""
    with jax.numpy_dtype_promotion("standard"):  # Qwix multiplies sums in int32 by scales in float32
        return qwix.dot_general(x, y, ((of_x, of_y), ((), ())))
