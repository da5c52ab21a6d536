"""Counts what the operations of a traced program read, write and compute, without compiling it.

Matrix products, convolutions and collectives are left out: `cost.flops` and `cost.traced` count those. Operations
that compilers fuse count as one operation, which reads its arrays and writes its result, see `cost.flat`.

XLA gathers and scatters along the first dim in memory. So what is gathered or scattered along its last dim is
transposed before and after, which counts as a function of its elements. Other transpositions count nothing: products
read any order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from fractions import Fraction

from jax.extend.core import ClosedJaxpr

from meshpar.cost.flat import EXPENSIVE, SCALARS, UNCOUNTED, VIEWS, Flat, Operation, flat_bodies, is_entered
from meshpar.cost.walk import inner_jaxprs

_DIM_PARAMS = {
    "all_gather": "all_gather_dimension",
    "all_gather_invariant": "all_gather_dimension",
    "reduce_scatter": "scatter_dimension",
}
"""Collectives along a dim -> the parameter that says which one."""
TRANSPOSE = "transpose"
"""The name under which transposed elements count among the functions."""


@dataclass(frozen=True, order=True)
class Touch:
    """The cost of an operation that is neither a product nor a collective.

    Args:
      num_bytes: the bytes that it reads and writes.
      functions: (name, number of elements) of every function that it computes, such as exp, see `flat.EXPENSIVE`, and
        of `TRANSPOSE`.
    """

    num_bytes: int
    functions: tuple[tuple[str, int], ...] = ()

    def divided(self, parts: int) -> Touch:
        """The same operation on a part of the elements."""
        functions = tuple((name, count // parts) for name, count in self.functions)
        return Touch(self.num_bytes // parts, functions)


Counts = dict[Touch, Fraction]


def touched_bytes(program: ClosedJaxpr, mean: bool = False) -> Counts:
    """The operations of a device other than products and collectives -> how often they run; see `flat_bodies`."""
    found: Counts = defaultdict(Fraction)
    for flat, times in flat_bodies(program, mean):
        _add(flat, times, found)
    return found


def functions_outside(program: ClosedJaxpr) -> Counter[str]:
    """Functions -> the elements for which a program computes them outside of manual regions, in whole arrays."""
    found: Counter[str] = Counter()
    remaining = [program.jaxpr]
    while remaining:
        for equation in remaining.pop().eqns:
            name = equation.primitive.name
            if name in EXPENSIVE:
                found[name] += equation.outvars[0].aval.size
            elif name != "shard_map":
                remaining += inner_jaxprs(equation)
    return found


def _add(flat: Flat, times: Fraction, found: Counts) -> None:
    moved = {value for one in flat.operations if one.name in _DIM_PARAMS for value in [*one.reads, *one.writes]}
    reads: dict[int, set[int]] = {}  # recomputed value -> the arrays from which it is computed
    computes: dict[int, Counter[str]] = {}  # recomputed value -> the elements of the functions that compute it
    for operation in flat.operations:
        if is_entered(operation):
            continue
        if transposed := _transposed(operation, moved):
            found[Touch(0, ((TRANSPOSE, transposed),))] += times
        arrays = set().union(*(reads.get(value, {value}) for value in operation.reads))
        pending = [computes[value] for value in {*operation.reads} & computes.keys()]
        functions = sum(pending, Counter[str]())
        if operation.name in EXPENSIVE:
            functions[operation.name] += operation.equation.outvars[0].aval.size
        computed = bool(pending) or operation.name not in VIEWS
        written = operation.writes[0] if len(operation.writes) == 1 else None
        # What several operations read is not computed for each of them if it takes functions.
        if written in flat.fused or (written in flat.recomputed and not functions):
            reads[written] = arrays if flat.part(operation) is None else {written}
            if computed:
                computes[written] = functions
        elif computed and operation.name not in UNCOUNTED | {"optimization_barrier"}:
            part = flat.part(operation)
            whole = (flat.sizes[value] for value in [*arrays, *operation.writes])
            size = sum(whole) if part is None else 2 * part
            if size > SCALARS:
                found[Touch(size, tuple(sorted(functions.items())))] += times


def _transposed(operation: Operation, moved: set[int]) -> int:
    """The elements that are transposed in memory for a collective, by itself or by a transposition beside it.

    Args:
      moved: values that collectives along a dim read or write.
    """
    equation = operation.equation
    if operation.name in _DIM_PARAMS:
        around = 0 < equation.params[_DIM_PARAMS[operation.name]] == equation.outvars[0].aval.ndim - 1
        return sum(var.aval.size for var in [*equation.invars, *equation.outvars]) if around else 0
    if operation.name == "transpose" and not moved.isdisjoint([*operation.reads, *operation.writes]):
        order = equation.params["permutation"]
        return equation.outvars[0].aval.size if order[-1] != len(order) - 1 else 0
    return 0
