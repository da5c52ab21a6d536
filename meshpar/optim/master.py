"""Parameters that the optimizer keeps for itself, wider than those that are stored and sent."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax


class MasterState(NamedTuple):
    """The wide parameters, and the state of the optimizer that updates them."""

    master: Any
    inner: Any


def with_master(tx: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformationExtraArgs:
    """An optimizer that works on a copy of the parameters in `dtype`; the parameters are roundings of it.

    In bfloat16 an update below 1/256 of a parameter is lost; in the copy it is kept. The copy is part of the
    optimizer's state: sharded from ZeRO-1 on, and in checkpoints.

    Numerics: what the copy and the parameter differ by is the update, so that the sum rounds to the copy's rounding.
    Memory: beside the state of `tx`, a copy of the parameters.
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
    wide = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)

    def init(params: Any) -> MasterState:
        return MasterState(wide(params), tx.init(wide(params)))

    def update(grads: Any, state: MasterState, params: Any = None, **extra: Any) -> tuple[Any, MasterState]:
        updates, inner = inner_tx.update(grads, state.inner, state.master, **extra)
        master = optax.apply_updates(state.master, updates)
        return jax.tree.map(lambda new, old: new - old.astype(dtype), master, params), MasterState(master, inner)  # pyright: ignore

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore
