"""Calls a function for JAX's explicit mode on arrays that cannot have the shardings which it declares.

A cache is of one row, and a model for explicit axes declares its rows to be sharded. On axes of size one every sharding
divides every dim. So the function is traced there, and its operations are computed without what it declares: the
partitioner decides, as for other models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from meshpar.interop.explicit import of_ones

DECLARATIONS = ("reshard", "mesh_cast", "sharding_constraint")
"""Operations that only say how their operand is sharded."""
KEYS = ("sharding", "out_sharding")
"""Parameters of operations that say how a result is sharded."""
CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
}  # fmt: skip
"""Operation that calls a function -> its parameter. What is decoded has no derivative."""


def called(
    function: Callable[..., Any], arguments: Sequence[Any], specs: Sequence[Any], names: Mapping[str, str]
) -> Any:
    """The function's results, which have automatic axes as its arguments have.

    Args:
      specs: a tree of `PartitionSpec` for each argument.
      names: the model's own name of a mesh axis -> meshpar's.
    """
    closed, results = _traced(function, arguments, specs, names)
    found = _computed(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(results), found)


def typed(
    function: Callable[..., Any], arguments: Sequence[Any], specs: Sequence[Any], names: Mapping[str, str]
) -> Any:
    """The shardings that the function gives its results: a tree of `PartitionSpec`."""
    closed, results = _traced(function, arguments, specs, names)
    found = [x.sharding.spec for x in closed.out_avals]
    return jax.tree.unflatten(jax.tree.structure(results), found)


def _traced(function: Any, arguments: Sequence[Any], specs: Sequence[Any], names: Mapping[str, str]) -> Any:
    mesh = of_ones(names)

    def struct(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    # JAX changes the size of a mesh in no context but that of none.
    with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh):
        return jax.make_jaxpr(function, return_shape=True)(*jax.tree.map(struct, tuple(arguments), tuple(specs)))


def _computed(jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        name, given = eqn.primitive.name, [read(v) for v in eqn.invars]
        if name in DECLARATIONS:
            results: Any = given
        elif name in CALLS:
            inner = eqn.params[CALLS[name]]
            results = _computed(
                *((inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())), given
            )
        else:
            params = {key: _plain(key, x) for key, x in eqn.params.items()}
            results = eqn.primitive.bind(*given, **eqn.primitive.get_bind_params(params))
        values.update(zip(eqn.outvars, results if isinstance(results, list | tuple) else [results], strict=True))
    return [read(v) for v in jaxpr.outvars]


def _plain(key: str, param: Any) -> Any:
    """A parameter of an operation without shardings, also inside of the body of a loop and of branches."""
    if key in KEYS:
        return None
    if isinstance(param, tuple) and param and all(isinstance(one, ClosedJaxpr) for one in param):
        return tuple(_plain(key, one) for one in param)
    if not isinstance(param, ClosedJaxpr):
        return param
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in param.in_avals]
    return jax.make_jaxpr(lambda *arguments: _computed(param.jaxpr, param.consts, arguments))(*structs)
