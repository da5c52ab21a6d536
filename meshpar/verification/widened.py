"""Evaluates a user's loss in float64 if the model asks for a dtype of its own, so that rounding hides nothing.

The loss is traced, and each operation is bound again with wide dtypes. The wide loss is then partitioned as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from meshpar.cost.walk import inner_jaxprs
from meshpar.errors import VerificationError
from meshpar.partition.rules.loops import scan_counts
from meshpar.train.loss import LossSums

WIDE: dict[Any, np.dtype[Any]] = {np.dtype(one): np.dtype("float64") for one in ("float16", "float32", jnp.bfloat16)}
WIDE[np.dtype("complex64")] = np.dtype("complex128")
_NARROW = {np.dtype("float64"): np.dtype("float32"), np.dtype("complex128"): np.dtype("complex64")}
CALLED = {"jit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
"""Operations that call a program once -> the parameter that holds it. A JVP of its own is replaced by the program's."""
SCATTERS: dict[str, Callable[..., jax.Array]] = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}
"""Operations whose programs are those of their names."""


def in_float64(loss: Callable[..., LossSums]) -> Callable[..., LossSums]:
    """The same loss. If any of its floats is no float64, though its arguments are, all are computed in float64.

    Raises:
      VerificationError: a part of such a loss has its own gradient, or is a kernel, so its dtype cannot be changed.
    """

    def wide(*args: Any) -> Any:
        try:
            closed, result = jax.make_jaxpr(loss, return_shape=True)(*args)
        except TypeError:  # a loop begins with float32, and computes with the parameters
            closed, result = _in_32_bits(loss, args)
        if not _has_narrow(closed.jaxpr):
            return loss(*args)
        try:
            leaves = _evaluate(closed.jaxpr, closed.consts, *jax.tree.leaves(args))
        except VerificationError:
            if result.loss.dtype in WIDE:
                raise
            return loss(*args)
        found = jax.tree.unflatten(jax.tree.structure(result), leaves)
        # A run's state keeps the dtype that the model gave it, as Flax's statistics of batches do.
        return replace(found, carried=jax.tree.map(lambda x, old: x.astype(old.dtype), found.carried, args[3]))

    return wide


def of_model(init: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """The same initializer of parameters or carried state; in 32 bits if the model cannot be traced with float64."""

    def first(key: jax.Array) -> Any:
        try:
            return init(key)
        except TypeError:
            with jax.enable_x64(False):
                return init(key)

    return first


def _in_32_bits(loss: Callable[..., LossSums], args: Any) -> tuple[ClosedJaxpr, Any]:
    """Traces the loss as it is written, for a model that cannot be traced with float64."""
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, _NARROW.get(x.dtype, x.dtype)), args)
    with jax.enable_x64(False):
        return jax.make_jaxpr(loss, return_shape=True)(*structs)


def _has_narrow(jaxpr: Jaxpr) -> bool:
    """Whether any value of a program is a float narrower than float64."""
    return any(
        any(getattr(v.aval, "dtype", None) in WIDE for v in eqn.outvars) or any(map(_has_narrow, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def _widened(x: Any) -> Any:
    dtype = getattr(x, "dtype", None)
    return x.astype(WIDE[dtype]) if dtype in WIDE else x


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    values = dict(zip(jaxpr.constvars, map(_widened, consts), strict=True))
    values |= zip(jaxpr.invars, map(_widened, args), strict=True)

    def read(atom: Any) -> Any:
        if not isinstance(atom, Literal):
            return values[atom]
        aval: Any = atom.aval
        return _widened(np.asarray(atom.val, aval.dtype))

    for eqn in jaxpr.eqns:
        found = _operation(eqn, [read(atom) for atom in eqn.invars])
        values |= zip(eqn.outvars, map(_widened, found), strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _operation(eqn: Any, values: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in CALLED:
        inner = params[CALLED[name]]
        return _evaluate(inner.jaxpr, inner.consts, *values)
    if name in ("remat2", "checkpoint"):
        inner = partial(_evaluate, params["jaxpr"], ())
        return jax.checkpoint(inner, policy=params["policy"], prevent_cse=params["prevent_cse"])(*values)
    if name == "scan":
        return _scan(params, values)
    if name == "while":
        return _while(params, values)
    if name == "cond":
        index, *operands = values
        branches = [partial(_evaluate, one.jaxpr, one.consts) for one in params["branches"]]
        return jax.lax.switch(index, branches, *operands)
    if name in SCATTERS:
        options = {key: params[key] for key in ("indices_are_sorted", "unique_indices", "mode")}
        return [SCATTERS[name](*values, params["dimension_numbers"], **options)]
    if name == "reduce_window":
        return _reduce_window(params, values)
    if any(isinstance(x, Jaxpr | ClosedJaxpr) or callable(x) for x in params.values()):
        what = f"the loss is float32, though the parameters are float64, and {name} has a program of its own"
        raise VerificationError(f"{what}: rounding would hide differences; build the model without a dtype of its own")
    if name == "bitcast_convert_type":  # random bits, of which a float32 is made
        return [eqn.primitive.bind(*values, **params)]
    params = {key: WIDE.get(x, x) if isinstance(x, np.dtype) else x for key, x in params.items()}
    found = eqn.primitive.bind(*values, **params)
    return found if eqn.primitive.multiple_results else [found]


def _scan(params: Any, values: list[Any]) -> Sequence[Any]:
    num_consts, num_carry = scan_counts(params)
    consts, carry, rows = values[:num_consts], values[num_consts:][:num_carry], values[num_consts + num_carry :]
    body = params["jaxpr"]

    def step(carry: Any, rows: Any) -> Any:
        found = _evaluate(body.jaxpr, body.consts, *consts, *carry, *rows)
        return found[:num_carry], found[num_carry:]

    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, found = jax.lax.scan(step, carry, rows, **options)
    return [*carry, *found]


def _reduce_window(params: Any, values: list[Any]) -> Sequence[Any]:
    def reduced(left: Any, right: Any) -> Any:
        return tuple(_evaluate(params["jaxpr"], params["consts"], *left, *right))

    names = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
    half = len(values) // 2
    return jax.lax.reduce_window(tuple(values[:half]), tuple(values[half:]), reduced, *(params[name] for name in names))


def _while(params: Any, values: list[Any]) -> Sequence[Any]:
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    for_condition, for_body, carry = values[:first], values[first:last], values[last:]
    return jax.lax.while_loop(
        lambda carry: _evaluate(condition.jaxpr, condition.consts, *for_condition, *carry)[0],
        lambda carry: _evaluate(body.jaxpr, body.consts, *for_body, *carry),
        carry,
    )
