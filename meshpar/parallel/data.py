"""Where a parameter is gathered and its gradient reduced: data parallelism, ZeRO 1, 2, 3, hybrid.

A ZeRO stage is nothing but the place of the gather. With n devices on the storage axes and P bytes of
parameters, sent per device and step:

| stage | stored | gathered | gradients | bytes |
|---|---|---|---|---|
| 0 | whole | never | all-reduce | 2(n-1)/n P |
| 1 | whole, optimizer sharded | after the update | reduce-scatter | 2(n-1)/n P |
| 2 | sharded | once, before the microbatches | reduce-scatter, once | 2(n-1)/n P |
| 3 | sharded | in each layer, again in its backward | reduce-scatter in each layer | 3(n-1)/n P |

Outside the microbatch loop every parameter is cast to varying, so that autodiff leaves the gradients of one
device alone; `reduce` sums them once a step, whatever the number of microbatches. Only stage 3's
reduce-scatter must stay in the layer, for never holding a whole gradient is what stage 3 is for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax

from meshpar.parallel.local import Axes, varying
from meshpar.parallel.precision import wide
from meshpar.sharding.constrain import Lowering, manual

Dims = tuple[str, ...]
Policy = Callable[..., bool]
_FREE = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "iota", "eq", "ge", "and"}


def gather_in_layer(params: Any, dims: Any) -> Any:
    """Gathers the parameters of one layer, where the layer uses them: ZeRO-3, else the identity.

    `w[embed_f, mlp] -> w[embed, mlp]` for every dim that is stored over axes f.

    Args:
      params: any tree of local shards.
      dims: the same tree, of tuples of dim names.

    Communication: all-gather forward, (n-1)/n of the bytes; the transpose is a reduce-scatter of the same
      size, done in float32 at least.
    """
    how = manual()
    return _gather(params, dims, how) if how and how.rules.zero_stage == 3 else params


def gathering_again(policy: Policy) -> Policy:
    """A `jax.checkpoint` policy that keeps what `policy` keeps, but never a gathered parameter.

    Without it the scan over layers would stack the whole parameters of all layers for the backward. Views and
    masks are never kept either: they cost nothing to make, and a view of a gathered parameter would keep it alive.
    """

    def keeps(primitive: Any, *avals: Any, **params: Any) -> bool:
        if primitive.name in _FREE or _is_all_gather(primitive, params):
            return False
        return policy(primitive, *avals, **params)

    return keeps


def enter(params: Any, dims: Any) -> Any:
    """What the microbatches of a step compute with: once a step, before their loop.

    Communication: ZeRO-2's all-gather; else none.
    """
    how = _manual()
    whole = _gather(params, dims, how) if how.rules.zero_stage == 2 else params
    return jax.tree.map(lambda x: varying(x, summed_axes(how)), whole)


def reduce(grads: Any, dims: Any) -> Any:
    """The sum over all devices of what `enter`'s results got for gradients; once a step, after the loop.

    Communication: reduce-scatter over the storage axes (ZeRO-1, 2), all-reduce over those over which the
      parameter is copied.
    """
    how = _manual()
    return jax.tree.map(partial(_reduce_one, how=how), grads, dims)


def summed_axes(how: Lowering) -> Axes:
    """The axes over which devices see different tokens, so that gradients are summed over them."""
    return how.axes("batch") + how.axes("norm_seq")


def _manual() -> Lowering:
    how = manual()
    assert how is not None, "only within the manual lowering"
    return how


def _gather(params: Any, dims: Any, how: Lowering) -> Any:
    def gather(x: jax.Array, names: Dims) -> jax.Array:
        stored = tuple((i, how.storage(name)) for i, name in enumerate(names) if how.storage(name))
        return _all_gather(x, stored) if stored else x

    return jax.tree.map(gather, params, dims)


def _reduce_one(grad: jax.Array, names: Dims, how: Lowering) -> jax.Array:
    stored = tuple((i, how.storage(name)) for i, name in enumerate(names) if how.storage(name))
    if how.rules.zero_stage in (1, 2):
        grad = _reduce_scatter(grad, stored)
    sharded = {axis for name in names for axis in how.storage(name) + how.axes(name)}
    copies = tuple(axis for axis in summed_axes(how) if axis not in sharded)
    return lax.psum(grad, copies) if copies else grad


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _all_gather(x: jax.Array, stored: tuple[tuple[int, Axes], ...]) -> jax.Array:
    for dim, axes in stored:
        x = lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def _is_all_gather(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether a policy is asked about `_all_gather`: the only custom_vjp that begins with a collective."""
    if primitive.name != "custom_vjp_call":
        return False
    return params["call_jaxpr"].eqns[0].primitive.name == "all_gather"


def _all_gather_backward(stored: tuple[tuple[int, Axes], ...], _: None, grad: jax.Array) -> tuple[jax.Array]:
    # bf16 has 8 bits: a sum over hundreds of devices wants more, whatever the forward travels in.
    return (_reduce_scatter(wide(grad), stored).astype(grad.dtype),)


_all_gather.defvjp(lambda x, stored: (_all_gather(x, stored), None), _all_gather_backward)


def _reduce_scatter(x: jax.Array, stored: tuple[tuple[int, Axes], ...]) -> jax.Array:
    for dim, axes in reversed(stored):
        x = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return x
