"""Gathers parameters and reduces gradients: data parallelism, ZeRO 1, 2, 3, hybrid.

ZeRO stages differ only in where parameters are gathered. With n devices on the storage axes and P bytes of
parameters, sent per device and step:

| stage | stored | gathered | gradients | bytes |
|---|---|---|---|---|
| 0 | whole | never | all-reduce | 2(n-1)/n P |
| 1 | whole, optimizer sharded | after the update | reduce-scatter | 2(n-1)/n P |
| 2 | sharded | once a step, then held | reduce-scatter, once | 2(n-1)/n P |
| 3 | sharded | in each layer, again in its backward | reduce-scatter in each layer | 3(n-1)/n P |

Before the microbatch loop every parameter is typed as varying, so autodiff does not sum gradients over devices;
`reduce_gradients` sums them once a step, for any number of microbatches. Stage 3 always reduce-scatters in the layer,
because it must never hold a whole gradient. Stage 2 with one microbatch gathers and reduce-scatters in the layer too,
and holds the gathered parameters for the backward. With several microbatches it gathers before the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.collectives.matmul import PRODUCT
from meshpar.collectives.reduction import Reduce
from meshpar.mesh.varying import Axes, varies_over, varying, varying_like
from meshpar.parallel.buckets import Copied, sum_copies
from meshpar.parallel.context import ParallelContext, current, manual
from meshpar.parallel.precision import Mixed, computed_in, is_mixed, sum_dtype, wide
from meshpar.sharding.resolve import sharding_axes

Dims = tuple[str, ...]
Stored = tuple[tuple[int, Axes], ...]
"""(position of a dim, the axes over which it is stored), for each dim that is stored in shards."""
Policy = Callable[..., Any]
_FREE = {
    "broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "dynamic_slice", "concatenate", "iota", "eq", "ge",
    "and",
}  # fmt: skip
_ELEMENTWISE = {
    "add", "sub", "mul", "div", "neg", "max", "min", "square", "integer_pow", "sqrt", "rsqrt", "exp", "log", "logistic",
    "tanh", "erf", "select_n", "convert_element_type",
}  # fmt: skip
CHEAP = _FREE | _ELEMENTWISE | {"reduce_sum"}
"""Primitives whose results no layer saves: the backward computes them again from what is saved."""


def gather_in_layer(params: Any, dims: Any) -> Any:
    """Gathers the parameters of one layer where the layer uses them: ZeRO-3, and ZeRO-2 with one microbatch.

    `w[embed_f, mlp] -> w[embed, mlp]` for every dim that is stored over axes f, in the compute dtype.

    Args:
      params: a tree of local shards.
      dims: the same tree, of tuples of dim names.

    Communication: an all-gather forward, (n-1)/n of the bytes; backward a reduce-scatter, in at least float32.
    Numerics: the gradient of a stored parameter is not rounded to the compute dtype.
    """
    ctx = manual()
    if ctx is None or not ctx.gathers_in_layers:
        return params
    return jax.tree.map(lambda x, names: _whole(x, names, ctx), params, dims, is_leaf=is_mixed)


def gathering_again(policy: Policy) -> Policy:
    """A `jax.checkpoint` policy that saves what `policy` saves, except gathered parameters under ZeRO-3.

    Without it the scan over layers would stack the gathered parameters of all layers for the backward, as ZeRO-2 does.
    Views, masks, elementwise operations and sums are not saved either: they cost little to recompute, and a view of a
    gathered parameter would hold its memory. If `policy` saves products, a product that needs communication is saved
    after the communication. Complex numbers are not saved, because JAX cannot (`jax.checkpoint` rounds what it saves by
    `reduce_precision`, which refuses them: jax 0.10.2): the backward computes them again.
    """
    ctx = manual()

    def saves(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive.name == "complex" or any(map(_is_complex, (*avals, params.get("new_dtype")))):
            return False
        if primitive.name == "custom_vjp_call":
            last = params["call_jaxpr"].eqns[-1]
            # Only `_all_gather` ends with a collective, and only `partition.matmul` with a product.
            if last.primitive.name == "all_gather":
                return ctx is not None and ctx.rules.zero_stage == 2
            if last.primitive is lax.dot_general_p:
                return policy(last.primitive, *avals, **last.params)
            if last.primitive.name in CHEAP:
                return False
        if primitive is lax.dot_general_p and avals[0].dtype.itemsize == 1:
            return False  # its scaled result has the name of a product
        if primitive.name == "name" and params["name"] == PRODUCT:
            return policy(lax.dot_general_p, *avals, dimension_numbers=(((), ()), ((), ())))
        return primitive.name not in CHEAP and policy(primitive, *avals, **params)

    return saves


def _is_complex(x: Any) -> bool:
    """Whether an abstract value or a dtype is complex."""
    dtype = getattr(x, "dtype", x)
    return dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)


def gather_params(params: Any, dims: Any, trainable: Any = None) -> Any:
    """Prepares the parameters for the microbatches, in the compute dtype; runs once a step, before the loop.

    Args:
      trainable: tree like the parameters: whether each has a gradient. Default: none has one.

    Communication: with ZeRO-2 and several microbatches an all-gather in the manual lowering; else none.
    """
    ctx = current()
    if ctx is None:
        return params  # a loss that is traced for one device
    if not ctx.manual:
        return jax.tree.map(lambda x: computed_in(x, ctx.compute_dtype or x.dtype), params)

    def prepare(x: jax.Array, names: Dims, is_trainable: bool) -> Any:
        if ctx.gathers_in_layers and _stored(names, ctx):
            return _mixed(x, ctx) if is_trainable else x
        return _whole(x, names, ctx) if ctx.rules.zero_stage == 2 else computed_in(x, ctx.compute_dtype or x.dtype)

    trainable = jax.tree.map(lambda _: False, params) if trainable is None else trainable
    prepared = jax.tree.map(prepare, params, dims, trainable)
    return jax.tree.map(lambda x: varying(x, ctx.gradient_axes), prepared)


def reduce_gradients(
    grads: Any,
    dims: Any,
    error_feedback: Any = None,
    *,
    key: jax.Array | None = None,
    order: Sequence[int] | None = None,
) -> tuple[Any, Any]:
    """Sums the gradients of `gather_params`'s results over all devices; runs once a step, after the loop.

    Under GSPMD gradients are global arrays, which XLA has summed already.

    Args:
      error_feedback: the state of a declared `Reduce` after the last step: name -> tree like the gradients.
      key: for the stochastic rounding of the reduction.
      order: indices of the gradients' leaves, in the order in which the backward computes them. Default: tree order.

    Returns:
      The sums, and the new `error_feedback`.

    Communication: a reduce-scatter over the storage axes (ZeRO-1, 2), and an all-reduce over the axes over which the
      parameter is replicated.
    """
    ctx = _context()
    if not ctx.manual:
        return grads, {}
    if not ctx.gathers_in_layers:
        grads = jax.tree.map(partial(_reduce_scatter_layers, ctx), grads, dims)
    if ctx.gradient_reduction is None:
        return jax.tree.map(lambda grad, names: sum_gradient(grad, sum(ctx.copy_axes(names), ())), grads, dims), {}
    leaves, tree = jax.tree.flatten(grads)
    states = {name: tree.flatten_up_to(state) for name, state in (error_feedback or {}).items()}
    gradients = [
        Copied(grad, *ctx.copy_axes(names), {name: state[i] for name, state in states.items() if state[i] is not None})
        for i, (grad, names) in enumerate(zip(leaves, tree.flatten_up_to(dims), strict=True))
    ]
    results = sum_copies(gradients, order or range(len(leaves)), ctx.gradient_reduction, key)
    left = {name: tree.unflatten([state.get(name) for _, state in results]) for name in states}
    return tree.unflatten([total for total, _ in results]), left


def sum_gradient(grad: jax.Array, axes: Axes) -> jax.Array:
    """Sums a gradient over the devices that hold a copy of its parameter, by XLA's own collective."""
    return _psum(grad, axes)


def partial_sum(sums: Any) -> Any:
    """Types numbers as sums over the tokens of one device, as a loss is. Communication: none."""
    ctx = _context()
    return jax.tree.map(lambda x: varying(jnp.asarray(x), ctx.loss_axes), sums) if ctx.manual else sums


def summed(sums: Any) -> Any:
    """Sums losses and counts over the devices that hold different tokens.

    One whose type is the same along an axis is whole there, such as a number of rows that is known without data.

    Communication: an all-reduce of the scalars over the loss axes; none under GSPMD, where they are global sums.
    """
    ctx = _context()

    def whole(x: jax.Array) -> jax.Array:
        return _psum(x, tuple(axis for axis in ctx.loss_axes if axis in varies_over(x)))

    return jax.tree.map(whole, sums) if ctx.manual else sums


def global_norm(grads: Any, placements: Any) -> jax.Array:
    """The norm of the whole gradient. Local shards with n copies count 1/n each.

    Communication: in the manual lowering an all-reduce of one scalar over every axis that shards a parameter.
    """
    if not _context().manual:
        return jnp.sqrt(sum(map(_square, jax.tree.leaves(grads))))
    placed = jax.tree.leaves(placements)
    axes = sharding_axes(placed)
    shares = [_square(g) / p.copies(axes) for g, p in zip(jax.tree.leaves(grads), placed, strict=True)]
    return jnp.sqrt(_psum(sum(varying(share, axes) for share in shares), axes))


def _square(x: jax.Array) -> jax.Array:
    return (jnp.square(x.real) + jnp.square(x.imag)).sum() if _is_complex(x) else jnp.square(wide(x)).sum()


def _psum(x: Any, axes: Axes) -> Any:
    return lax.psum(x, axes) if axes else x


def _context() -> ParallelContext:
    ctx = current()
    assert ctx is not None, "call this only inside a traced program"
    return ctx


def _stored(names: Dims, ctx: ParallelContext) -> Stored:
    return tuple((i, ctx.storage(name)) for i, name in enumerate(names) if ctx.storage(name))


def _mixed(x: jax.Array, ctx: ParallelContext) -> jax.Array | Mixed:
    """A shard whose gradient has the dtype of the sums. Its cast to the compute dtype follows where it is gathered."""
    dtype = sum_dtype(x.dtype, ctx.accum_dtype)
    # Stages of a pipeline, and products that gather in chunks, differentiate arrays.
    if dtype == x.dtype or ctx.schedule or ctx.parallel.fsdp.in_chunks:
        return x.astype(dtype)
    return Mixed(x, varying_like(jnp.zeros(x.shape, dtype), x))


def _whole(param: jax.Array | Mixed, names: Dims, ctx: ParallelContext) -> jax.Array:
    return gathered(param, _stored(names, ctx), ctx)


def gathered(param: jax.Array | Mixed, stored: Stored, ctx: ParallelContext) -> jax.Array:
    """A parameter in the compute dtype, gathered over the axes over which its dims are stored in shards.

    Communication: as `gather_in_layer`.
    """
    x = param.stored if isinstance(param, Mixed) else param
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    to = np.dtype(ctx.compute_dtype or x.dtype) if is_float else np.dtype(x.dtype)
    if not stored:
        return x.astype(to)
    # Collectives run along the slowest dim. With the gathered dims in front, the compiler need not change the layout of
    # values that are saved for the backward. XLA:GPU held a second copy of all layers' output projections otherwise.
    order = [i for i, _ in stored] + [i for i in range(x.ndim) if i not in dict(stored)]
    front = tuple((place, axes) for place, (_, axes) in enumerate(stored))
    x = x.transpose(order)
    variable = param.zeros.transpose(order) if isinstance(param, Mixed) else x
    whole: jax.Array = _all_gather(x, variable, front, to, np.dtype(variable.dtype), ctx.layer_reduction)
    return whole.transpose(np.argsort(order))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _all_gather(
    x: jax.Array, variable: jax.Array, stored: Stored, to: np.dtype, back: np.dtype, reduction: Reduce | None
) -> jax.Array:
    """Gathers x in dtype `to`. The gradient is that of `variable`, and is summed by `reduction` in its dtype `back`."""
    x = x.astype(to)
    for dim, axes in stored:
        x = lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def _all_gather_backward(
    stored: Stored, to: np.dtype, back: np.dtype, reduction: Reduce | None, _: None, grad: jax.Array
) -> tuple[None, jax.Array]:
    # bf16 has 8 bits of precision, too few for a sum over hundreds of devices.
    return None, _reduce_scatter(grad.astype(back), stored, reduction)


_all_gather.defvjp(lambda *arguments: (_all_gather(*arguments), None), _all_gather_backward)


def _reduce_scatter_layers(ctx: ParallelContext, grad: jax.Array, names: Dims) -> jax.Array:
    """Scatters stacked layers one by one. XLA would copy the whole stack to another layout, in a second buffer."""
    stored = _stored(names, ctx)
    if not stored or names[0] != "layers":
        return _reduce_scatter(grad, stored, ctx.gradient_reduction)
    in_layer = _stored(names[1:], ctx)
    return lax.map(lambda layer: _reduce_scatter(layer, in_layer, ctx.gradient_reduction), grad)


def _reduce_scatter(x: jax.Array, stored: Stored, reduction: Reduce | None) -> jax.Array:
    for dim, axes in reversed(stored):
        if reduction:
            x = reduction.scatter(x, axes, dim)
        else:
            x = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return x
