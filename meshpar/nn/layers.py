"""Layers: norms, projections, feed-forward blocks, dropout.

The metadata `dims` of a parameter names its dims. No layer knows a mesh.
Shapes: B batch, S seq, R residual_seq, D embed, M mlp, H heads, K kv_heads, h head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, PRNGKeyArray

from meshpar.mesh.varying import Axes
from meshpar.nn.low_rank import LowRank
from meshpar.nn.quantized_kernel import Quantized, QuantizedKernel
from meshpar.nn.remat import Activation, named
from meshpar.parallel.context import constrain, current, manual
from meshpar.parallel.precision import wide
from meshpar.parallel.xla import recomputed
from meshpar.partition.op import apply
from meshpar.partition.signature import Call, Signature

STACKED = ("layers", "experts")
"""Leading dims along which a kernel stacks matrices. Each matrix is a linear map."""


def normal(rngs: nnx.Rngs, shape: Sequence[int], std: float, dims: Sequence[str]) -> nnx.Param:
    """A parameter drawn from a truncated normal distribution, with a name for each dim.

    Numerics: float32; float64 where JAX's x64 mode is on. The last bit of a draw depends on how XLA fuses it, and so on
    the layout. `verify` compares layouts in float64, where this is below its tolerance.
    """
    value = jax.random.truncated_normal(rngs.params(), -3.0, 3.0, shape) * std
    return nnx.Param(value, dims=tuple(dims))


def filled(value: float, shape: Sequence[int], dims: Sequence[str]) -> nnx.Param:
    """A parameter that is initialized to a constant, with a name for each dim."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), dims=tuple(dims))


def within_layer(param: nnx.Param) -> tuple[str, ...]:
    """The names of a parameter's dims inside the scan over layers, where the dim `layers` is gone."""
    return tuple(dim for dim in param.get_metadata()["dims"] if dim != "layers")


class RMSNorm(nnx.Module):
    """`x[.., D] -> x / rms(x) * scale[D]`; `dim` is the name of D. Numerics: in float32 at least.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, width: int, *, eps: float, dim: str = "embed"):
        self.scale = filled(1.0, (width,), (dim,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rest D"]) -> Float[Array, "*rest D"]:
        x_wide = wide(x)
        normed = x_wide * jax.lax.rsqrt(jnp.square(x_wide).mean(-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.scale[...]


class LayerNorm(nnx.Module):
    """`x[B, S, D] -> (x - mean(x)) / std(x) * scale[D] + bias[D]`. Numerics: in float32 at least.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(self, width: int, *, eps: float):
        self.scale = filled(1.0, (width,), ("embed",))
        self.bias = filled(0.0, (width,), ("embed",))
        self.eps = eps

    def __call__(self, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        x = wide(x_BSD)
        centred = x - x.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.eps)
        return normed.astype(x_BSD.dtype) * self.scale[...] + self.bias[...]


class LinearMap(nnx.Module):
    """The kernel of a linear map between groups of dims, stored as floats or as codes.

    Args:
      num_inputs: how many of the kernel's dims are contracted.
    """

    def __init__(self, kernel: nnx.Param, num_inputs: int):
        self.kernel: nnx.Param | QuantizedKernel = kernel
        self.num_inputs = num_inputs

    def product(self, x: Float[Array, "B S ..."]) -> Float[Array, "B S ..."]:
        """`x[.., in..] @ kernel[in.., out..]`."""
        return jnp.tensordot(x, self._kernel, axes=self.num_inputs)

    @property
    def floats(self) -> nnx.Param:
        """The kernel, which is not stored as codes."""
        assert isinstance(self.kernel, nnx.Param), "it is stored as codes"
        return self.kernel

    @property
    def grouped_dim(self) -> int:
        """The index of the kernel's last input dim, which `Quantized` divides into groups."""
        dims = self.floats.get_metadata()["dims"]
        return sum(dim in STACKED for dim in dims) + self.num_inputs - 1

    @property
    def _kernel(self) -> jax.Array:
        """The kernel in floats, as a layer has it."""
        return self.kernel.dequantized() if isinstance(self.kernel, QuantizedKernel) else self.kernel[...]

    def quantize(self, how: Quantized) -> None:
        """Stores the kernel as codes."""
        self.kernel = QuantizedKernel(self.floats, how, self.grouped_dim, self.num_inputs)


class Projection(LinearMap):
    """A linear map between groups of dims: `x[.., in..] @ kernel[in.., out..] (+ bias[out..])`.

    After `factorize` the kernel is the first of two thin factors, and `expand` is the second:
    `x[.., in..] @ kernel[in.., rank] @ expand.kernel[rank, out..]`.

    Args:
      inputs: (name, size) of each dim that is contracted.
      outputs: (name, size) of each dim of the result.
      std: standard deviation of the initial kernel; default 1 / sqrt(fan in).
    """

    def __init__(
        self, inputs: Sequence[tuple[str, int]], outputs: Sequence[tuple[str, int]], *,
        bias: bool, rngs: nnx.Rngs, std: float | None = None,
    ):  # fmt: skip
        dims, shape = zip(*inputs, *outputs, strict=True)
        fan_in = math.prod(size for _, size in inputs)
        super().__init__(normal(rngs, shape, std or fan_in**-0.5, dims), len(inputs))
        out_dims, out_shape = zip(*outputs, strict=True)
        self.bias = filled(0.0, out_shape, out_dims) if bias else None
        self.lora: LowRank | None = nnx.data(None)
        self.expand: LinearMap | None = nnx.data(None)

    def __call__(self, x: Float[Array, "B S ..."]) -> Float[Array, "B S ..."]:
        """The product with LoRA's update, DoRA's magnitudes or the second factor if there are any, and the bias."""
        y = self.product(x)
        if self.lora is not None:
            y = y + self.lora.term(x)
            y = self.lora.stretched(y, self._kernel)
        if self.expand is not None:
            y = self.expand.product(y)
        return y if self.bias is None else y + self.bias[...]

    def product(self, x: Float[Array, "B S ..."]) -> Float[Array, "B S ..."]:
        """As that of any map; in the 8 bits that the context asks for, where GSPMD partitions it.

        Where a program is planned, `partition.rules.quantized` rounds its products.
        """
        ctx = current()
        if ctx is None or ctx.number_format is None or ctx.manual or ctx.is_planned:
            return super().product(x)
        from meshpar.parallel import quantized  # and Qwix, which other runs do not need

        kernel = self._kernel
        matrix = kernel.reshape(math.prod(kernel.shape[: self.num_inputs]), -1)
        rows = x.reshape(*x.shape[:2], -1)
        (y,) = quantized.matmuls(rows, [matrix], ctx.number_format, quantized.Shards())
        return y.reshape(*x.shape[:2], *kernel.shape[self.num_inputs :])

    def factorize(self, rank: int, rngs: nnx.Rngs) -> None:
        """Replaces the kernel by two factors of this rank, initialized at random."""
        shape = self.floats.shape
        dims = self.floats.get_metadata()["dims"]
        end = self.grouped_dim + 1
        start = end - self.num_inputs
        self.kernel = normal(rngs, (*shape[:end], rank), math.prod(shape[start:end]) ** -0.5, (*dims[:end], "rank"))
        expand = normal(rngs, (*shape[:start], rank, *shape[end:]), rank**-0.5, (*dims[:start], "rank", *dims[end:]))
        self.expand = LinearMap(expand, 1)


class SwiGLU(nnx.Module):
    """`(silu(x @ gate[D, M]) * (x @ up[D, M])) @ down[M, D]`. Source: Shazeer 2020, arXiv:2002.05202."""

    activations: ClassVar[tuple[Activation, ...]] = ("gate", "up")
    num_matrices: ClassVar[int] = 3

    def __init__(self, width: int, mlp: int, *, bias: bool, out_std: float, rngs: nnx.Rngs):
        embed = [("embed", width)]
        hidden = [("mlp", mlp)]
        self.gate = Projection(embed, hidden, bias=bias, rngs=rngs)
        self.up = Projection(embed, hidden, bias=bias, rngs=rngs)
        self.down = Projection(hidden, embed, bias=bias, rngs=rngs, std=out_std)

    def __call__(self, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        gate = named(self.gate(x_BSD), "gate")
        up = named(self.up(x_BSD), "up")
        return self.down(constrain(silu_product(gate, up), "batch", "seq", "mlp"))


@jax.custom_vjp
def silu_product(gate: Float[Array, "*rest"], up: Float[Array, "*rest"]) -> Float[Array, "*rest"]:
    """`silu(gate) * up`. Memory: the backward keeps only the arguments, and computes the activation again."""
    return gate * jax.nn.sigmoid(gate) * up


def _silu_product_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate, up, grad = recomputed((*saved, grad))
    sigmoid = jax.nn.sigmoid(gate)
    return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


silu_product.defvjp(lambda gate, up: (silu_product(gate, up), (gate, up)), _silu_product_backward)


class GELU(nnx.Module):
    """`gelu(x @ up[D, M]) @ down[M, D]`, with GPT-2's tanh approximation. Source: arXiv:1606.08415."""

    activations: ClassVar[tuple[Activation, ...]] = ("up",)
    num_matrices: ClassVar[int] = 2

    def __init__(self, width: int, mlp: int, *, bias: bool, out_std: float, rngs: nnx.Rngs):
        embed = [("embed", width)]
        hidden = [("mlp", mlp)]
        self.up = Projection(embed, hidden, bias=bias, rngs=rngs)
        self.down = Projection(hidden, embed, bias=bias, rngs=rngs, std=out_std)

    def __call__(self, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        up = named(self.up(x_BSD), "up")
        return self.down(constrain(jax.nn.gelu(up), "batch", "seq", "mlp"))


def dropout(
    x_BSD: Float[Array, "B S D"], rate: float, key: PRNGKeyArray | None, rows_B: Int[Array, "B"]
) -> Float[Array, "B S D"]:
    """Zeroes elements of the residual stream with probability `rate`, and divides the others by `1 - rate`.

    The random bits of an element are a hash of the key and of its *global* position: row of the global batch, index
    in the sequence, channel. So the mask does not depend on the mesh or the number of microbatches.

    Args:
      x_BSD: [batch, residual_seq, embed], local shard.
      rate: in [0, 1).
      key: a typed key, equal on all devices; None disables dropout.
      rows_B: int32 [batch], the index of each row in the global batch.

    Communication: none.
    """
    if key is None or rate == 0.0:
        return x_BSD
    words = jax.random.key_data(key).astype(jnp.uint32)

    def compute(call: Call, x_BSD: jax.Array, rows_B: jax.Array, words: jax.Array) -> list[jax.Array]:
        return [_dropped(x_BSD, rows_B, words, rate, call.axes("tokens"), call.axes("channels"))]

    of_x = ("rows", "tokens", "channels")
    return apply(Signature((of_x, ("rows",), (None,)), (of_x,), compute), x_BSD, rows_B, words)[0]


def _dropped(
    x_BSD: Float[Array, "B S D"], rows_B: Int[Array, "B"], words: Array, rate: float, tokens: Axes, channels: Axes = ()
) -> Float[Array, "B S D"]:
    """Dropout of a shard, whose tokens and channels are sharded over these axes."""
    _, seq, width = x_BSD.shape
    ctx = manual()
    places = _places(seq, tokens)
    index = ctx.sequence.tokens(places, seq * jax.lax.axis_size(tokens)) if ctx and tokens else places
    num_channels = width * (jax.lax.axis_size(channels) if channels else 1)
    element_SD = index[:, None] * num_channels + _places(width, channels)
    counts = jnp.stack(jnp.broadcast_arrays(rows_B[:, None, None], element_SD[None])).astype(jnp.uint32)
    bits = threefry_2x32(words, counts)[0]
    keep = bits >= jnp.uint32(rate * 2**32)
    return jnp.where(keep, x_BSD / jnp.asarray(1.0 - rate, x_BSD.dtype), jnp.zeros_like(x_BSD))


def _places(size: int, axes: Axes) -> Int[Array, "S"]:
    """The positions of a shard's elements in a dim that is sharded over these axes."""
    return (jax.lax.axis_index(axes) * size if axes else 0) + jnp.arange(size, dtype=jnp.int32)
