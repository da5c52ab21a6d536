"""The pieces that the families share: projections, norms and MLPs as plain NNX modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.models.families.options import MLP, PARTS, Norm
from meshpar.nn.layers import filled, normal
from meshpar.parallel.precision import wide

Dims = Sequence[tuple[str, int]]
"""Name and size of each dim."""


class Linear(nnx.Module):
    """`x[.., *ins] @ kernel[*ins, *outs] + bias[*outs]`."""

    def __init__(self, ins: Dims, outs: Dims, *, bias: bool = False, rngs: nnx.Rngs):
        dims, sizes = zip(*ins, *outs, strict=True)
        self.num_ins = len(ins)
        self.kernel = normal(rngs, sizes, math.prod(sizes[: self.num_ins]) ** -0.5, dims)
        self.bias = filled(0.0, sizes[self.num_ins :], dims[self.num_ins :]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.tensordot(x, self.kernel[...], self.num_ins)
        return y if self.bias is None else y + self.bias[...]


class Bias(nnx.Module):
    """`x + bias`, along the last dim."""

    def __init__(self, dim: tuple[str, int]):
        name, size = dim
        self.bias = filled(0.0, (size,), (name,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.bias[...]


class Normed(nnx.Module):
    """A norm over the last dim. Its scale has the dims `dims`, of which the last is normed."""

    def __init__(self, options: Norm, *dims: tuple[str, int]):
        names, sizes = zip(*dims, strict=True)
        self.options = options
        first = 1.0 - options.offset
        self.scale = filled(first, sizes, names) if options.has_scale else None
        self.bias = filled(0.0, sizes, names) if options.has_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = wide(x)
        if self.options.kind == "layer":
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.options.eps)
        if self.scale is not None:
            y = y * (wide(self.scale[...]) + self.options.offset)
        if self.bias is not None:
            y = y + wide(self.bias[...])
        return y.astype(x.dtype)


class XIELU(nnx.Module):
    """The activation of Apertus: quadratic above 0, and below 0 an exponential. Source: arXiv:2411.13010."""

    def __init__(self):
        self.alpha_p, self.alpha_n = (filled(0.5, (1,), (PARTS,)) for _ in "pn")
        self.beta, self.eps = filled(0.5, (), ()), filled(-1e-6, (), ())

    def __call__(self, x: jax.Array) -> jax.Array:
        y, beta = wide(x), jax.lax.stop_gradient(self.beta[...])
        eps = jax.lax.stop_gradient(self.eps[...])
        positive = jax.nn.softplus(self.alpha_p[...])
        negative = beta + jax.nn.softplus(self.alpha_n[...])
        below = (jnp.expm1(jnp.minimum(y, eps)) - y) * negative + beta * y
        return jnp.where(y > 0, positive * y * y + beta * y, below).astype(x.dtype)


ACTIVATIONS: dict[str, Any] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
HIDDEN_ACTS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu2", "quick_gelu": "quick_gelu",
}  # fmt: skip
"""Hugging Face's name of an activation -> ours."""


class Feedforward(nnx.Module):
    """An MLP, gated or not."""

    def __init__(self, width: int, options: MLP, *, rngs: nnx.Rngs):
        embed, mlp = ("embed", width), ("mlp", options.width)
        linear = partial(Linear, bias=options.bias, rngs=rngs)
        is_fused = options.form == "fused"
        self.act = XIELU() if options.act == "xielu" else ACTIVATIONS[options.act]
        self.gate_up = linear([embed], [(PARTS, 2), mlp]) if is_fused else None
        self.gate = linear([embed], [mlp]) if options.is_gated and not is_fused else None
        self.up = None if is_fused else linear([embed], [mlp])
        self.down = linear([mlp], [embed])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.inner(x))

    def inner(self, x: jax.Array) -> jax.Array:
        """What the last projection reads."""
        if self.gate_up is not None:
            both = self.gate_up(x)
            return self.act(both[..., 0, :]) * both[..., 1, :]
        assert self.up is not None
        up = self.up(x)
        return self.act(up) if self.gate is None else self.act(self.gate(x)) * up


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`."""
    return x if cap is None else jnp.tanh(x / cap) * cap
