"""Finds loops over stacked parameters in a traced loss: Linen's `nn.scan`, `nnx.scan`, `jax.lax.scan`.

The parameters may be stacked by the loss itself, as `meshpar.layers` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from meshpar.partition.rules.loops import scan_counts
from meshpar.partition.stack import Own, Stack, is_literal

LAYERS = "layers"
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call"}
_OF_EACH_NUMBER = {"convert_element_type", "copy", "neg", "mul", "add", "sub", "div"}
"""Operations on a stack that each layer can compute of its own row, if their other operands are single numbers."""


def scanned(closed: ClosedJaxpr, num_params: int) -> set[int]:
    """The parameters, which are the first arguments, that loops scan."""
    flat = flattened(closed)
    origins = _Origins(flat.jaxpr, range(num_params))
    loops = [eqn for eqn in flat.jaxpr.eqns if eqn.primitive.name == "scan"]
    found = [origins.of(v) for eqn in loops for v in eqn.invars[sum(scan_counts(eqn.params)) :]]
    return {origin.own for origin in found if origin and isinstance(origin.own, int)}


def scans(flat: ClosedJaxpr, dims: Sequence[tuple[str, ...]], num_params: int) -> Iterator[Stack]:
    """Each loop over parameters that are stacked in their first dim, `layers`, or that the loss stacks.

    Args:
      flat: a loss, after `flattened`.
      dims: of each of its arguments, the first of which are the parameters.
    """
    stacked = [i for i, names in enumerate(dims) if names[:1] == (LAYERS,)]
    origins = _Origins(flat.jaxpr, stacked, range(num_params))
    used = {v for eqn in flat.jaxpr.eqns for v in eqn.invars if not is_literal(v)}
    used |= {v for v in flat.jaxpr.outvars if not is_literal(v)}
    for number, eqn in enumerate(flat.jaxpr.eqns):
        if eqn.primitive.name == "scan" and not eqn.params["reverse"]:
            num_consts, num_carry = scan_counts(eqn.params)
            found = [origins.of(v) for v in eqn.invars[num_consts + num_carry :]]
            if len({type(origin.own) for origin in found if origin}) == 1:
                yield _stack(number, eqn, found, used)


def _stack(number: int, eqn: Any, origins: Sequence[_Origin | None], used: set[Any]) -> Stack:
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
        own=tuple(origin.own for origin in origins if origin),
        outs=tuple(eqn.outvars[:num_carry]),
        collected=tuple(eqn.outvars[i] for i in kept if i >= num_carry),
    )


def _body(eqn: Any, origins: Sequence[_Origin | None], kept: Sequence[int]) -> ClosedJaxpr:
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
                scanned[i] = origin.made(next(left))
        made = run(*consts, *carry, *(scanned[i] for i in range(len(origins))))
        return [made[i] for i in kept]

    def struct(v: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)

    scanned = [struct(v) for v in inner[num_consts + num_carry :]]
    owned = [origin.row for origin in origins if origin]
    before = [struct(v) for v in inner[: num_consts + num_carry]]
    given = [*before[:num_consts], *(scanned[i] for i in rows), *before[num_consts:], *owned]
    return jax.make_jaxpr(body)(*given)


@dataclass(frozen=True)
class _Origin:
    """What a stack is made of, layer by layer.

    Args:
      row: the parameter of one layer.
      on_each: operations on each of these, before they are stacked.
      on_rows: operations on the stack, which a layer computes of its row.
    """

    own: Own
    row: jax.ShapeDtypeStruct
    on_each: tuple[Any, ...] = ()
    on_rows: tuple[Any, ...] = ()

    def made(self, x: Any) -> Any:
        for eqn in self.on_each:
            x = _computed(eqn, x, eqn.params)
        for eqn in self.on_rows:
            x = _on_row(eqn, x)
        return x


class _Origins:
    """What the values of a program are made of, layer by layer.

    Args:
      stacked: the arguments that have a row for each layer.
      single: those that can be of one layer.
    """

    def __init__(self, jaxpr: Jaxpr, stacked: Iterable[int], single: Iterable[int] = ()) -> None:
        self.stacked = {jaxpr.invars[i]: i for i in stacked}
        self.single = {jaxpr.invars[i]: i for i in single}
        self.producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def of(self, v: Any) -> _Origin | None:
        v, operations = self._followed(v, self.stacked, _is_on_rows)
        if v in self.stacked:
            return _Origin(self.stacked[v], _struct(v.aval.shape[1:], v), (), operations)
        eqn = self.producer.get(v)
        parts = _stacked_parts(eqn, self.producer) if eqn is not None else None
        found = [self._followed(part, self.single, _is_on_numbers) for part in parts or ()]
        if len(found) < 2 or any(x not in self.single for x, _ in found):
            return None
        (first, each), *others = found
        if any(x.aval.shape != first.aval.shape or not _are_equal(each, one) for x, one in others):
            return None
        return _Origin(tuple(self.single[x] for x, _ in found), _struct(first.aval.shape, first), each, operations)

    def _followed(self, v: Any, until: Any, passes: Callable[[Any], bool]) -> tuple[Any, tuple[Any, ...]]:
        """The first value that is in `until` or not made by an operation of this kind, and the operations after it."""
        operations: list[Any] = []
        while not is_literal(v) and v not in until:
            eqn = self.producer.get(v)
            if eqn is None or not passes(eqn):
                break
            operations.insert(0, eqn)
            v = next(u for u in eqn.invars if not is_literal(u))
        return v, tuple(operations)


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


def _is_on_numbers(eqn: Any) -> bool:
    """Whether an operation computes each number of one array alone, or only moves them."""
    return eqn.primitive.name == "transpose" or _is_on_rows(eqn)


def _is_on_rows(eqn: Any) -> bool:
    arrays = [v for v in eqn.invars if not is_literal(v)]
    if len(arrays) != 1 or any(v.aval.shape for v in eqn.invars if is_literal(v)):
        return False
    if eqn.primitive.name == "transpose":
        return eqn.params["permutation"][0] == 0
    return eqn.primitive.name in _OF_EACH_NUMBER


def _on_row(eqn: Any, x: Any) -> Any:
    params = dict(eqn.params)
    if eqn.primitive.name == "transpose":
        params["permutation"] = tuple(place - 1 for place in params["permutation"][1:])
    return _computed(eqn, x, params)


def _computed(eqn: Any, x: Any, params: Mapping[str, Any]) -> Any:
    """An operation on one array."""
    return eqn.primitive.bind(*(jnp.asarray(v.val, v.aval.dtype) if is_literal(v) else x for v in eqn.invars), **params)


def flattened(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, with each call that contains a `scan` replaced by its operations."""
    eqns: list[Any] = []
    constvars, consts = list(closed.jaxpr.constvars), list(closed.consts)

    def walk(jaxpr: Jaxpr, env: dict[Var, Any], is_inner: bool) -> list[Any]:
        def read(v: Any) -> Any:
            return v if is_literal(v) else env.get(v, v)

        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if eqn.primitive.name in _CALLS and _has_scan(inner):
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
