"""The exponential moving average of the parameters, which evaluations and exports use."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshpar.parallel.precision import wide
from meshpar.parallel.trainable import filled


class EmaState(NamedTuple):
    """The average, the number of updates in it, and the state of the wrapped optimizer."""

    ema: Any
    num_updates: jax.Array
    inner: Any


def with_ema(tx: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its state also holds an average of the parameters. Updates do not change.

    After t updates the average is `sum(decay^(t-i) p_i) / sum(decay^(t-i))` over i = 1..t. It is unbiased from the
    first update on, because it excludes the initial parameters. It is a part of the optimizer's state, so ZeRO-1 shards
    it, and checkpoints save it.

    Args:
      decay: in (0, 1); about 1 / (1 - decay) updates are averaged.

    Numerics: at least float32, whatever dtype the parameters are stored in.
    Memory: a copy of the parameters in addition to the state of `tx`. Communication: none.
    Source: Polyak and Juditsky 1992, doi:10.1137/0330046; unbiased as in Kingma and Ba 2015, arXiv:1412.6980.

    >>> tx, params = with_ema(optax.sgd(1.0), 0.5), {"w": jnp.zeros(1)}
    >>> state = tx.init(params)
    >>> for _ in range(2):  # the parameters are 1 and 2, with weights 1/3 and 2/3
    ...     updates, state = tx.update({"w": -jnp.ones(1)}, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> print(state.ema["w"].round(4))
    [1.6667]
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> EmaState:
        return EmaState(jax.tree.map(wide, params), jnp.int32(0), tx.init(params))

    def update(grads: Any, state: EmaState, params: Any = None, **extra: Any) -> tuple[Any, EmaState]:
        updates, inner_state = inner.update(grads, state.inner, params, **extra)
        num_updates = state.num_updates + 1

        def mix(old: jax.Array, param: jax.Array, change: jax.Array) -> jax.Array:
            return old + newest_weight(decay, num_updates, old.dtype) * (wide(param) + wide(change) - old)

        return updates, EmaState(jax.tree.map(mix, state.ema, params, updates), num_updates, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


def averaged(state: Any) -> Any:
    """The parameters that evaluation and export use: their average with `optim.ema`, else the parameters themselves.

    Args:
      state: a `TrainState` of arrays, structs or placements.

    Returns:
      A tree like `state.params`. An average is in float32 at least. Parameters that are never trained are unchanged.
    """
    nodes = jax.tree.leaves(state.opt_state, is_leaf=lambda node: isinstance(node, EmaState))
    average = next((node.ema for node in nodes if isinstance(node, EmaState)), state.params)
    return filled(average, state.params)  # there is no average of parameters that are never trained


def newest_weight(decay: float, count: jax.Array, dtype: Any) -> jax.Array:
    """`(1 - decay) / (1 - decay^count)`, computed without cancellation for a decay near 1."""
    return (1 - decay) / -jnp.expm1(count.astype(dtype) * math.log(decay))
