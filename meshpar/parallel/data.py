"""Where a parameter is gathered and its gradient reduced: data parallelism, ZeRO 1, 2, 3, hybrid.

A ZeRO stage is nothing but the place of the gather. With n devices on the storage axes and P bytes of
parameters, sent per device and step:

| stage | stored | gathered | gradients | bytes |
|---|---|---|---|---|
| 0 | whole | never | all-reduce | 2(n-1)/n P |
| 1 | whole, optimizer sharded | after the update | reduce-scatter | 2(n-1)/n P |
| 2 | sharded | once a step, and kept | reduce-scatter, once | 2(n-1)/n P |
| 3 | sharded | in each layer, again in its backward | reduce-scatter in each layer | 3(n-1)/n P |

Outside the microbatch loop every parameter is cast to varying, so that autodiff leaves the gradients of one
device alone; `reduce_gradients` sums them once a step, whatever the number of microbatches. Stage 3's reduce-scatter
must stay in the layer, for never holding a whole gradient is what it is for. So does stage 2's where there is but one
microbatch: it gathers in the layer then, and keeps what it gathered. With several it gathers before their loop.
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
from meshpar.parallel.buckets import Copied, sum_copies
from meshpar.parallel.context import ParallelContext, current, manual
from meshpar.parallel.local import Axes, varying
from meshpar.parallel.precision import summed_in, wide
from meshpar.sharding.resolve import sharding_axes

Dims = tuple[str, ...]
Stored = tuple[tuple[int, Axes], ...]
"""(position of a dim, the axes over which it is stored), of those that are."""
Policy = Callable[..., bool]
_FREE = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "iota", "eq", "ge", "and"}


def gather_in_layer(params: Any, dims: Any) -> Any:
    """Gathers the parameters of one layer, where the layer uses them: ZeRO-3, and 2 without accumulation.

    `w[embed_f, mlp] -> w[embed, mlp]` for every dim that is stored over axes f, in the dtype of the computation.

    Args:
      params: any tree of local shards.
      dims: the same tree, of tuples of dim names.

    Communication: all-gather forward, (n-1)/n of the bytes; the transpose is a reduce-scatter, in float32 at least.
    Numerics: the gradient of a stored parameter is never rounded to the dtype of the computation.
    """
    ctx = manual()
    if ctx is None or not ctx.gathers_in_layers:
        return params
    return jax.tree.map(lambda x, names: _whole(x, names, ctx), params, dims)


def streamed(dims: Dims, ctx: ParallelContext | None) -> Stored:
    """Where the kernel of a layer's linear map is stored, if it is gathered while it is multiplied; else nothing.

    Args:
      dims: of the kernel, within its layer.
    """
    if ctx is None or not ctx.manual or ctx.parallel.fsdp.overlap == "none" or not ctx.gathers_in_layers:
        return ()
    stored = _stored(dims, ctx)
    return stored if len(stored) == 1 else ()


def gathering_again(policy: Policy) -> Policy:
    """A `jax.checkpoint` policy that keeps what `policy` keeps, but under ZeRO-3 never a gathered parameter.

    Without it the scan over layers would stack the whole parameters of all layers for the backward, as ZeRO-2 does.
    Views and masks are never kept either: they cost nothing to make, and a view of a gathered parameter would keep
    it alive. A collective matmul is kept where a plain one would be.
    """
    ctx = manual()

    def keeps(primitive: Any, *avals: Any, **params: Any) -> bool:
        if _is_all_gather(primitive, params):
            return ctx is not None and ctx.rules.zero_stage == 2
        if primitive.name == "name" and params["name"] == PRODUCT:
            return policy(lax.dot_general_p, *avals, dimension_numbers=(((), ()), ((), ())))
        return primitive.name not in _FREE and policy(primitive, *avals, **params)

    return keeps


def gather_params(params: Any, dims: Any, trainable: Any = None) -> Any:
    """The parameters that microbatches compute with, in the compute dtype: once a step, before their loop.

    Args:
      trainable: like the parameters, whether each has a gradient; default: all have.

    Communication: in the manual lowering ZeRO-2's all-gather, if there are several microbatches; else none.
    """
    ctx = _context()
    if not ctx.manual:
        return jax.tree.map(lambda x: x.astype(ctx.compute_dtype or x.dtype), params)

    def entered(x: jax.Array, names: Dims, is_trainable: bool) -> jax.Array:
        if ctx.gathers_in_layers and _stored(names, ctx):
            # It is cast where it is gathered: so its gradient comes in the dtype of the sums.
            return summed_in(x, ctx.accum_dtype) if is_trainable else x
        return _whole(x, names, ctx) if ctx.rules.zero_stage == 2 else x.astype(ctx.compute_dtype or x.dtype)

    trainable = jax.tree.map(lambda _: True, params) if trainable is None else trainable
    return jax.tree.map(lambda x, *of: varying(entered(x, *of), ctx.gradient_axes), params, dims, trainable)


def reduce_gradients(
    grads: Any,
    dims: Any,
    error_feedback: Any = None,
    *,
    key: jax.Array | None = None,
    order: Sequence[int] | None = None,
) -> tuple[Any, Any]:
    """The sum over all devices of the gradients of `gather_params`'s results; once a step, after the loop.

    Under GSPMD gradients are whole arrays already, and XLA sums them.

    Args:
      error_feedback: what a declared `Reduce` left in the last step: name -> tree like the gradients.
      key: for its stochastic rounding.
      order: of the gradients' leaves, in which the backward makes them; default: that of the tree.

    Returns:
      The sums, and what the next step gets, like `error_feedback`.

    Communication: reduce-scatter over the storage axes (ZeRO-1, 2), all-reduce over those over which the
      parameter is copied.
    """
    ctx = _context()
    if not ctx.manual:
        return grads, {}
    if ctx.rules.zero_stage and not ctx.gathers_in_layers:
        grads = jax.tree.map(lambda grad, names: _reduce_scatter_layers(grad, names, ctx), grads, dims)
    if ctx.gradient_reduction is None:
        return jax.tree.map(lambda grad, names: sum_gradient(grad, sum(ctx.copy_axes(names), ())), grads, dims), {}
    leaves, tree = jax.tree.flatten(grads)
    states = {name: tree.flatten_up_to(state) for name, state in (error_feedback or {}).items()}
    gradients = [
        Copied(grad, *ctx.copy_axes(names), {name: state[i] for name, state in states.items() if state[i] is not None})
        for i, (grad, names) in enumerate(zip(leaves, tree.flatten_up_to(dims), strict=True))
    ]
    summed, left = zip(*sum_copies(gradients, order or range(len(leaves)), ctx.gradient_reduction, key), strict=True)
    return tree.unflatten(summed), {name: tree.unflatten([state.get(name) for state in left]) for name in states}


def sum_gradient(grad: jax.Array, axes: Axes) -> jax.Array:
    """The sum of a gradient over the devices that have a copy of its parameter, by XLA's own collective."""
    return _psum(grad, axes)


def partial_sum(x: jax.Array) -> jax.Array:
    """`x`, typed as a sum over the tokens of one device alone, as a loss is. Communication: none."""
    ctx = _context()
    return varying(x, ctx.loss_axes) if ctx.manual else x


def summed(sums: Any) -> Any:
    """Sums of losses and counts over the devices that have other tokens; under GSPMD they are whole already.

    Communication: an all-reduce of the scalars over the loss axes.
    """
    ctx = _context()
    return _psum(sums, ctx.loss_axes) if ctx.manual else sums


def global_norm(grads: Any, placements: Any) -> jax.Array:
    """The norm of the whole gradient. From local shards, those with copies are counted in parts.

    Communication: in the manual lowering an all-reduce of one scalar over every axis that shards a parameter.
    """
    if not _context().manual:
        return jnp.sqrt(sum(map(_square, jax.tree.leaves(grads))))
    placed = jax.tree.leaves(placements)
    axes = sharding_axes(placed)
    shares = [_square(g) / p.copies(axes) for g, p in zip(jax.tree.leaves(grads), placed, strict=True)]
    return jnp.sqrt(_psum(sum(varying(share, axes) for share in shares), axes))


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(wide(x)).sum()


def _psum(x: Any, axes: Axes) -> Any:
    return lax.psum(x, axes) if axes else x


def _context() -> ParallelContext:
    ctx = current()
    assert ctx is not None, "only within a program"
    return ctx


def _stored(names: Dims, ctx: ParallelContext) -> Stored:
    return tuple((i, ctx.storage(name)) for i, name in enumerate(names) if ctx.storage(name))


def _whole(x: jax.Array, names: Dims, ctx: ParallelContext) -> jax.Array:
    to, stored = np.dtype(ctx.compute_dtype or x.dtype), _stored(names, ctx)
    if not stored:
        return x.astype(to)
    # Collectives run along the slowest dim. With the gathered dims in front no compiler has to lay what is kept for
    # the backward out anew: XLA:GPU did, and held a second copy of all layers' output projections.
    order = [i for i, _ in stored] + [i for i in range(x.ndim) if i not in dict(stored)]
    front = tuple((place, axes) for place, (_, axes) in enumerate(stored))
    whole: jax.Array = _all_gather(x.transpose(order), front, to, np.dtype(x.dtype), ctx.gradient_reduction)
    return whole.transpose(np.argsort(order))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _all_gather(x: jax.Array, stored: Stored, to: np.dtype, back: np.dtype, reduction: Reduce | None) -> jax.Array:
    """Gathers in dtype `to`; the gradient is summed as declared, and comes in `back`, the dtype of x."""
    x = x.astype(to)
    for dim, axes in stored:
        x = lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def _is_all_gather(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether a policy is asked about `_all_gather`: the only custom_vjp that ends with a collective."""
    if primitive.name != "custom_vjp_call":
        return False
    return params["call_jaxpr"].eqns[-1].primitive.name == "all_gather"


def _all_gather_backward(
    stored: Stored, to: np.dtype, back: np.dtype, reduction: Reduce | None, _: None, grad: jax.Array
) -> tuple[jax.Array]:
    # bf16 has 8 bits: a sum over hundreds of devices wants more, whatever the forward travels in.
    return (_reduce_scatter(grad.astype(back), stored, reduction),)


_all_gather.defvjp(lambda x, *settings: (_all_gather(x, *settings), None), _all_gather_backward)


def _reduce_scatter_layers(grad: jax.Array, names: Dims, ctx: ParallelContext) -> jax.Array:
    """One layer after the other: a stack would be laid out anew as a whole, which takes its size once more."""
    if names[0] != "layers" or not _stored(names, ctx):
        return _reduce_scatter(grad, _stored(names, ctx), ctx.gradient_reduction)
    return lax.map(lambda layer: _reduce_scatter(layer, _stored(names[1:], ctx), ctx.gradient_reduction), grad)


def _reduce_scatter(x: jax.Array, stored: Stored, reduction: Reduce | None) -> jax.Array:
    for dim, axes in reversed(stored):
        x = (
            reduction.scatter(x, axes, dim)
            if reduction
            else lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        )
    return x
