"""Master weights: a copy of the parameters in a wider dtype, in the optimizer's state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax


class MasterState(NamedTuple):
    """The wide parameters, and the state of the optimizer that updates them."""

    master: Any
    inner: Any


def with_master(tx: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it updates a copy of the parameters in `dtype`; the parameters are the rounded copy.

    In bfloat16 an update below 1/256 of a parameter is lost; the copy accumulates it. The copy is a part of the
    optimizer's state, so ZeRO-1 shards it, and checkpoints save it.

    Numerics: the returned update is the copy minus the parameter, so that adding it and rounding gives the rounded
      copy.
    Memory: a copy of the parameters in addition to the state of `tx`.
    Source: Micikevicius et al. 2018, arXiv:1710.03740.

    >>> import jax.numpy as jnp
    >>> tx, params = with_master(optax.sgd(1.0), jnp.float32), {"w": jnp.ones(1, jnp.bfloat16)}
    >>> state = tx.init(params)
    >>> for _ in range(4):
    ...     updates, state = tx.update({"w": jnp.full(1, 1e-3)}, state, params)
    ...     with jax.numpy_dtype_promotion("standard"):
    ...         params = optax.apply_updates(params, updates)
    >>> print(state.master["w"].round(4), params["w"])
    [0.996] [0.996094]
    """
    inner_tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> MasterState:
        master = jax.tree.map(lambda x: x.astype(dtype), params)
        return MasterState(master, tx.init(master))

    def update(grads: Any, state: MasterState, params: Any = None, **extra: Any) -> tuple[Any, MasterState]:
        updates, inner = inner_tx.update(grads, state.inner, state.master, **extra)
        master = optax.apply_updates(state.master, updates)
        changes = jax.tree.map(lambda new, old: new - old.astype(dtype), master, params)
        return changes, MasterState(master, inner)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore
