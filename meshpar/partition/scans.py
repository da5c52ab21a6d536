"""Finds loops over stacked parameters in a traced loss: Linen's `nn.scan`, `nnx.scan`, `jax.lax.scan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from meshpar.partition.rules.loops import scan_counts
from meshpar.partition.stack import Stack, is_literal

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
    return {origin[0] for origin in found if origin}


def scans(flat: ClosedJaxpr, dims: Sequence[tuple[str, ...]]) -> Iterator[Stack]:
    """Each loop over parameters that are stacked in their first dim, `layers`.

    Args:
      flat: a loss, after `flattened`.
      dims: of each of its arguments.
    """
    origins = _Origins(flat.jaxpr, [i for i, names in enumerate(dims) if names[:1] == (LAYERS,)])
    used = {v for eqn in flat.jaxpr.eqns for v in eqn.invars if not is_literal(v)}
    used |= {v for v in flat.jaxpr.outvars if not is_literal(v)}
    for number, eqn in enumerate(flat.jaxpr.eqns):
        if eqn.primitive.name == "scan" and not eqn.params["reverse"]:
            num_consts, num_carry = scan_counts(eqn.params)
            found = [origins.of(v) for v in eqn.invars[num_consts + num_carry :]]
            if any(found):
                yield _stack(number, eqn, found, used)


def _stack(number: int, eqn: Any, origins: Sequence[tuple[int, list[Any]] | None], used: set[Any]) -> Stack:
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
        own=tuple(own[0] for own in origins if own),
        outs=tuple(eqn.outvars[:num_carry]),
        collected=tuple(eqn.outvars[i] for i in kept if i >= num_carry),
    )


def _body(eqn: Any, origins: Sequence[tuple[int, list[Any]] | None], kept: Sequence[int]) -> ClosedJaxpr:
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
        for i, own in enumerate(origins):
            if own:
                x = next(left)
                for operation in own[1]:
                    x = _on_row(operation, x)
                scanned[i] = x
        made = run(*consts, *carry, *(scanned[i] for i in range(len(origins))))
        return [made[i] for i in kept]

    def struct(v: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)

    scanned = [struct(v) for v in inner[num_consts + num_carry :]]
    owned = []
    for x, own in zip(scanned, origins, strict=True):
        first = next((struct(v) for v in own[1][0].invars if not is_literal(v)), None) if own and own[1] else None
        owned += [jax.ShapeDtypeStruct(first.shape[1:], first.dtype) if first else x] if own else []
    before = [struct(v) for v in inner[: num_consts + num_carry]]
    given = [*before[:num_consts], *(scanned[i] for i in rows), *before[num_consts:], *owned]
    return jax.make_jaxpr(body)(*given)


class _Origins:
    """What the values of a program are made of, number by number and row by row, among some of its arguments."""

    def __init__(self, jaxpr: Jaxpr, places: Sequence[int]) -> None:
        self.place = {jaxpr.invars[i]: i for i in places}
        self.producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def of(self, v: Any) -> tuple[int, list[Any]] | None:
        """The argument that a value is made of, and the operations from it to the value."""
        operations: list[Any] = []
        while not is_literal(v) and v not in self.place:
            eqn = self.producer.get(v)
            if eqn is None or not _is_on_rows(eqn):
                return None
            operations.insert(0, eqn)
            v = next(u for u in eqn.invars if not is_literal(u))
        return None if is_literal(v) else (self.place[v], operations)


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
