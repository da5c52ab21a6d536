"""Layers that compute with local shards: norms, projections, feed-forward blocks, dropout.

The metadata `dims` of a parameter names its dims. No layer depends on the mesh.
Shapes: B batch, S seq, R residual_seq, D embed, M mlp, H heads, K kv_heads, h head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, PRNGKeyArray

from meshpar.mesh.varying import Axes
from meshpar.nn import dora
from meshpar.nn.quantized_kernel import Quantized, QuantizedKernel
from meshpar.nn.remat import Activation, named
from meshpar.nn.supported import Sharding, Supported
from meshpar.parallel import linear
from meshpar.parallel.context import constrain, current, manual, manual_axes, planned
from meshpar.parallel.data import streamed
from meshpar.parallel.linear import Adapter, Weights
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


WHOLE_ROWS: Sharding = {
    "embed": Supported(partition=False, why="norms and projections need whole rows of the residual stream"),
}


class RMSNorm(nnx.Module):
    """`x[.., D] -> x / rms(x) * scale[D]`; `dim` is the name of D. Numerics: in float32 at least.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    sharding: ClassVar[Sharding] = WHOLE_ROWS

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

    sharding: ClassVar[Sharding] = WHOLE_ROWS

    def __init__(self, width: int, *, eps: float):
        self.scale = filled(1.0, (width,), ("embed",))
        self.bias = filled(0.0, (width,), ("embed",))
        self.eps = eps

    def __call__(self, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        x = wide(x_BSD)
        centred = x - x.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.eps)
        return normed.astype(x_BSD.dtype) * self.scale[...] + self.bias[...]


class LowRank(nnx.Module):
    """`x[.., in] @ a[in.., rank] @ b[rank, out..] * scale`; b starts at zero, so the model is unchanged at first.

    With DoRA it also holds the change of the magnitude of each output, `magnitude[out..]`, see `dora`.

    Communication: none. Where the kernel's inputs are sharded, the result is a partial sum like the kernel's product.
    """

    sharding: ClassVar[Sharding] = {
        "rank": Supported(partition=False, why="LoRA needs all columns of its thin matrices"),
    }

    def __init__(self, a: nnx.Param, b: nnx.Param, scale: float, magnitude: nnx.Param | None = None):
        self.a = a
        self.b = b
        self.scale = scale
        self.magnitude = magnitude
        self.used: jax.Array | None = nnx.data(None)
        """See `Adapter`."""

    @property
    def adapter(self) -> Adapter:
        kind = _PlannedAdapter if planned() else Adapter
        return kind(self.a[...], self.b[...], self.scale, self.used)

    def stretch(self, kernel: jax.Array, dims: Sequence[str]) -> jax.Array:
        """What DoRA multiplies each output of x @ kernel and of the update by.

        Args:
          kernel: [inputs..., outputs...], a local shard.
          dims: the names of its dims.
        """
        assert self.magnitude is not None, "LoRA stretches nothing"
        num_inputs = self.a.ndim - 1
        update = self.scale * jnp.tensordot(wide(self.a[...]), wide(self.b[...]), axes=1, precision="highest")
        axes = tuple(axis for dim in dims[:num_inputs] for axis in manual_axes(dim))
        return dora.stretch(kernel, update, self.magnitude[...], tuple(range(num_inputs)), axes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _PlannedAdapter(Adapter):
    """One operation, where a program is planned. If x @ a were one, its gradient would be summed, and not that of a."""

    def term(self, x: jax.Array) -> jax.Array:
        def compute(call: Call, x: jax.Array, a: jax.Array, b: jax.Array) -> list[jax.Array]:
            return [Adapter(a, b, self.scale).term(x)]

        inputs = tuple(f"input {i}" for i in range(self.a.ndim - 1))
        outputs = tuple(f"output {i}" for i in range(self.b.ndim - 1))
        rows = tuple(range(x.ndim - len(inputs)))
        ins = ((*rows, *inputs), (*inputs, None), (None, *outputs))
        signature = Signature(ins, ((*rows, *outputs),), compute, summed=inputs)
        return apply(signature, x, self.a, self.b)[0]


def use_adapters(module: nnx.Module, used: jax.Array | None) -> None:
    """Sets the columns of x @ a that each row uses, in all updates of a module."""
    if used is None:
        return
    for _, part in nnx.iter_modules(module):
        if isinstance(part, LowRank):
            part.used = used


class LinearMap(nnx.Module):
    """The kernel of a linear map between groups of dims, stored as floats or as codes.

    Args:
      num_inputs: how many of the kernel's dims are contracted.
    """

    def __init__(self, kernel: nnx.Param, num_inputs: int):
        self.kernel: nnx.Param | QuantizedKernel = kernel
        self.num_inputs = num_inputs

    @property
    def weights(self) -> Weights:
        if isinstance(self.kernel, QuantizedKernel):
            return Weights(self._kernel, self.num_inputs)
        return Weights(self._kernel, self.num_inputs, streamed(self._dims, current()))

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

    @property
    def _dims(self) -> tuple[str, ...]:
        """The names of the kernel's dims within a layer."""
        if isinstance(self.kernel, QuantizedKernel):
            return tuple(dim for dim in self.kernel.dims if dim != "layers")
        return within_layer(self.kernel)

    def quantize(self, how: Quantized) -> None:
        """Stores the kernel as codes."""
        self.kernel = QuantizedKernel(self.floats, how, self.grouped_dim, self.num_inputs)


class Projection(LinearMap):
    """A linear map between groups of dims: `x[.., in..] @ kernel[in.., out..] (+ bias[out..])`.

    `column_parallel` and `row_parallel` apply it. After `factorize` the kernel is the first of two thin factors, and
    `expand` is the second: `x[.., in..] @ kernel[in.., rank] @ expand.kernel[rank, out..]`.

    Args:
      inputs: (name, size) of each dim that is contracted.
      outputs: (name, size) of each dim of the result.
      std: standard deviation of the initial kernel; default 1 / sqrt(fan in).
    """

    sharding: ClassVar[Sharding] = {**WHOLE_ROWS, **LowRank.sharding}

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

    @property
    def weights(self) -> Weights:
        ctx = current()
        adapter = self.lora and self.lora.adapter
        rounds = ctx and not ctx.is_planned  # `partition.rules.quantized` rounds the products of whole arrays
        return super().weights._replace(adapter=adapter, number_format=ctx.number_format if ctx and rounds else None)

    def factorize(self, rank: int, rngs: nnx.Rngs) -> None:
        """Replaces the kernel by two factors of this rank, initialized at random."""
        shape = self.floats.shape
        dims = self.floats.get_metadata()["dims"]
        end = self.grouped_dim + 1
        start = end - self.num_inputs
        self.kernel = normal(rngs, (*shape[:end], rank), math.prod(shape[start:end]) ** -0.5, (*dims[:end], "rank"))
        expand = normal(rngs, (*shape[:start], rank, *shape[end:]), rank**-0.5, (*dims[:start], "rank", *dims[end:]))
        self.expand = LinearMap(expand, 1)

    def finish(self, y: Float[Array, "B S ..."]) -> Float[Array, "B S ..."]:
        """Multiplies by DoRA's magnitudes or by the second factor, if there are any, and adds the bias.

        `row_parallel` does so after the sum over shards, so that the bias counts once, and fewer bytes are summed.
        """
        if self.lora is not None and self.lora.magnitude is not None:
            y = y * self.lora.stretch(self._kernel, self._dims).astype(y.dtype)
        if self.expand is not None:
            y = linear.product(y, self.expand.weights)
        return y if self.bias is None else y + self.bias[...]


def column_parallel(x: linear.Input, maps: Sequence[Projection], dim: str) -> Iterator[Float[Array, "B S ..."]]:
    """Projects x by each map, where `dim` of the outputs is sharded. See `parallel.linear`."""
    products = linear.column_parallel(x, [projection.weights for projection in maps], dim)
    return (projection.finish(y) for projection, y in zip(maps, products, strict=True))


def row_parallel(x: linear.Input, down: Projection, dim: str) -> Float[Array, "B R D"]:
    """Projects x by `down`, where `dim` of the inputs is sharded. See `parallel.linear`."""
    return down.finish(linear.row_parallel(x, down.weights, dim))


class SwiGLU(nnx.Module):
    """`(silu(x @ gate[D, M]) * (x @ up[D, M])) @ down[M, D]`. Source: Shazeer 2020, arXiv:2002.05202."""

    sharding: ClassVar[Sharding] = Projection.sharding
    activations: ClassVar[tuple[Activation, ...]] = ("gate", "up")
    num_matrices: ClassVar[int] = 3

    def __init__(self, width: int, mlp: int, *, bias: bool, out_std: float, rngs: nnx.Rngs):
        embed = [("embed", width)]
        hidden = [("mlp", mlp)]
        self.gate = Projection(embed, hidden, bias=bias, rngs=rngs)
        self.up = Projection(embed, hidden, bias=bias, rngs=rngs)
        self.down = Projection(hidden, embed, bias=bias, rngs=rngs, std=out_std)

    def __call__(self, x_BRD: linear.Input) -> Float[Array, "B R D"]:
        gate, up = column_parallel(x_BRD, [self.gate, self.up], "mlp")
        gate = named(gate, "gate")
        up = named(up, "up")

        def hidden() -> Float[Array, "B S M"]:
            return constrain(silu_product(gate, up), "batch", "seq", "mlp")

        return row_parallel(hidden, self.down, "mlp")


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

    sharding: ClassVar[Sharding] = Projection.sharding
    activations: ClassVar[tuple[Activation, ...]] = ("up",)
    num_matrices: ClassVar[int] = 2

    def __init__(self, width: int, mlp: int, *, bias: bool, out_std: float, rngs: nnx.Rngs):
        embed = [("embed", width)]
        hidden = [("mlp", mlp)]
        self.up = Projection(embed, hidden, bias=bias, rngs=rngs)
        self.down = Projection(hidden, embed, bias=bias, rngs=rngs, std=out_std)

    def __call__(self, x_BRD: linear.Input) -> Float[Array, "B R D"]:
        (up,) = column_parallel(x_BRD, [self.up], "mlp")
        up = named(up, "up")

        def hidden() -> Float[Array, "B S M"]:
            return constrain(jax.nn.gelu(up), "batch", "seq", "mlp")

        return row_parallel(hidden, self.down, "mlp")


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
    if not planned():
        ctx = manual()
        return _dropped(x_BSD, rows_B, words, rate, ctx.residual_axes if ctx else ())

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
