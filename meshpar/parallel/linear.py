"""Linear maps of local shards, with communication that can overlap the products.

A block's first maps are column parallel, its last is row parallel. Between them a dim is sharded over axes t:

    column_parallel: x[B, S, D] @ w[D, N_t] -> y[B, S, N]               `tensor.enter_region`, then the products
    row_parallel: h[B, S, N] {shard of N} @ w[N_t, D] -> y[B, S, D]  the product, then `tensor.exit_region`

With sequence parallelism the maps communicate x or y, of which each device holds S_t. With ZeRO-3 they gather the
weights, in D or in N. Either communication can overlap the product, which is then computed in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshpar.collectives.matmul import PRODUCT, all_gather_matmul, matmul_reduce_scatter
from meshpar.collectives.ring import Ring
from meshpar.mesh.varying import Axes, varying_alike
from meshpar.parallel import tensor
from meshpar.parallel.context import Format, manual, manual_axes, platform
from meshpar.parallel.data import Stored

# Letters for the dims in einsum equations.
_BATCH = "bs"
_INPUTS = "ijk"
_OUTPUTS = "xyz"
_RANK = "r"

Input = jax.Array | Callable[[], jax.Array]
"""An array, or a function that computes it from other arrays, such as a norm or an activation function.

The backward calls the function again instead of saving its result, if that repeats no product and no communication.
"""
Products = tuple[jax.Array, ...]

MANY_TOKENS = 1024
"""With at least this many tokens, the gradient of a weight is computed as a product of matrices; see `_by_token`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapter:
    """A low-rank term of a linear map, as LoRA's: `scale * x @ a @ b`.

    Args:
      a: [inputs..., rank].
      b: [rank, outputs...].
      used: bool [batch, rank], which columns of x @ a the rows of x use; None if all rows use all.
    """

    a: Any  # arrays; JAX also builds it with placeholders
    b: Any
    scale: float = field(metadata={"static": True})
    used: Any = None

    def term(self, x: jax.Array) -> jax.Array:
        """The term of x[..., inputs...]."""
        return self.of(jnp.tensordot(x, self.a, axes=self.a.ndim - 1))

    def of(self, thin: jax.Array) -> jax.Array:
        """The term, where `thin` [batch, seq, rank] is x @ a."""
        return self.scaled(jnp.tensordot(self.chosen(thin), self.b, axes=1))

    def chosen(self, thin: jax.Array) -> jax.Array:
        """The columns of x @ a that each row uses, and zeros for the others."""
        return thin if self.used is None else jnp.where(self.used[:, None, :], thin, jnp.zeros_like(thin))

    def scaled(self, x: jax.Array) -> jax.Array:
        return x * jnp.asarray(self.scale, x.dtype)


class Weights(NamedTuple):
    """The weights of a linear map.

    Args:
      kernel: [inputs..., outputs...].
      num_inputs: how many of the kernel's dims are contracted.
      stored: the dim and axes over which the kernel is gathered during the product, see `data.streamed`.
      adapter: a term that is added to the product. If the kernel's inputs are sharded, the term is a partial sum too.
      number_format: the 8-bit format in which the kernel is multiplied; None for the dtype of x.
    """

    kernel: jax.Array
    num_inputs: int = 1
    stored: Stored = ()
    adapter: Adapter | None = None
    number_format: Format | None = None

    @property
    def dims(self) -> str:
        """A letter for each dim of the kernel."""
        return _INPUTS[: self.num_inputs] + _OUTPUTS[: self.kernel.ndim - self.num_inputs]

    @property
    def equation(self) -> str:
        """The equation of `einsum(x, kernel)`, where x is [batch, seq, inputs...]."""
        inputs = self.dims[: self.num_inputs]
        outputs = self.dims[self.num_inputs :]
        return f"{_BATCH}{inputs},{self.dims}->{_BATCH}{outputs}"

    @property
    def thin_equation(self) -> str:
        """The equation of `einsum(x, adapter.a)`."""
        inputs = self.dims[: self.num_inputs]
        return f"{_BATCH}{inputs},{inputs}{_RANK}->{_BATCH}{_RANK}"

    @property
    def rank_equation(self) -> str:
        """The equation of `einsum(thin, adapter.b)`."""
        outputs = self.dims[self.num_inputs :]
        return f"{_BATCH}{_RANK},{_RANK}{outputs}->{_BATCH}{outputs}"


def column_parallel(x: Input, maps: Sequence[Weights], dim: str) -> tuple[jax.Array, ...]:
    """Column parallel: multiplies x by each of several weights whose `dim` is sharded.

    Args:
      x: [batch, residual_seq, inputs...].
      maps: weights whose kernels have equally many dims.
      dim: the weights' dim that is sharded.

    Returns:
      [batch, seq, outputs...] for each weight.

    Communication: that of `tensor.enter_region`; overlapped, that of `all_gather_matmul`, which sends the chunks of x
      again in the backward.
    """
    ring = _sequence_ring(dim)
    if ring is None:

        def entered() -> jax.Array:
            return tensor.enter_region(_computed(x), dim)

        is_gathered = bool(manual_axes("residual_seq"))  # then the backward would gather it again
        return _products(entered if callable(x) and not is_gathered else entered(), maps, outputs=manual_axes(dim))
    x = _computed(x)
    adapted = [one for one in maps if one.adapter]
    equations = [one.equation for one in maps] + [one.thin_equation for one in adapted]
    weights = [one.kernel for one in maps] + [one.adapter.a for one in adapted if one.adapter]
    found = iter(all_gather_matmul(equations, x, weights, ring, dim=_BATCH[tensor.SEQ]))
    products = [next(found) for _ in maps]
    return tuple(y + one.adapter.of(next(found)) if one.adapter else y for one, y in zip(maps, products, strict=True))


def row_parallel(x: Input, weights: Weights, dim: str) -> jax.Array:
    """Row parallel: multiplies x by weights whose `dim` is sharded and contracted.

    Args:
      x: [batch, seq, inputs...], a local shard in `dim`.

    Returns:
      [batch, residual_seq, outputs...].

    Communication: that of `tensor.exit_region`; overlapped, that of `matmul_reduce_scatter`, which sends as much.
    """
    ring = _sequence_ring(dim)
    if ring is None:
        (product,) = _products(x, [weights], inputs=manual_axes(dim))
        # A policy that saves products saves this sum: partial sums are larger, and would be summed again.
        return checkpoint_name(tensor.exit_region(product, dim), PRODUCT)
    x = _computed(x)
    plus = []
    if adapter := weights.adapter:
        thin = jnp.einsum(weights.thin_equation, x, adapter.a)
        plus = [(weights.rank_equation, adapter.scaled(adapter.chosen(thin)), adapter.b)]
    return matmul_reduce_scatter(weights.equation, x, weights.kernel, ring, dim=_BATCH[tensor.SEQ], plus=plus)


def _computed(x: Input) -> jax.Array:
    return x() if callable(x) else x


def _products(x: Input, maps: Sequence[Weights], *, inputs: Axes = (), outputs: Axes = ()) -> Products:
    def products() -> Products:
        return _with_adapters(_computed(x), maps, inputs=inputs, outputs=outputs)

    return jax.checkpoint(products)() if _computes_again(x, maps) else products()


def _computes_again(x: Input, maps: Sequence[Weights]) -> bool:
    """Whether the backward computes x again, and nothing else but x.

    With adapters it would compute their first product too, in 8 bits convert x, and under GSPMD XLA may gather x.
    """
    is_plain = not any(one.adapter or one.number_format or one.stored for one in maps)
    return callable(x) and is_plain and manual() is not None


def _with_adapters(x: jax.Array, maps: Sequence[Weights], *, inputs: Axes = (), outputs: Axes = ()) -> Products:
    if number_format := maps[0].number_format:
        shards = (manual_axes("batch") + manual_axes("seq"), inputs, outputs)
        products = _quantized_products(x, maps, number_format, shards)
    elif _are_joint(x, maps):
        products = _matrix_products(x, maps)
    else:
        products = tuple(product(x, one) for one in maps)
    return tuple(_plus_adapter(y, x, one) for y, one in zip(products, maps, strict=True))


def _plus_adapter(product: jax.Array, x: jax.Array, weights: Weights) -> jax.Array:
    return product + weights.adapter.term(x) if weights.adapter else product


def _quantized_products(
    x: jax.Array, maps: Sequence[Weights], number_format: Format, shards: tuple[Axes, Axes, Axes]
) -> Products:
    """x @ kernel for each kernel, in 8 bits. Communication: that of `quantized.matmuls`."""
    from meshpar.parallel import quantized  # and Qwix, which other runs do not need

    outputs = [one.kernel.shape[one.num_inputs :] for one in maps]
    matrices = [one.kernel.reshape(-1, math.prod(shape)) for one, shape in zip(maps, outputs, strict=True)]
    products = quantized.matmuls(x.reshape(*x.shape[:2], -1), matrices, number_format, quantized.Shards(*shards))
    return tuple(y.reshape(*x.shape[:2], *shape) for y, shape in zip(products, outputs, strict=True))


def product(x: jax.Array, weights: Weights) -> jax.Array:
    """x @ kernel, of local shards. A kernel that is stored in shards is gathered during the product.

    Communication: none, or that of `all_gather_matmul`: an all-gather forward, and backward another and a
      reduce-scatter of the gradient.
    """
    if not weights.stored and manual() is None:  # GSPMD partitions a product best as it is written
        return jnp.tensordot(x, weights.kernel, axes=weights.num_inputs)
    if not weights.stored:
        return _matrix_products(x, [weights])[0]
    ctx = manual()
    assert ctx is not None, "parameters are stored in shards only in the manual lowering"
    [(position, axes)] = weights.stored
    of_x, of_kernel, of_y = weights.equation.replace("->", ",").split(",")
    ring = Ring(axes, both_ways=ctx.parallel.fsdp.overlap == "bidirectional")
    equation = f"{of_kernel},{of_x}->{of_y}"
    return all_gather_matmul(equation, weights.kernel, [x], ring, dim=of_kernel[position])[0]


def _are_joint(x: jax.Array, maps: Sequence[Weights]) -> bool:
    """Whether one product for all maps is faster: on CPUs, if the maps together are narrower than x.

    The backward of separate products adds a gradient of x for each map; that of one product joins the maps' gradients.
    """
    if len(maps) == 1 or manual() is None or platform() != "cpu" or any(one.stored for one in maps):
        return False
    inputs = math.prod(x.shape[2:])
    return sum(one.kernel.size for one in maps) < inputs**2


def _matrix_products(x: jax.Array, maps: Sequence[Weights]) -> Products:
    """x @ kernel for each kernel, as one product. Communication: none.

    Kernels are matrices here: XLA:CPU would copy a kernel of more than two dims before a product with its transpose.
    """
    outputs = [one.kernel.shape[one.num_inputs :] for one in maps]
    matrices = [one.kernel.reshape(-1, math.prod(shape)) for one, shape in zip(maps, outputs, strict=True)]
    joint: jax.Array = matmul(*varying_alike(x.reshape(*x.shape[:2], -1), *matrices))
    products = _cut(joint, matrices) if len(maps) > 1 else [joint]
    return tuple(y.reshape(*x.shape[:2], *shape) for y, shape in zip(products, outputs, strict=True))


@jax.custom_vjp
def matmul(x: jax.Array, *kernels: jax.Array) -> jax.Array:
    """`x[..., K] @ w[K, N] -> y[..., N]`, where w is the concatenation of several kernels [K, N_i].

    The backward transposes the smaller of x and dy for the gradient of w. It concatenates the kernels again, so that
    remat and ZeRO-3 need not store w.
    """
    return lax.dot_general(x, jnp.concatenate(kernels, axis=1), (((x.ndim - 1,), (0,)), ((), ())))


def _matmul_backward(saved: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, ...]:
    x, *kernels = saved
    w_KN = jnp.concatenate(kernels, axis=1)
    dx = lax.dot_general(dy, w_KN, (((dy.ndim - 1,), (1,)), ((), ())))
    x = _by_token(x)
    dy = _by_token(dy)
    tokens = tuple(range(x.ndim - 1))
    over_tokens = ((tokens, tokens), ((), ()))
    if w_KN.shape[0] <= w_KN.shape[1]:
        dw_KN = lax.dot_general(x, dy, over_tokens)
    else:
        dw_KN = lax.dot_general(dy, x, over_tokens).T
    return dx, *_cut(dw_KN, kernels)


matmul.defvjp(lambda x, *kernels: (matmul(x, *kernels), (x, *kernels)), _matmul_backward)


def _by_token(x: jax.Array) -> jax.Array:
    """[tokens, N] where there are many tokens.

    XLA:CPU copies the transpose of a left operand of three dims. That takes up to a fifth of the product's time for
    2048 tokens, and half or more for 4096. It does not copy an operand of two dims, but that product is 3 % slower for
    512 tokens.
    """
    return x.reshape(-1, x.shape[-1]) if math.prod(x.shape[:-1]) >= MANY_TOKENS else x


def _cut(joint: jax.Array, kernels: Sequence[jax.Array]) -> list[jax.Array]:
    """Cuts the last dim into parts as wide as each kernel."""
    ends = np.cumsum([kernel.shape[1] for kernel in kernels])
    return jnp.split(joint, ends[:-1], axis=-1)


def _sequence_ring(dim: str) -> Ring | None:
    """The ring along which chunks of the sequence travel; None if communication does not overlap the product."""
    ctx = manual()
    if ctx is None or not ctx.overlaps(dim):
        return None
    return Ring(ctx.axes(dim), both_ways=ctx.parallel.tensor.overlap == "bidirectional")
