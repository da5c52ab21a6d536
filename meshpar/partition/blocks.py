"""Finds equal blocks in a traced loss: a Python loop over Linen modules, an `nnx.List`, a list of plain parameters.

Parameters are numbered by their paths: `block_3.mlp.kernel`, `layers.3.w`. The operations that read those of one block
stand together in the trace, so block after block is the same sequence of operations, a fixed distance apart. Each input
of an operation is then one of these:

- the block's own parameter;
- what an operation of the same block made, or the same operation of the block before;
- a value that all blocks read;
- a value of its own that was made before the first block, such as a random key, or a number that differs.

Blocks that alternate are found as blocks of twice the length, and so on. Among all places where the sequence can be cut
the one is taken that passes the fewest bytes from block to block.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from meshpar.partition.op import partitioned_p, whole
from meshpar.partition.rules.derivatives import traced_halves
from meshpar.partition.stack import Atom, Row, Stack, is_literal

_NUMBERED = re.compile(r"^(.*?)(\d+)$")
_Blocks = list[dict[str, int]]
"""For each block, in order: its name of each of its parameters -> the argument of the loss."""


def sunk(closed: ClosedJaxpr, num_params: int, num_batch: int) -> ClosedJaxpr:
    """The same program in another order.

    What is made of parameters alone (a cast, a transpose) stands just before its first use. Small values that depend on
    no parameter and no batch (random keys, counts) stand first, each of them once: the key of block i is often the i-th
    of an array, which is another operation in each block.
    """
    small = _small_first(closed.jaxpr, num_params + num_batch)
    of = closed.jaxpr
    params, data = {*of.invars[:num_params]}, {*of.invars[num_params:], *of.constvars}
    producer: dict[Var, Any] = {}
    for eqn in small:
        read = {v for v in eqn.invars if not is_literal(v)}
        if read and not read & data and not eqn.effects:
            producer |= dict.fromkeys(eqn.outvars, eqn)
        else:
            data |= {*eqn.outvars}
    eqns: list[Any] = []
    emitted: set[int] = set()

    def emit(eqn: Any) -> None:
        if id(eqn) in emitted:
            return
        emitted.add(id(eqn))
        for v in eqn.invars:
            if not is_literal(v) and v not in params and v in producer:
                emit(producer[v])
        eqns.append(eqn)

    for eqn in small:
        if not any(v in producer for v in eqn.outvars):
            emit(eqn)
    for v in of.outvars:
        if not is_literal(v) and v in producer:
            emit(producer[v])
    jaxpr = Jaxpr(of.constvars, of.invars, of.outvars, eqns, of.effects, debug_info=of.debug_info)
    return ClosedJaxpr(jaxpr, closed.consts)


SMALL = 64
"""The most numbers of a value that stands before the blocks. Larger ones would take the memory of all blocks."""


def _small_first(of: Jaxpr, num_others: int) -> list[Any]:
    """The operations, with those on small values that depend on none of the first arguments first, each once."""
    known: dict[Any, Any] = {v: v for v in (*of.invars[num_others:], *of.constvars)}
    first, others, made = [], [], {}
    returned = {v for v in of.outvars if not is_literal(v)}
    for eqn in of.eqns:
        is_small = all(_size(v.aval) <= SMALL for v in eqn.outvars) and not eqn.effects
        if not is_small or not all(is_literal(v) or v in known for v in eqn.invars):
            others.append(eqn)
            continue
        invars: list[Any] = [v if is_literal(v) else known[v] for v in eqn.invars]
        read = tuple((repr(v.val), str(v.aval)) if is_literal(v) else v for v in invars)
        params = tuple((name, repr(x) if _is_plain(x) else id(x)) for name, x in eqn.params.items())
        key = (eqn.primitive, params, read)
        if key in made and not returned & {*eqn.outvars}:
            known.update(zip(eqn.outvars, made[key].outvars, strict=True))
            continue
        made[key] = eqn.replace(invars=invars)
        known.update((v, v) for v in eqn.outvars)
        first.append(made[key])
    return [
        *first,
        *(e.replace(invars=[v if is_literal(v) else known.get(v, v) for v in e.invars]) for e in others),
    ]


def _is_plain(x: Any) -> bool:
    """Whether a parameter's text says all of it: it holds no program, no function and no array."""
    if isinstance(x, (tuple, list)):
        return all(map(_is_plain, x))
    return x is None or isinstance(x, (bool, int, float, str, np.dtype, type))


def blocks(closed: ClosedJaxpr, paths: Sequence[str], sizes: Sequence[tuple[Any, ...]]) -> Iterator[Stack]:
    """Each stack of equal blocks.

    Args:
      closed: a loss, after `sunk`.
      paths: of its parameters, which are its first arguments.
      sizes: shape and dtype of each.
    """
    used: set[int] = set()
    for run in _runs(paths, sizes):
        own = {i for block in run for i in block.values()}
        if own <= used:  # layers within the blocks of a stack
            continue
        for joined in _candidates(run):
            if found := _Sequence(closed, joined, len(paths)).stack():
                yield found
                used |= own
                break


def _candidates(run: _Blocks) -> Iterator[_Blocks]:
    """Blocks that may be equal: with each period; then without the first, which may cast its input, or the last."""
    for part in (run, run[1:], run[:-1]):
        yield from (_joined(part, period) for period in range(1, len(part) // 2 + 1) if len(part) % period == 0)


def _runs(paths: Sequence[str], sizes: Sequence[tuple[Any, ...]]) -> Iterator[_Blocks]:
    """Each longest run of numbered blocks whose parameters have the same names and sizes, those of outer modules first.

    Any name of a path may number a block: in `resnet50.stage_2.block_0.kernel` only the last one does.
    """
    found: dict[tuple[str, ...], dict[int, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for i, path in enumerate(paths):
        names = path.split(".")
        for place, name in enumerate(names):
            if match := _NUMBERED.match(name):
                kind = (*names[:place], match[1])
                found[kind][int(match[2])][".".join([match[1], *names[place + 1 :]])] = i
    for numbered in _outer_first(found):
        kinds = {n: tuple((name, sizes[i]) for name, i in sorted(block.items())) for n, block in numbered.items()}
        runs: list[list[int]] = []
        for n in sorted(numbered):
            is_next = runs and runs[-1][-1] == n - 1
            runs = [*runs[:-1], [*runs[-1], n]] if is_next else [*runs, [n]]
        for run in runs:
            yield from _equal(run, kinds, numbered)


def _outer_first(found: dict[tuple[str, ...], dict[int, dict[str, int]]]) -> Iterator[dict[int, dict[str, int]]]:
    for depth in sorted({len(kind) for kind in found}):
        of_depth = {kind: numbered for kind, numbered in found.items() if len(kind) == depth}
        yield from (*_side_by_side(of_depth), *of_depth.values())


def _side_by_side(found: dict[tuple[str, ...], dict[int, dict[str, int]]]) -> Iterator[dict[int, dict[str, int]]]:
    """Kinds of parameters with the same numbers in one module, as `norm_0, mixer_0, norm_1, mixer_1`."""
    together: dict[Any, list[dict[int, dict[str, int]]]] = defaultdict(list)
    for kind, numbered in found.items():
        together[kind[:-1], tuple(sorted(numbered))].append(numbered)
    for (_, numbers), several in together.items():
        if len(several) > 1:
            yield {n: {name: i for one in several for name, i in one[n].items()} for n in numbers}


def _equal(run: list[int], kinds: dict[int, Any], numbered: dict[int, dict[str, int]]) -> Iterator[_Blocks]:
    if len({kinds[n] for n in run}) == 1:
        parts = [run]
    else:  # blocks that alternate; or the longest part of equal ones
        parts = [run] if _alternates([kinds[n] for n in run]) else [_longest(run, kinds)]
    for part in parts:
        if len(part) > 1:
            yield [numbered[n] for n in part]


def _alternates(kinds: list[Any]) -> bool:
    return any(
        len(kinds) % period == 0 and kinds == kinds[:period] * (len(kinds) // period)
        for period in range(2, len(kinds) // 2 + 1)
    )


def _longest(run: list[int], kinds: dict[int, Any]) -> list[int]:
    parts: list[list[int]] = []
    for n in run:
        same = parts and kinds[parts[-1][-1]] == kinds[n]
        parts = [*parts[:-1], [*parts[-1], n]] if same else [*parts, [n]]
    return max(parts, key=len)


def _joined(run: _Blocks, period: int) -> _Blocks:
    """Blocks of `period` blocks each."""
    return [
        {f"{place}.{name}": i for place, block in enumerate(run[m : m + period]) for name, i in block.items()}
        for m in range(0, len(run), period)
    ]


@dataclass(frozen=True)
class _Slot:
    """An input of the first block's operations.

    Args:
      kind: `own`, `const`, `row`, or `made`: what an operation of this block, or of the one before, returns.
      first: the value in the first block.
      place, index: for `made`, the number of the operation and of its result, in the block after the first.
      row: the values of all blocks; for `own`, the arguments.
    """

    kind: str
    first: Atom
    place: int = 0
    index: int = 0
    row: tuple[Any, ...] = ()


class _Sequence:
    """The operations of a loss, seen as those of blocks with these parameters."""

    def __init__(self, closed: ClosedJaxpr, own: _Blocks, num_params: int) -> None:
        self.closed = closed
        self.eqns = closed.jaxpr.eqns
        self.own = own
        self.places = {v: (n, i) for n, eqn in enumerate(self.eqns) for i, v in enumerate(eqn.outvars)}
        self.consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        invars = closed.jaxpr.invars
        self.of_params = self._reached(invars[:num_params])
        self.block_of = {invars[i]: (m, name) for m, block in enumerate(own) for name, i in block.items()}

    def stack(self) -> Stack | None:
        starts = self._starts()
        if starts is None:
            return None
        start, self.length = starts
        slots = {}
        for n in range(max(0, start - self.length + 1), start + self.length):
            slots[n] = self._matched(n)
        best: tuple[int, Stack] | None = None
        for cut in range(start, max(-1, start - self.length), -1):
            if slots[cut] is None:  # no cut before it contains only equal operations
                break
            found = self._stack(cut, slots)
            if found and (best is None or found[0] < best[0]):
                best = found
        return best[1] if best else None

    def _starts(self) -> tuple[int, int] | None:
        """The first operation that reads a parameter of the first block, and the distance to that of the second."""
        firsts: dict[int, int] = {}
        for n, eqn in enumerate(self.eqns):
            for v in eqn.invars:
                if not is_literal(v) and v in self.block_of:
                    firsts.setdefault(self.block_of[v][0], n)
        order = [firsts.get(m, -1) for m in range(len(self.own))]
        distances = {b - a for a, b in pairwise(order)}
        return (order[0], distances.pop()) if len(distances) == 1 and min(order) >= 0 and order[1] > order[0] else None

    def _matched(self, n: int) -> list[_Slot] | None:
        """The inputs of the operation, if every block has the same at its place."""
        numbers = [n + self.length * m for m in range(len(self.own))]
        if numbers[-1] >= len(self.eqns):
            return None
        eqns = [self.eqns[number] for number in numbers]
        if any(not _same(eqns[0], eqn) for eqn in eqns[1:]):
            return None
        slots = [self._slot([eqn.invars[i] for eqn in eqns]) for i in range(len(eqns[0].invars))]
        return None if any(slot is None for slot in slots) else slots  # pyright: ignore

    def _slot(self, atoms: list[Any]) -> _Slot | None:
        if len({(v.aval.shape, v.aval.dtype) for v in atoms}) > 1:
            return None
        if all(is_literal(v) for v in atoms):
            same = all(np.array_equal(v.val, atoms[0].val) for v in atoms)
            return _Slot("const", atoms[0]) if same else _Slot("row", atoms[0], row=tuple(atoms))
        if any(is_literal(v) for v in atoms[1:]):
            return None
        owners = [None if is_literal(v) else self.block_of.get(v) for v in atoms]
        if any(owners):
            names = {owner[1] for owner in owners if owner}
            if len(names) == 1 and [owner and owner[0] for owner in owners] == [*range(len(atoms))]:
                return _Slot("own", atoms[0], row=tuple(block[next(iter(names))] for block in self.own))
            return None
        if all(v is atoms[0] for v in atoms):
            return _Slot("const", atoms[0])
        if all(not is_literal(v) and v in self.consts for v in atoms):
            values = [self.consts[v] for v in atoms]
            same = all(x is values[0] or np.array_equal(x, values[0]) for x in values)
            return _Slot("const", atoms[0]) if same else _Slot("row", atoms[0], row=tuple(atoms))
        places = [self.places.get(v) for v in atoms[1:]]
        if all(places):
            (place, index) = places[0]  # pyright: ignore
            if all(one == (place + self.length * m, index) for m, one in enumerate(places)):
                return _Slot("made", atoms[0], place, index, tuple(atoms))
        return None if is_literal(atoms[0]) else _Slot("row", atoms[0], row=tuple(atoms))

    def _stack(self, start: int, slots: dict[int, list[_Slot] | None]) -> tuple[int, Stack] | None:
        """The stack whose first block starts here, and the bytes that pass from block to block."""
        stop = start + self.length
        own: dict[Any, tuple[int, ...]] = {}
        consts: dict[Any, None] = {}
        rows: list[tuple[Atom, Row]] = []
        carry: dict[tuple[int, int], Atom] = {}
        eqns = []
        for n in range(start, stop):
            found = slots[n]
            if found is None:
                return None
            invars = []
            for slot in found:
                v = slot.first
                # What depends on no parameter, such as a count of random keys, is computed before: it has no gradient.
                trained = [x for x in slot.row if not is_literal(x) and x in self.of_params]
                is_before = slot.kind == "made" and (slot.place < start or (slot.place < stop and not trained))
                is_row = slot.kind == "row" or is_before
                if is_row:
                    if any(self._place(x) >= start for x in trained):
                        return None
                    v = Var(v.aval)
                    rows.append((v, slot.row))
                elif slot.kind == "made" and slot.place < stop:
                    at = (slot.place, slot.index)
                    if slot.place < start or self._place(v) >= start or carry.setdefault(at, v) is not v:
                        return None
                elif slot.kind == "made":
                    if self.places.get(v) != (slot.place - self.length, slot.index):
                        return None
                elif slot.kind == "own":
                    own[v] = slot.row  # pyright: ignore
                elif slot.kind == "const" and not is_literal(v):
                    if self._place(v) >= start:
                        return None
                    consts[v] = None
                invars.append((v, slot.kind == "made" and not is_row and slot.place < stop, slot))
            eqns.append((self.eqns[n], invars))
        return self._built(start, own, consts, rows, carry, eqns)

    def _built(
        self,
        start: int,
        own: dict[Any, tuple[int, ...]],
        consts: dict[Any, None],
        rows: list[tuple[Atom, Row]],
        carry: dict[tuple[int, int], Atom],
        eqns: list[Any],
    ) -> tuple[int, Stack]:
        inner = {at: Var(v.aval) for at, v in carry.items()}
        made = []
        for eqn, invars in eqns:
            atoms = [inner[slot.place, slot.index] if is_carried else v for v, is_carried, slot in invars]
            made.append(eqn.replace(invars=atoms))
        returned = [self.eqns[place].outvars[index] for place, index in carry]
        end = start + self.length * len(self.own)
        collected = self._collected(start, end, carry)
        bodys = [self.eqns[place].outvars[index] for place, index in collected]
        invars = [*consts, *(v for v, _ in rows), *inner.values(), *own]
        of = self.closed.jaxpr
        body = Jaxpr((), invars, [*returned, *bodys], made, frozenset(), debug_info=of.debug_info)
        last = self.length * (len(self.own) - 1)
        stack = Stack(
            start=start,
            stop=end,
            num_layers=len(self.own),
            body=ClosedJaxpr(body, ()),
            consts=tuple(consts),
            rows=tuple(row for _, row in rows),
            carry=tuple(carry.values()),
            own=tuple(own.values()),
            outs=tuple(self.eqns[place + last].outvars[index] for place, index in carry),
            collected=tuple(
                tuple(self.eqns[place + self.length * m].outvars[index] for m in range(len(self.own)))
                for place, index in collected
            ),
        )
        num_bytes = sum(_bytes(v.aval) for v in inner.values()) + sum(_bytes(v.aval) for v in bodys) * len(self.own)
        return num_bytes, stack

    def _collected(self, start: int, end: int, carry: dict[tuple[int, int], Atom]) -> list[tuple[int, int]]:
        """What blocks return beside what the next one reads: values that are read after the last block."""
        read = [v for eqn in self.eqns[end:] for v in eqn.invars] + list(self.closed.jaxpr.outvars)
        found = {}
        for v in read:
            place, index = self.places.get(v, (-1, 0)) if not is_literal(v) else (-1, 0)
            if start <= place < end and v in self.of_params:
                at = (start + (place - start) % self.length, index)
                if at not in carry or place < end - self.length:
                    found[at] = None
        return list(found)

    def _reached(self, start: Sequence[Var]) -> set[Any]:
        """The values that depend on any of these."""
        reached: set[Any] = {*start}
        for eqn in self.eqns:
            if any(not is_literal(v) and v in reached for v in eqn.invars):
                reached.update(eqn.outvars)
        return reached

    def _place(self, v: Atom) -> int:
        """The number of the operation that makes a value; -1 for arguments and numbers."""
        return self.places.get(v, (-1, 0))[0] if not is_literal(v) else -1  # pyright: ignore


def _size(aval: Any) -> int:
    return math.prod(aval.shape)


def _bytes(aval: Any) -> int:
    return _size(aval) * getattr(aval.dtype, "itemsize", 8)


def _same(a: Any, b: Any) -> bool:
    """Whether two operations differ at most in their operands."""
    if a.primitive is not b.primitive or len(a.invars) != len(b.invars) or a.params.keys() != b.params.keys():
        return False
    # Each of these has functions of its own, which make no text, so what they compute is compared.
    if a.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        mine, theirs = (_derivatives(eqn) for eqn in (a, b))
        return all(map(_equal_params, mine, theirs))
    if a.primitive is partitioned_p:
        labels, others = ((s.ins, s.outs, s.summed, s.closed) for s in (a.params["signature"], b.params["signature"]))
        return labels == others and _equal_params(_computed(a), _computed(b))
    return all(_equal_params(a.params[name], b.params[name]) for name in a.params)


def _derivatives(eqn: Any) -> tuple[ClosedJaxpr, ...]:
    halves = traced_halves(eqn, [v.aval for v in eqn.invars])
    return halves.primal, halves.forward, halves.backward


def _computed(eqn: Any) -> ClosedJaxpr:
    return jax.make_jaxpr(whole(eqn.params["signature"]))(*(v.aval for v in eqn.invars))


def _equal_params(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, (Jaxpr, ClosedJaxpr)):
        return isinstance(b, type(a)) and _text(a) == _text(b) and _equal_numbers(a, b)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal_params, a, b))
    return bool(np.all(a == b))


def _equal_numbers(a: Any, b: Any) -> bool:
    return all(x is y or np.array_equal(x, y) for x, y in zip(_numbers(a), _numbers(b), strict=True))


def _numbers(jaxpr: Any) -> Iterator[Any]:
    """All constants and numbers in a program and in those that it contains. Its text shows no constants."""
    yield from getattr(jaxpr, "consts", ())
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield from (v.val for v in eqn.invars if is_literal(v))
        for value in eqn.params.values():
            several = value if isinstance(value, (tuple, list)) else (value,)
            for inner in (one for one in several if isinstance(one, (Jaxpr, ClosedJaxpr))):
                yield from _numbers(inner)


@lru_cache(maxsize=4096)
def _text(jaxpr: Any) -> str:
    return str(jaxpr)
