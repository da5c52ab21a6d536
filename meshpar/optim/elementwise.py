"""Which optimizers update each element of a parameter by itself, as Adam does and Muon does not.

Such an optimizer computes the same if a stack of layers is cut into layers.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.interpreters import partial_eval

from meshpar.partition.rules import elementwise

OPERATIONS = {*elementwise.RULES, "broadcast_in_dim", "iota", "reshape", "squeeze"}


def is_elementwise(tx: optax.GradientTransformation, params: Any) -> bool:
    """Whether each element of an update depends on this element alone, and the state on gradients alone.

    Args:
      params: tree of arrays or structs.

    >>> is_elementwise(optax.sgd(0.1, momentum=0.9), {"w": jax.numpy.ones((2, 3))})
    True
    >>> is_elementwise(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), {"w": jax.numpy.ones((2, 3))})
    False
    """
    state = jax.eval_shape(tx.init, params)
    tree = jax.tree.structure(params)
    parts = jax.tree.leaves(state, is_leaf=lambda x: jax.tree.structure(x) == tree)
    if not all(jax.tree.structure(x) == tree or x.shape == () for x in parts):
        return False
    try:
        closed, shapes = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params)
    except (TypeError, ValueError):  # it needs the loss, or gradients elsewhere
        return False
    if not _is_elementwise(closed.jaxpr):
        return False
    num_params = len(jax.tree.leaves(params))
    num_updates = len(jax.tree.leaves(shapes[0]))
    of_state = [i >= num_updates for i in range(len(closed.jaxpr.outvars))]
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, of_state)
    return not any(used[len(used) - num_params :])


def _is_elementwise(jaxpr: Any) -> bool:
    return all(_is_allowed(eqn) for eqn in jaxpr.eqns)


def _is_allowed(eqn: Any) -> bool:
    inner = eqn.params.get("jaxpr")
    if inner is not None:
        return eqn.primitive.name in ("jit", "pjit") and _is_elementwise(getattr(inner, "jaxpr", inner))
    scalars = all(v.aval.shape == () for v in (*eqn.invars, *eqn.outvars))
    if eqn.primitive.name in ("broadcast_in_dim", "reshape", "squeeze"):
        return eqn.invars[0].aval.size == 1 or eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    return scalars or eqn.primitive.name in OPERATIONS
