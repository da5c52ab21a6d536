"""Cuts the traced loss of a model at its stack of layers, for the stages of a pipeline.

The loss has one `scan` over parameters that are stacked in dim `layers`. What stands before it belongs to the first
stage, its body is the layer, what stands after it belongs to the last stage. A value that crosses the cut is

- computed again where it is read, if it depends on the batch, the key and constants alone (a mask, a table of
  positions, the keys of dropout), or if it costs no matrix product (an embedding, a cast);
- sent along else, as a part of what layers pass to each other: its gradient returns the same way.

This file depends on JAX's internals: it builds jaxprs with `jax.extend.core`, as `parallel.pipeline.split` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from meshpar.errors import ShardingError
from meshpar.partition.rules.loops import scan_counts
from meshpar.partition.source import Source

_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call"}
_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "scan", "while"}
"""Operations that are not computed a second time on another stage."""


@dataclass(frozen=True)
class Cut:
    """A loss in three parts, each of them a program of whole arrays.

    Args:
      num_layers: the number of layers.
      stacked: the arguments of the loss that have a row for each layer.
      data: the arguments that are no parameters.
      outer: the arguments without those of `stacked`.
      first: (*outer) -> the message that the first layer gets.
      shared: (*data) -> values that every layer reads, then `num_rows` arrays of which it reads its row.
      layer: (*shared, *message, *its row of `stacked`) -> message.
      last: (*outer, *message) -> results of the loss.
    """

    num_layers: int
    stacked: tuple[int, ...]
    data: tuple[int, ...]
    outer: tuple[int, ...]
    first: ClosedJaxpr
    shared: ClosedJaxpr
    num_rows: int
    layer: ClosedJaxpr
    last: ClosedJaxpr


def cut(closed: ClosedJaxpr, names: Sequence[str], stacks: Sequence[int], num_params: int) -> Cut:
    """Cuts a loss.

    Args:
      names: of the arguments, for errors.
      stacks: the arguments whose first dim is `layers`.
      num_params: the first so many arguments are parameters.

    Raises:
      ShardingError: it has no stack of layers, or a value cannot cross the cut.
    """
    return _Cutter(flattened(closed), names, stacks, num_params).cut()


@dataclass
class _Cutter:
    flat: ClosedJaxpr
    names: Sequence[str]
    stacks: Sequence[int]
    num_params: int
    producer: dict[Var, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, eqn in enumerate(self.flat.jaxpr.eqns):
            self.producer.update(dict.fromkeys(eqn.outvars, number))
        self.argument = {v: i for i, v in enumerate(self.flat.jaxpr.invars)}

    def cut(self) -> Cut:
        number, scan = self._scan()
        num_consts, num_carry = scan_counts(scan.params)
        body = scan.params["jaxpr"]
        consts, carry = scan.invars[:num_consts], scan.invars[num_consts : num_consts + num_carry]
        scanned = scan.invars[num_consts + num_carry :]
        inner_consts, inner_carry = body.jaxpr.invars[:num_consts], body.jaxpr.invars[num_consts : len(consts) + num_carry]
        inner_scanned = body.jaxpr.invars[num_consts + num_carry :]

        of_params = self._reached(self.flat.jaxpr.invars[: self.num_params])
        late = self._reached(scan.outvars)
        taken = [(v, inner) for v, inner in zip(scanned, inner_scanned, strict=True) if self._is_stack(v)]
        rows = [(v, inner) for v, inner in zip(scanned, inner_scanned, strict=True) if not self._is_stack(v)]
        shared = [(v, inner) for v, inner in zip(consts, inner_consts, strict=True) if not self._is_in(v, of_params)]
        sent = [(v, inner) for v, inner in zip(consts, inner_consts, strict=True) if self._is_in(v, of_params)]
        for v, _ in rows:
            if self._is_in(v, of_params):
                self._refuse(v, "layers scan it, and it is computed from parameters before", "scan the parameters as they are")
        after = [i for i, eqn in enumerate(self.flat.jaxpr.eqns) if any(self._is_in(v, late) for v in eqn.invars)]
        results = [v for v in self.flat.jaxpr.outvars]
        again, crossing = self._read_after(after, results, late)
        sent += [(v, None) for v in crossing if v not in [one for one, _ in sent]]

        stacked = tuple(dict.fromkeys(self.argument[v] for v, _ in taken))
        outer = tuple(i for i in range(len(self.flat.jaxpr.invars)) if i not in stacked)
        data = tuple(range(self.num_params, len(self.flat.jaxpr.invars)))
        arguments = [self.flat.jaxpr.invars[i] for i in outer]
        ys = scan.outvars[num_carry:]
        last_eqns = sorted({*after, *again})
        read = {v for i in last_eqns for v in self.flat.jaxpr.eqns[i].invars if not _is_literal(v)} | {
            v for v in results if not _is_literal(v)
        }
        for v in ys:
            if v in read:
                self._refuse(v, "it has a row for each layer, and is read after the layers", "add it up in what the layers carry")
        kept = [Var(v.aval) if inner is None else inner for v, inner in sent]
        message_in = [*inner_carry, *kept]
        layer = Jaxpr(
            body.jaxpr.constvars,
            [*(inner for _, inner in (*shared, *rows)), *message_in, *(inner for _, inner in taken)],
            [*body.jaxpr.outvars[:num_carry], *kept], body.jaxpr.eqns, body.jaxpr.effects, body.jaxpr.debug_info,
        )  # fmt: skip
        last = self._program(
            last_eqns, [*arguments, *scan.outvars[:num_carry], *(v for v, _ in sent)], results
        )
        self._check_stacks(stacked, last_eqns, [*carry, *(v for v, _ in sent)])
        return Cut(
            num_layers=scan.params["length"],
            stacked=stacked,
            data=data,
            outer=outer,
            first=self._program_of([*carry, *(v for v, _ in sent)], arguments),
            shared=self._program_of([v for v, _ in (*shared, *rows)], [self.flat.jaxpr.invars[i] for i in data]),
            num_rows=len(rows),
            layer=ClosedJaxpr(layer, body.consts),
            last=last,
        )

    def _scan(self) -> tuple[int, Any]:
        found = [
            (number, eqn)
            for number, eqn in enumerate(self.flat.jaxpr.eqns)
            if eqn.primitive.name == "scan" and any(self._is_stack(v) for v in eqn.invars[sum(scan_counts(eqn.params)) :])
        ]
        if len(found) != 1:
            raise ShardingError("TODO")
        return found[0]

    def _is_stack(self, v: Any) -> bool:
        return not _is_literal(v) and self.argument.get(v) in self.stacks

    def _is_in(self, v: Any, among: set[Var]) -> bool:
        return not _is_literal(v) and v in among

    def _reached(self, start: Iterable[Var]) -> set[Var]:
        """The values that depend on any of these, and these."""
        reached = {*start}
        for eqn in self.flat.jaxpr.eqns:
            if any(self._is_in(v, reached) for v in eqn.invars):
                reached.update(eqn.outvars)
        return reached

    def _needed(self, targets: Iterable[Any], given: Iterable[Var] = ()) -> set[int]:
        """The equations that compute these values, from the arguments and what is given."""
        given, found = {*given}, set()
        todo = [v for v in targets if not _is_literal(v)]
        while todo:
            v = todo.pop()
            number = self.producer.get(v)
            if v not in given and number is not None and number not in found:
                found.add(number)
                todo += [u for u in self.flat.jaxpr.eqns[number].invars if not _is_literal(u)]
        return found

    def _read_after(self, after: Sequence[int], results: Sequence[Any], late: set[Var]) -> tuple[set[int], list[Var]]:
        """What the last stage reads of what stands before the layers: equations to repeat, and values to send."""
        read = dict.fromkeys(
            v
            for atoms in (*(self.flat.jaxpr.eqns[i].invars for i in after), results)
            for v in atoms
            if not _is_literal(v) and v not in late and v in self.producer
        )
        again: set[int] = set()
        sent = []
        of_params = self._reached(self.flat.jaxpr.invars[: self.num_params])
        for v in read:
            needed = self._needed([v])
            is_dear = any(self.flat.jaxpr.eqns[i].primitive.name in _PRODUCTS for i in needed)
            if is_dear and v in of_params:
                sent.append(v)
            else:
                again |= needed
        return again, sent

    def _check_stacks(self, stacked: Sequence[int], last: Sequence[int], message: Sequence[Any]) -> None:
        first = self._needed(message)
        for number in sorted({*last, *first}):
            for v in self.flat.jaxpr.eqns[number].invars:
                if self._is_stack(v):
                    self._refuse(v, "...", "...", number)

    def _program_of(self, targets: Sequence[Any], invars: Sequence[Var]) -> ClosedJaxpr:
        return self._program(sorted(self._needed(targets)), invars, targets)

    def _program(self, numbers: Sequence[int], invars: Sequence[Var], outvars: Sequence[Any]) -> ClosedJaxpr:
        of = self.flat.jaxpr
        eqns = [of.eqns[number] for number in numbers]
        effects = set().union(*(eqn.effects for eqn in eqns))
        jaxpr = Jaxpr(of.constvars, list(invars), list(outvars), eqns, effects, debug_info=of.debug_info)
        return ClosedJaxpr(jaxpr, self.flat.consts)

    def _refuse(self, v: Var, what: str, fix: str, number: int | None = None) -> None:
        number = self.producer.get(v) if number is None else number
        at = Source.of(self.flat.jaxpr.eqns[number]).line if number is not None else "the loss"
        name = self.names[self.argument[v]] if v in self.argument else str(v.aval)
        raise ShardingError(f"{at}: a pipeline cannot cut the model at {name}: {what}; {fix}")


def flattened(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, with each call that contains a `scan` replaced by its operations."""
    eqns: list[Any] = []
    constvars, consts = list(closed.jaxpr.constvars), list(closed.consts)

    def walk(jaxpr: Jaxpr, env: dict[Var, Any], is_inner: bool) -> list[Any]:
        def read(v: Any) -> Any:
            return v if _is_literal(v) else env.get(v, v)

        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if eqn.primitive.name in _CALLS and _has_scan(inner):
                open_ = getattr(inner, "jaxpr", inner)
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
    open_ = getattr(jaxpr, "jaxpr", jaxpr)
    if open_ is None:
        return False
    return any(
        eqn.primitive.name == "scan"
        or (eqn.primitive.name in _CALLS and _has_scan(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))))
        for eqn in open_.eqns
    )


def _is_literal(v: Any) -> bool:
    return isinstance(v, Literal)
