"""Estimates the memory that a traced program needs at its peak, without compiling it.

A value is held from the equation that computes it to the last equation that reads it. An elementwise operation whose
result is read once is fused with its reader: its result is not held, and its operands are held until the reader runs.
An operation that can write in place, such as an update of a slice, overwrites an array of the same size that it reads
last. A loop holds its results and the memory of one iteration, which overwrites the arrays of the previous one; a loop
of one iteration is none. A loop overwrites the start of what it carries, and a conditional what one of its branches
returns as it is, unless that is read later. XLA compares the regions in which values live to see it: XLA:CPU always,
XLA:GPU by an option that `ParallelContext.compiler_options` sets for pipelines.

Before its first loop, a program fills the arrays in which later loops collect slices, and it stores in another order
the parameters that are gathered along a later dim. Compilers choose the order of operations, so this is an estimate;
`inspection.program.memory` reads the memory of a compiled program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from meshpar.cost.flat import ELEMENTWISE, VIEWS, Flat, Operation, bodies, size_of
from meshpar.cost.walk import inner_jaxprs

_IN_PLACE = ELEMENTWISE | VIEWS | {"dynamic_update_slice", "scatter", "scatter-add"}
"""Operations whose results may overwrite an operand that no later operation reads."""
_SLICES = {"convert_element_type", "copy", "dynamic_slice", "name", "pvary", "reshape", "slice", "squeeze", "transpose"}
"""Operations whose results are their operand, or a slice of it."""


def peak_bytes(program: ClosedJaxpr, size: Callable[[Any], int] = size_of) -> int:
    """The largest number of bytes that a program holds on a device, in addition to its arguments.

    Args:
      program: the result of `jax.make_jaxpr`. Only manual regions count; without any, the program of one device.
      size: the bytes of a value.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from meshpar.mesh.layout import MeshLayout
      >>> mesh = MeshLayout(data=4).abstract()
      >>> twice = jax.shard_map(lambda x: x @ x @ x, mesh=mesh, in_specs=P(), out_specs=P())
      >>> peak_bytes(jax.make_jaxpr(twice)(jnp.ones((8, 8), jnp.float32)))
      512
    """
    return max(_peak(body, size) + sum(size(body.invars[index]) for index in _relaid(body)) for body in bodies(program))


def _relaid(jaxpr: Jaxpr, transposed_arguments: Collection[int] = ()) -> set[int]:
    """The arguments that XLA copies because collectives gather along the first dim in memory: they are transposed and
    gathered, whole or in slices, also in the bodies of loops."""
    sources: dict[Any, int] = {var: index for index, var in enumerate(jaxpr.invars)}
    transposed: set[Any] = {jaxpr.invars[index] for index in transposed_arguments}
    found: set[int | None] = set()
    for equation in jaxpr.eqns:
        atoms = [None if isinstance(atom, Literal) else atom for atom in equation.invars]
        operands = [sources.get(atom) for atom in atoms]
        name = equation.primitive.name
        if name == "all_gather" and atoms[0] in transposed:
            found.add(operands[0])
        elif name in _SLICES and operands[0] is not None:
            sources[equation.outvars[0]] = operands[0]
            if atoms[0] in transposed or (name == "transpose" and equation.params["permutation"][0] > 0):
                transposed.add(equation.outvars[0])
        for inside in inner_jaxprs(equation):
            read = atoms[len(atoms) - len(inside.invars) :]  # a conditional has an index before what its branches read
            if len(read) == len(inside.invars):
                of_read = _relaid(inside, [index for index, atom in enumerate(read) if atom in transposed])
                found |= {sources.get(read[index]) for index in of_read}
    return {index for index in found if index is not None}


def _peak(jaxpr: Jaxpr, size: Callable[[Any], int], owned: Collection[int] = ()) -> int:
    """The largest number of bytes that a program, or the body of a loop, holds in addition to its arguments.

    Args:
      owned: indices of the arguments that it may overwrite.
    """
    flat = Flat(jaxpr, once=True, shares=True, size=size)
    filled = [0] * len(flat.operations) if owned else _filled(flat)
    now = most = 0
    freed: dict[int, set[int]] = defaultdict(set)
    for index in owned:
        value = flat.arguments[jaxpr.invars[index]]
        freed[flat.last_reads.get(value, len(flat.operations))].add(value)
    for position, operation in enumerate(flat.operations):
        written = [value for value in operation.writes if value not in flat.fused]
        new = held = sum(flat.sizes[value] for value in written)
        if overwritten := _overwritten(operation, freed[position]):
            new -= _shared(map(flat.sizes.__getitem__, written), map(flat.sizes.__getitem__, overwritten))
        inside = max((_peak(one, size, _owned(operation, one)) for one in operation.inside), default=0)
        here = max(new, inside) if operation.name == "cond" else new + inside
        most = max(most, now + here + filled[position])
        for value in written:
            freed[flat.last_reads.get(value, position)].add(value)
        now += held - sum(flat.sizes[value] for value in freed[position])
    return most


def _filled(flat: Flat) -> list[int]:
    """For each operation, bytes of the arrays in which later loops collect a slice in each iteration."""
    found = [0]
    for operation in reversed(flat.operations):
        found.append(found[-1] + (_collected(operation, flat) if operation.name == "scan" else 0))
    return found[-2::-1]


def _collected(loop: Operation, flat: Flat) -> int:
    """Bytes of the results of a loop to which each iteration adds a slice."""
    outer = loop.equation
    pairs = zip(outer.outvars, loop.inside[0].outvars, loop.writes, strict=True)
    return sum(flat.sizes[value] for outside, inside, value in pairs if not _same_ndim(outside, inside))


def _overwritten(operation: Operation, freed: set[int]) -> set[int]:
    """The values that an operation overwrites, of those that are not read later: of a loop what it carries, of a
    conditional what it changes."""
    if operation.name in _IN_PLACE:
        return freed
    carried = {operation.reads[i - len(one.invars)] for one in operation.inside for i in _owned(operation, one)}
    return carried & freed


def _shared(written: Iterable[int], overwritten: Iterable[int]) -> int:
    """Bytes of the results that have the size of an array that may be overwritten."""
    return sum(size * count for size, count in (Counter(written) & Counter(overwritten)).items())


def _owned(operation: Operation, inside: Jaxpr) -> Collection[int]:
    """The arguments that the body of a loop may overwrite, its carry; of a conditional, those that it changes."""
    end = len(inside.invars)
    if operation.name == "cond":
        return _changed(operation)
    if operation.name == "scan":
        outer = operation.equation
        num_carried = sum(map(_same_ndim, outer.outvars, inside.outvars))
        end -= sum(not _same_ndim(*pair) for pair in zip(outer.invars, inside.invars, strict=True))
    else:
        num_carried = len(operation.writes) if operation.name == "while" else 0
    return range(end - num_carried, end)


def _changed(conditional: Operation) -> set[int]:
    """The arguments of the branches that one of them returns as they are."""
    found: set[int] = set()
    for one in conditional.inside:
        indices = {var: index for index, var in enumerate(one.invars)}
        found |= {indices[atom] for atom in one.outvars if not isinstance(atom, Literal) and atom in indices}
    return found


def _same_ndim(outside: Any, inside: Any) -> bool:
    """Whether a loop passes a whole array to its body; otherwise each iteration has a slice of it."""
    return outside.aval.ndim == inside.aval.ndim
