"""Finds loops over stacked parameters in a traced loss: Linen's `nn.scan`, `nnx.scan`, `jax.lax.scan`.

The parameters may be stacked by the loss itself, as `meshpar.layers` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from meshpar.partition.rules.loops import scan_counts
from meshpar.partition.stack import Own, Stack, is_literal

LAYERS = "layers"
JIT = frozenset({"jit", "pjit", "closed_call", "core_call"})
_CALLS = JIT | {"checkpoint", "remat", "remat2", "custom_jvp_call"}
_OF_EACH_NUMBER = {
    "convert_element_type", "copy", "neg", "mul", "add", "sub", "div", "max", "square", "sqrt", "stop_gradient",
}  # fmt: skip
"""Operations that compute each number of a result alone, so that each layer can compute its own row of a stack."""


def scanned(closed: ClosedJaxpr, num_params: int) -> set[int]:
    """The parameters, which are the first arguments, that loops scan."""
    flat = flattened(closed)
    origins = Origins(flat.jaxpr, range(num_params))
    loops = [eqn for eqn in flat.jaxpr.eqns if eqn.primitive.name == "scan"]
    found = [origins.of(v) for eqn in loops for v in eqn.invars[sum(scan_counts(eqn.params)) :]]
    return {own for origin in found if origin for own in origin.owns if isinstance(own, int)}


def scans(flat: ClosedJaxpr, dims: Sequence[tuple[str, ...]], num_params: int) -> Iterator[Stack]:
    """Each loop over parameters that are stacked in their first dim, `layers`, or that the loss stacks.

    Args:
      flat: a loss, after `flattened`.
      dims: of each of its arguments, the first of which are the parameters.
    """
    used = {v for eqn in flat.jaxpr.eqns for v in eqn.invars if not is_literal(v)}
    used |= {v for v in flat.jaxpr.outvars if not is_literal(v)}
    for number, eqn, found in _loops(flat, dims, num_params):
        if len({type(own) for origin in found if origin for own in origin.owns}) == 1:
            yield _stack(number, eqn, found, used)


def _loops(
    flat: ClosedJaxpr, dims: Sequence[tuple[str, ...]], num_params: int
) -> Iterator[tuple[int, Any, list[Origin | None]]]:
    """Each loop, its place, and what the values that it scans are made of."""
    stacked = [i for i, names in enumerate(dims) if names[:1] == (LAYERS,)]
    origins = Origins(flat.jaxpr, stacked, range(num_params))
    for number, eqn in enumerate(flat.jaxpr.eqns):
        if eqn.primitive.name == "scan" and not eqn.params["reverse"]:
            yield number, eqn, [origins.of(v) for v in eqn.invars[sum(scan_counts(eqn.params)) :]]


def half_stacked(
    flat: ClosedJaxpr, dims: Sequence[tuple[str, ...]], num_params: int
) -> tuple[Any, list[int], list[int]] | None:
    """Layers of which some parameters are stacked and others in a list, and which are no `Stack` therefore.

    Returns:
      An operation of theirs, and the parameters of both kinds; None if there are no such layers.
    """
    for _, eqn, found in _loops(flat, dims, num_params):
        owns = [own for origin in found if origin for own in origin.owns]
        stacked = [own for own in owns if isinstance(own, int)]
        firsts = [own[0] for own in owns if isinstance(own, tuple)]
        if stacked and firsts:
            return eqn, stacked, firsts
    params = {flat.jaxpr.invars[i]: i for i in range(num_params) if dims[i][:1] == (LAYERS,)}
    taken = [e for e in flat.jaxpr.eqns if e.primitive.name in _ONE_ROW and e.invars[0] in params]
    return (taken[0], list(dict.fromkeys(params[e.invars[0]] for e in taken)), []) if taken else None


_ONE_ROW = {"slice", "dynamic_slice", "gather"}
"""Operations that take one row of a stack."""


def _stack(number: int, eqn: Any, origins: Sequence[Origin | None], used: set[Any]) -> Stack:
    num_consts, num_carry = scan_counts(eqn.params)
    rows = [v for v, own in zip(eqn.invars[num_consts + num_carry :], origins, strict=True) if own is None]
    kept = [i for i, v in enumerate(eqn.outvars) if i < num_carry or v in used]
    return Stack(
        start=number,
        stop=number + 1,
        num_layers=eqn.params["length"],
        body=_body(eqn, origins, kept),
        consts=tuple(eqn.invars[:num_consts]),
        rows=tuple(rows),
        carry=tuple(eqn.invars[num_consts : num_consts + num_carry]),
        own=tuple(own for origin in origins if origin for own in origin.owns),
        outs=tuple(eqn.outvars[:num_carry]),
        collected=tuple(eqn.outvars[i] for i in kept if i >= num_carry),
        unroll=eqn.params["unroll"],
    )


def _body(eqn: Any, origins: Sequence[Origin | None], kept: Sequence[int]) -> ClosedJaxpr:
    """The body of a loop, with the order of arguments of `Stack.body`; it begins with what is made of its own rows."""
    num_consts, num_carry = scan_counts(eqn.params)
    run = jaxpr_as_fun(eqn.params["jaxpr"])
    inner = eqn.params["jaxpr"].jaxpr.invars
    rows = [i for i, own in enumerate(origins) if own is None]

    def body(*given: Any) -> list[Any]:
        left = iter(given)
        consts = [next(left) for _ in range(num_consts)]
        scanned = {i: next(left) for i in rows}
        carry = [next(left) for _ in range(num_carry)]
        for i, origin in enumerate(origins):
            if origin:
                scanned[i] = origin.made(*(next(left) for _ in origin.owns))
        made = run(*consts, *carry, *(scanned[i] for i in range(len(origins))))
        return [made[i] for i in kept]

    def struct(v: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)

    scanned = [struct(v) for v in inner[num_consts + num_carry :]]
    owned = [row for origin in origins if origin for row in origin.rows]
    before = [struct(v) for v in inner[: num_consts + num_carry]]
    given = [*before[:num_consts], *(scanned[i] for i in rows), *before[num_consts:], *owned]
    return jax.make_jaxpr(body)(*given)


@dataclass(frozen=True)
class Origin:
    """What a stack is made of, layer by layer.

    Args:
      owns: the parameters, and `rows`, what they are of one layer.
      made: (*rows) -> the row of the stack.
    """

    owns: tuple[Own, ...]
    rows: tuple[jax.ShapeDtypeStruct, ...]
    made: Callable[..., Any]


class Origins:
    """What the values of a program are made of, layer by layer.

    Args:
      stacked: the arguments that have a row for each layer.
      single: those that can be of one layer.
    """

    def __init__(self, jaxpr: Jaxpr, stacked: Iterable[int], single: Iterable[int] = ()) -> None:
        self.stacked = {jaxpr.invars[i]: i for i in stacked}
        self.single = {jaxpr.invars[i]: i for i in single}
        self.producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def of(self, v: Any) -> Origin | None:
        """None for a value of which no layer can compute its row alone."""
        if is_literal(v):
            return None
        if v in self.stacked:
            return Origin((self.stacked[v],), (_struct(v.aval.shape[1:], v),), lambda x: x)
        eqn = self.producer.get(v)
        if eqn is None:
            return None
        if (parts := _stacked_parts(eqn, self.producer)) is not None:
            return self._of_list(parts)
        params = _params_of_row(eqn)
        operands = [None if is_literal(u) else self.of(u) for u in eqn.invars] if params is not None else [None]
        if all(x is None for x in operands):
            return None
        if any(x is None and not _is_number(u) for x, u in zip(operands, eqn.invars, strict=True)):
            return None
        owns = {own: row for x in operands if x is not None for own, row in zip(x.owns, x.rows, strict=True)}

        def made(*rows: Any) -> Any:
            by_own = dict(zip(owns, rows, strict=True))
            given = [
                _number(u) if x is None else x.made(*(by_own[own] for own in x.owns))
                for x, u in zip(operands, eqn.invars, strict=True)
            ]
            return eqn.primitive.bind(*given, **(params or {}))

        return Origin(tuple(owns), tuple(owns.values()), made)

    def _of_list(self, parts: Sequence[Any]) -> Origin | None:
        """A stack of parameters of single layers, or of what is made of each of them alone."""
        found = [self._followed(part) for part in parts]
        if len(found) < 2 or any(x not in self.single for x, _ in found):
            return None
        (first, operations), *others = found
        if any(x.aval.shape != first.aval.shape or not _are_equal(operations, one) for x, one in others):
            return None

        def made(x: Any) -> Any:
            for eqn in operations:
                given = (_number(u) if is_literal(u) else x for u in eqn.invars)
                x = eqn.primitive.bind(*given, **eqn.params)
            return x

        return Origin((tuple(self.single[x] for x, _ in found),), (_struct(first.aval.shape, first),), made)

    def _followed(self, v: Any) -> tuple[Any, list[Any]]:
        """The parameter that a value is made of alone, or any other value, and the operations after it."""
        operations: list[Any] = []
        while not is_literal(v) and v not in self.single:
            eqn = self.producer.get(v)
            if eqn is None or not _is_of_one(eqn):
                break
            operations.insert(0, eqn)
            v = next(u for u in eqn.invars if not is_literal(u))
        return v, operations


def _params_of_row(eqn: Any) -> dict[str, Any] | None:
    """The parameters of an operation on stacks for one of their rows; None if rows do not stay apart."""
    params, name = dict(eqn.params), eqn.primitive.name
    shapes = [v.aval.shape for v in eqn.invars]
    if name in _OF_EACH_NUMBER:
        return params
    if name == "slice" and params["start_indices"][0] == 0 and (params["strides"] or (1,))[0] == 1:  # without padding
        return params | {key: params[key] and params[key][1:] for key in ("start_indices", "limit_indices", "strides")}
    if name == "transpose" and params["permutation"][0] == 0:
        return params | {"permutation": tuple(place - 1 for place in params["permutation"][1:])}
    if name == "reshape" and shapes[0][:1] == params["new_sizes"][:1] and params["dimensions"] is None:
        return params | {"new_sizes": params["new_sizes"][1:]}
    if name == "broadcast_in_dim" and len(eqn.invars) == 1 and params["broadcast_dimensions"][:1] == (0,):
        dims = tuple(place - 1 for place in params["broadcast_dimensions"][1:])
        return params | {"shape": params["shape"][1:], "broadcast_dimensions": dims}
    if name == "reduce_sum" and 0 not in params["axes"]:
        return params | {"axes": tuple(place - 1 for place in params["axes"])}
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        if all(places[:1] == (0,) for places in map(tuple, batch)):
            numbers = tuple(
                tuple(tuple(place - 1 for place in places) for places in pair)
                for pair in (contracted, tuple(places[1:] for places in batch))
            )
            return params | {"dimension_numbers": numbers}
    return None


def _is_number(v: Any) -> bool:
    return is_literal(v) and not v.aval.shape


def _number(literal: Any) -> jax.Array:
    return jnp.asarray(literal.val, literal.aval.dtype)


def _struct(shape: tuple[int, ...], v: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, v.aval.dtype)


def _stacked_parts(eqn: Any, producer: Mapping[Var, Any]) -> list[Any] | None:
    """The arrays that an operation stacks in a new first dim."""
    if eqn.primitive.name == "stack" and eqn.params["axis"] == 0:
        return list(eqn.invars)
    if eqn.primitive.name != "concatenate" or eqn.params["dimension"] != 0:
        return None
    rows = [producer.get(v) for v in eqn.invars if not is_literal(v)]
    if len(rows) < len(eqn.invars) or any(row is None or not _adds_a_dim(row) for row in rows):
        return None
    return [row.invars[0] for row in rows if row is not None]


def _adds_a_dim(eqn: Any) -> bool:
    """Whether an operation makes the row of a stack of one array."""
    if eqn.primitive.name not in ("broadcast_in_dim", "reshape") or is_literal(eqn.invars[0]):
        return False
    return eqn.outvars[0].aval.shape == (1, *eqn.invars[0].aval.shape)


def _are_equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether operations on two arrays are the same."""
    texts = [
        [(eqn.primitive, str(eqn.params), [str(v) for v in eqn.invars if is_literal(v)]) for eqn in eqns]
        for eqns in (some, others)
    ]
    return texts[0] == texts[1]


def _is_of_one(eqn: Any) -> bool:
    """Whether an operation computes each number of one array alone, or transposes it."""
    is_alone = len([v for v in eqn.invars if not is_literal(v)]) == 1
    return is_alone and (eqn.primitive.name == "transpose" or eqn.primitive.name in _OF_EACH_NUMBER)


def flattened(closed: ClosedJaxpr, calls: Collection[str] = _CALLS) -> ClosedJaxpr:
    """The same program, with each call of these kinds that contains a `scan` replaced by its operations."""
    eqns: list[Any] = []
    constvars, consts = list(closed.jaxpr.constvars), list(closed.consts)

    def walk(jaxpr: Jaxpr, env: dict[Var, Any], is_inner: bool) -> list[Any]:
        def read(v: Any) -> Any:
            return v if is_literal(v) else env.get(v, v)

        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if eqn.primitive.name in calls and _has_scan(inner):
                open_: Any = getattr(inner, "jaxpr", inner)
                within = dict(zip(open_.invars, map(read, eqn.invars), strict=True))
                for v, x in zip(open_.constvars, getattr(inner, "consts", ()), strict=True):
                    within[v] = Var(v.aval)
                    constvars.append(within[v])
                    consts.append(x)
                env.update(zip(eqn.outvars, walk(open_, within, True), strict=True))
                continue
            outvars = [Var(v.aval) for v in eqn.outvars] if is_inner else eqn.outvars
            env.update(zip(eqn.outvars, outvars, strict=True))
            eqns.append(eqn.replace(invars=[read(v) for v in eqn.invars], outvars=outvars))
        return [read(v) for v in jaxpr.outvars]

    of = closed.jaxpr
    outvars = walk(of, {}, False)
    return ClosedJaxpr(Jaxpr(constvars, of.invars, outvars, eqns, of.effects, debug_info=of.debug_info), consts)


def _has_scan(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == "scan"
        or (eqn.primitive.name in _CALLS and _has_scan(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))))
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )
