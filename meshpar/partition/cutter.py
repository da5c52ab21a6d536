"""Cuts the traced loss of a model at a stack of layers, for the stages of a pipeline.

What stands before the layers belongs to the first stage, what stands after them to the last. A value that crosses the
cut is

- computed where it is read, if the layers do not read what it takes (another tower);
- computed again where it is read, if it depends on no parameter (a mask, a table of positions, the keys of dropout), or
  if it takes no matrix product and no loop (an embedding, a cast);
- sent along else, as a part of what layers pass to each other. Its gradient returns the same way, and is counted once.

What each layer returns beside, such as its share of an auxiliary loss, is added to the sums of its stage if the end
only adds it up. Else it is collected in an array that is sent along too.

This file depends on JAX's internals: it builds jaxprs with `jax.extend.core`, as `parallel.pipeline.split` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun

from meshpar.errors import ShardingError
from meshpar.partition.added import Added, added, without
from meshpar.partition.cut import OF_ALL_LAYERS, Argument, Cut
from meshpar.partition.source import Source
from meshpar.partition.stack import Atom, Stack, arguments_of, each, is_literal, part_of

_DEAR = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "scan", "while"}
"""Operations that are not computed a second time on another stage."""


def cut_at(
    flat: ClosedJaxpr,
    stack: Stack,
    arguments: Sequence[Argument],
    num_params: int,
    num_batch: int,
    num_carried: int,
    num_given: int = 0,
    is_only: bool = True,
) -> Cut:
    """Cuts a loss at a stack, see `chain.cut`.

    Args:
      num_given: how many of the last arguments are the message of the stack before.
      is_only: whether it is the only stack that the loss is cut at.

    Raises:
      ShardingError: a value cannot cross the cut.
    """
    return _Cutter(flat, stack, arguments, num_params, num_batch, num_carried, num_given, is_only).cut()


@dataclass(frozen=True)
class _Crossing:
    """The values that cross the cut, and how.

    Args:
      fixed, read: places in the stack's `consts` of those that are computed again by each stage, and of those that are
        sent along.
      sent: the values that are sent along; first those of `read`.
      collected: the types of the arrays of what the layers collect.
      after, again: the operations of the last stage, and those of the first that it repeats.
      added: what the end does with the arrays, if it only adds them up; else they are sent along.
    """

    fixed: list[int]
    read: list[int]
    sent: list[Atom]
    collected: list[jax.ShapeDtypeStruct]
    after: list[int]
    again: set[int]
    added: Added | None = None

    @property
    def arrays(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the arrays that are sent along."""
        return [] if self.added else self.collected


@dataclass
class _Cutter:
    flat: ClosedJaxpr
    stack: Stack
    arguments: Sequence[Argument]
    num_params: int
    num_batch: int
    num_carried: int
    num_given: int = 0
    is_only: bool = True
    producer: dict[Var, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, eqn in enumerate(self.flat.jaxpr.eqns):
            self.producer.update(dict.fromkeys(eqn.outvars, number))
        invars, results = self.flat.jaxpr.invars, self.flat.jaxpr.outvars
        num_sums = len(results) - self.num_carried
        self.results, self.carried = results[:num_sums], results[num_sums:]
        self.place = {v: i for i, v in enumerate(invars)}
        num_others = len(invars) - self.num_given
        self.data = tuple(range(self.num_params, num_others))
        self.given = {*invars[num_others:]}
        self.of_layers = {invars[i] for i in arguments_of(self.stack.own)}
        self.outer = tuple(i for i, v in enumerate(invars[:num_others]) if v not in self.of_layers)
        self.entering = (*self.outer, *range(num_others, len(invars)))
        self.of_given = self._reached(self.given)
        self.of_params = self._reached(invars[: self.num_params]) | self.of_given

    def cut(self) -> Cut:
        self._check_rows()
        self._check_carried()
        crossing = self._crossing()
        self._check_message([*self.stack.carry, *crossing.sent], crossing.collected)
        self._check_layers_alone([*crossing.after, *crossing.again, *self._needed(self._sent_first(crossing))])
        return Cut(
            num_layers=self.stack.num_layers,
            own=self.stack.own,
            data=self.data,
            outer=self.outer,
            first=self._first(crossing),
            shared=self._shared(crossing),
            num_rows=len(self.stack.rows) + bool(crossing.collected),
            layer=self._layer(crossing),
            last=self._last(crossing),
            adds=crossing.added.results if crossing.added else (),
            state=self._program(self.carried, self._invars(self.data[self.num_batch :])),
            unroll=self.stack.unroll,
        )

    # The parts -----------------------------------------------------------------------------------------------------

    def _first(self, crossing: _Crossing) -> ClosedJaxpr:
        start = jaxpr_as_fun(self._program(self._sent_first(crossing), self._invars(self.entering)))

        def first(*arguments: Any) -> list[Any]:
            return [*start(*arguments), *map(_zeros, crossing.arrays)]

        return _traced(first, _structs(self._invars(self.entering)))

    def _shared(self, crossing: _Crossing) -> ClosedJaxpr:
        rows = [v for row in self.stack.rows for v in each(row)]
        values = jaxpr_as_fun(
            self._program([*(self.stack.consts[i] for i in crossing.fixed), *rows], self._invars(self.data))
        )
        factors = jaxpr_as_fun(crossing.added.factors) if crossing.added else lambda *arguments: []

        def shared(*arguments: Any) -> list[Any]:
            found = iter(values(*arguments))
            consts = [next(found) for _ in crossing.fixed]
            stacked = [
                jnp.stack([next(found) for _ in row]) if isinstance(row, tuple) else next(found)
                for row in self.stack.rows
            ]
            return [
                *consts,
                *factors(*arguments),
                *stacked,
                *([jnp.arange(self.stack.num_layers)] if crossing.collected else []),
            ]

        return _traced(shared, _structs(self._invars(self.data)))

    def _layer(self, crossing: _Crossing) -> ClosedJaxpr:
        stack, run = self.stack, jaxpr_as_fun(self.stack.body)
        num_consts, num_rows, num_carry = len(stack.consts), len(stack.rows), len(stack.carry)
        factors = crossing.added.factors.out_avals if crossing.added else []

        def layer(*given: Any) -> list[Any]:
            left = iter(given)

            def take(num: int) -> list[Any]:
                return [next(left) for _ in range(num)]

            fixed, of_added = take(len(crossing.fixed)), take(len(factors))
            rows, index = take(num_rows), take(bool(crossing.collected))
            carry, along, arrays = take(num_carry), take(len(crossing.sent)), take(len(crossing.arrays))
            consts = dict(zip(crossing.fixed, fixed, strict=True)) | dict(zip(crossing.read, along, strict=False))
            made = run(*(consts[i] for i in range(num_consts)), *rows, *carry, *left)
            into = [*map(_zeros, crossing.collected)] if crossing.added else arrays
            arrays = [a.at[index[0]].set(y) for a, y in zip(into, made[num_carry:], strict=True)]
            if crossing.added:
                arrays = jaxpr_as_fun(crossing.added.parts)(*of_added, *arrays)
            return [*made[:num_carry], *along, *arrays]

        inner = _structs(stack.body.jaxpr.invars)
        index = [jax.ShapeDtypeStruct((), jnp.arange(1).dtype)] if crossing.collected else []
        own = inner[num_consts + num_rows + num_carry :]
        taken = [*(inner[i] for i in crossing.fixed), *map(_struct, factors)]
        taken += inner[num_consts : num_consts + num_rows]
        return _traced(layer, [*taken, *index, *self._message(crossing), *own])

    def _last(self, crossing: _Crossing) -> ClosedJaxpr:
        end = self._end(crossing)
        return without(end, len(crossing.collected)) if crossing.added else end

    def _end(self, crossing: _Crossing) -> ClosedJaxpr:
        """(*outer, *message, *collected) -> results."""
        stack = self.stack
        collected = [v for values in stack.collected for v in each(values)]
        given: list[Any] = [*self._invars(self.outer), *stack.outs, *crossing.sent, *collected]
        end = jaxpr_as_fun(self._program(self.results, given, {*crossing.after, *crossing.again}))

        def last(*arguments: Any) -> list[Any]:
            num_others = len(arguments) - len(stack.collected)
            apart = [
                y
                for values, a in zip(stack.collected, arguments[num_others:], strict=True)
                for y in ([a[m] for m in range(len(values))] if isinstance(values, tuple) else [a])
            ]
            return end(*arguments[:num_others], *apart)

        sent = _structs(self._sent_first(crossing))
        return _traced(last, [*_structs(self._invars(self.outer)), *sent, *crossing.collected])

    def _message(self, crossing: _Crossing) -> list[Any]:
        """The types of what layers pass to each other."""
        return [*_structs(self._sent_first(crossing)), *crossing.arrays]

    def _sent_first(self, crossing: _Crossing) -> list[Atom]:
        """What the first layer gets of what stands before."""
        return [*self.stack.carry, *crossing.sent]

    def _invars(self, places: Iterable[int]) -> list[Var]:
        return [self.flat.jaxpr.invars[i] for i in places]

    def _crossing(self) -> _Crossing:
        stack = self.stack
        read = [i for i, v in enumerate(stack.consts) if is_in(v, self.of_params)]
        after, again, read_after = self._after()
        sent: list[Atom] = [stack.consts[i] for i in read]
        sent += [v for v in read_after if v not in sent]
        collected = [
            jax.ShapeDtypeStruct((stack.num_layers, *x.shape), x.dtype)
            for x in _structs(stack.body.jaxpr.outvars[len(stack.carry) :])
        ]
        fixed = [i for i in range(len(stack.consts)) if i not in read]
        found = _Crossing(fixed, read, sent, collected, after, again)
        are_floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in collected)  # else the message is refused
        if not (collected and are_floats and self.is_only):
            return found
        data = [place for place, i in enumerate(self.outer) if i in self.data]
        return replace(found, added=added(self._end(found), data, len(collected)))

    # What crosses the cut ------------------------------------------------------------------------------------------

    def _after(self) -> tuple[list[int], set[int], list[Var]]:
        """The operations of the last stage; those of the first that it repeats; and values that are sent to it."""
        eqns, stack = self.flat.jaxpr.eqns, self.stack
        before = self._needed([*stack.carry, *stack.consts, *(v for row in stack.rows for v in each(row))])
        after: set[int] = set()
        read: dict[Var, int] = {}
        todo = [v for v in self.results if not is_literal(v)]
        while todo:
            v = todo.pop()
            number = self.producer.get(v, -1)
            if v in self.given or number in before:
                read[v] = number
            elif number >= 0 and not stack.start <= number < stack.stop and number not in after:
                after.add(number)
                todo += [u for u in eqns[number].invars if not is_literal(u)]
        again: set[int] = set()
        sent = []
        for v in sorted(read, key=lambda v: read[v]):
            needed = self._needed([v])
            if v in self.of_given or (v in self.of_params and any(_is_dear(eqns[i]) for i in needed)):
                sent.append(v)
            else:
                again |= needed
        return sorted(after), again, sent

    def _reached(self, start: Iterable[Var]) -> set[Var]:
        """The values that depend on any of these, and these."""
        reached = {*start}
        for eqn in self.flat.jaxpr.eqns:
            if any(is_in(v, reached) for v in eqn.invars):
                reached.update(eqn.outvars)
        return reached

    def _needed(self, targets: Iterable[Any]) -> set[int]:
        """The operations that compute these values from the arguments."""
        found: set[int] = set()
        todo = [v for v in targets if not is_literal(v)]
        while todo:
            number = self.producer.get(todo.pop())
            if number is not None and number not in found:
                found.add(number)
                todo += [u for u in self.flat.jaxpr.eqns[number].invars if not is_literal(u)]
        return found

    def _program(
        self, outvars: Sequence[Any], invars: Sequence[Var], numbers: Iterable[int] | None = None
    ) -> ClosedJaxpr:
        numbers = self._needed(outvars) if numbers is None else numbers
        eqns = [self.flat.jaxpr.eqns[number] for number in sorted(numbers)]
        return part_of(self.flat, eqns, invars, outvars)

    # What cannot ---------------------------------------------------------------------------------------------------

    def _check_rows(self) -> None:
        for v in (v for row in self.stack.rows for v in each(row)):
            if is_in(v, self.of_params):
                what = "each layer reads its own part of a value that is computed from parameters before the layers"
                self._refuse(v, what, "compute it inside of the layer")

    def _check_carried(self) -> None:
        """Checks that the carried state follows from itself and the key, so that each microbatch's is known before."""
        changed = self._reached(self.flat.jaxpr.invars[: self.num_params + self.num_batch])
        for v, one in zip(self.carried, self.arguments[len(self.arguments) - self.num_carried :], strict=True):
            if is_in(v, changed):
                what = (
                    f"the loss computes the next {one.name} from the batch, as batch norm does: the stages work on "
                    "several microbatches at a time, so none has the state that the one before it leaves"
                )
                self._refuse(v, what, "use a norm without statistics of the batch, or parallel.pipeline=None")

    def _check_message(self, values: Sequence[Atom], collected: Sequence[Any]) -> None:
        for v in values:
            aval: Any = v.aval
            if not jnp.issubdtype(aval.dtype, jnp.floating):
                what = "layers pass it to each other, and it has no gradient to send back"
                self._refuse(v, what, "compute it from the batch inside of the layer")
        for v, one in zip(self.stack.collected, collected, strict=True):
            if not jnp.issubdtype(one.dtype, jnp.floating):
                self._refuse(
                    each(v)[0], "each layer returns it, and it is no floating-point number", "cast it to a float"
                )

    def _check_layers_alone(self, numbers: Iterable[int]) -> None:
        """Checks that nothing but the layers reads their parameters."""
        for number in sorted(numbers):
            for v in self.flat.jaxpr.eqns[number].invars:
                if is_in(v, self.of_layers):
                    at = Source.of(self.flat.jaxpr.eqns[number]).line
                    raise ShardingError(f"{at}: {self.arguments[self.place[v]].name}: {OF_ALL_LAYERS}")

    def _refuse(self, v: Any, what: str, fix: str) -> None:
        number = self.stack.start if is_literal(v) else self.producer.get(v)
        at = Source.of(self.flat.jaxpr.eqns[number]).line if number is not None else "the loss"
        is_argument = not is_literal(v) and v in self.place
        name = self.arguments[self.place[v]].name if is_argument else v.aval.str_short(short_dtypes=True)
        raise ShardingError(f"{at}: {name}: a pipeline cannot cut the model here: {what}; {fix}")


def is_in(v: Any, among: set[Var]) -> bool:
    return not is_literal(v) and v in among


def _is_dear(eqn: Any) -> bool:
    if eqn.primitive.name in _DEAR:
        return True
    inner = (eqn.params.get(name) for name in ("jaxpr", "call_jaxpr"))
    return any(_is_dear(one) for jaxpr in inner if jaxpr is not None for one in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _structs(atoms: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    return [_struct(v.aval) for v in atoms]


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype)


def _traced(function: Callable[..., list[Any]], structs: Sequence[Any]) -> ClosedJaxpr:
    return jax.make_jaxpr(function)(*structs)
