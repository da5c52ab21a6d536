"""Finds in the trace of a loss which parameters are matrices: how a model uses them, whatever its dims are called.

A parameter that is multiplied in a product or a convolution is a matrix: its contracted dims are the inputs, the
others the outputs. A parameter whose rows are looked up is a table. All others, which are only added or multiplied
elementwise, are vectors: norms and biases. Dims over which a `scan` iterates, that a `vmap` maps, or of which a loop
takes one index at a time stack matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxprs_in_params

from meshpar.optim.base import Matrix
from meshpar.partition.op import partitioned_p, whole
from meshpar.partition.rules.loops import scan_counts

Dims = tuple[tuple[int, ...], ...]
"""For each dim of a value, the dims of the parameter that it consists of."""

_SAME = {
    "convert_element_type", "copy", "copy_p", "sharding_constraint", "optimization_barrier", "stop_gradient", "pcast",
    "reduce_precision", "name", "neg", "invariant",
}  # fmt: skip
"""Operations whose result has the dims of their operand."""
_SCALED = {"mul", "div", "add", "sub", "max", "min", "add_any"}


@dataclass(frozen=True)
class _View:
    """A value that has the elements of one parameter, with its dims in another order or form."""

    path: int
    dims: Dims


@dataclass
class _Use:
    """How a parameter of some shape is used."""

    shape: tuple[int, ...]
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    stacked: set[int] = field(default_factory=set)
    is_table: bool = False

    @property
    def matrix(self) -> Matrix:
        inputs = tuple(sorted(self.inputs - self.stacked))
        outputs = tuple(sorted(self.outputs - self.stacked - self.inputs))
        if not outputs or not inputs:
            rest = (dim for dim in range(len(self.shape)) if dim not in self.stacked)
            return Matrix(tuple(rest), ())
        return Matrix(inputs, outputs, self.is_table)


def matrices(loss: ClosedJaxpr, params: Any) -> Any:
    """A tree of `Matrix` like the parameters, from the trace of a loss whose first arguments are their leaves.

    Args:
      params: tree of arrays or structs.

    >>> import jax.numpy as jnp
    >>> params = {"w": jnp.ones((5, 3, 4)), "b": jnp.ones((5, 4))}
    >>> def layer(x, one):
    ...     return jnp.tanh(x @ one["w"] + one["b"]) @ jnp.ones((4, 3)), None
    >>> loss = jax.make_jaxpr(lambda params, x: jax.lax.scan(layer, x, params)[0].sum())(params, jnp.ones((2, 3)))
    >>> matrices(loss, params)
    {'b': Matrix(inputs=(1,), outputs=()), 'w': Matrix(inputs=(1,), outputs=(2,))}
    """
    leaves, tree = jax.tree.flatten(params)
    uses = [_Use(tuple(x.shape)) for x in leaves]
    views = [_View(i, tuple((dim,) for dim in range(len(use.shape)))) for i, use in enumerate(uses)]
    _walk(loss.jaxpr, [*views, *[None] * (len(loss.jaxpr.invars) - len(views))], uses)
    return tree.unflatten([use.matrix for use in uses])


def _walk(jaxpr: Any, given: Sequence[_View | None], uses: list[_Use]) -> list[_View | None]:
    """Notes the uses in a jaxpr whose inputs are views, and returns the views among its outputs."""
    views: dict[Var, _View] = {var: view for var, view in zip(jaxpr.invars, given, strict=True) if view}

    def of(atom: Any) -> _View | None:
        return None if isinstance(atom, Literal) else views.get(atom)

    for equation in jaxpr.eqns:
        operands = [of(atom) for atom in equation.invars]
        if not any(operands):
            continue
        results = _results(equation, operands, uses)
        views.update({var: view for var, view in zip(equation.outvars, results, strict=False) if view})
    return [of(atom) for atom in jaxpr.outvars]


def _results(equation: Any, operands: list[_View | None], uses: list[_Use]) -> Sequence[_View | None]:
    """Notes how an equation uses its operands, and returns its results that are views."""
    name, params = equation.primitive.name, equation.params
    view = next(view for view in operands if view)
    if name == "dot_general":
        _product(operands, params["dimension_numbers"], uses)
    elif name == "conv_general_dilated" and (kernel := operands[1]):
        out = params["dimension_numbers"].rhs_spec[0]
        _multiplied(kernel, [dim for dim in range(len(kernel.dims)) if dim != out], [out], uses)
    elif name == "gather" and operands[0]:
        return [_looked_up(operands[0], equation, uses)]
    elif name == "scan":
        return _scan(params, operands, uses)
    elif name in _SAME or (name in _SCALED and _is_scaled(equation, operands)):
        return [view]
    elif name == "transpose":
        return [_View(view.path, tuple(view.dims[dim] for dim in params["permutation"]))]
    elif name in ("reshape", "squeeze", "expand_dims"):
        return [_reshaped(view, equation, uses)]
    elif name == "broadcast_in_dim" and operands[0]:
        return [_broadcast(view, equation)]
    elif name in ("slice", "dynamic_slice") and operands[0]:
        return [_sliced(view, equation, uses)]
    else:
        return _called(equation, operands, uses)
    return []


def _called(equation: Any, operands: list[_View | None], uses: list[_Use]) -> Sequence[_View | None]:
    """Walks the functions that an equation calls, with its last operands as their arguments."""
    found: Sequence[_View | None] = []
    for inner in _programs(equation):
        if len(inner.invars) <= len(operands):
            found = _walk(inner, operands[len(operands) - len(inner.invars) :], uses)
    return found if len(found) == len(equation.outvars) else []


def _programs(equation: Any) -> Iterable[Any]:
    """The programs that an equation runs; of an operation with a signature, what it computes of whole arrays."""
    if equation.primitive is not partitioned_p:
        return jaxprs_in_params(equation.params)
    structs = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]
    return [jax.make_jaxpr(whole(equation.params["signature"]))(*structs).jaxpr]


def _scan(params: Any, operands: list[_View | None], uses: list[_Use]) -> Sequence[_View | None]:
    """A scan iterates over the first dim of its last operands."""
    num_consts, num_carry = scan_counts(params)
    num_whole = num_consts + num_carry
    for view in filter(None, operands[num_whole:]):
        uses[view.path].stacked.update(view.dims[0])
    inner = [*operands[:num_whole], *[view and _View(view.path, view.dims[1:]) for view in operands[num_whole:]]]
    after = _walk(params["jaxpr"].jaxpr, inner, uses)
    return after[:num_carry]


def _product(operands: list[_View | None], numbers: Any, uses: list[_Use]) -> None:
    contracted, batched = numbers
    for view, inputs, stacking in zip(operands, contracted, batched, strict=True):
        if view:
            others = [dim for dim in range(len(view.dims)) if dim not in (*inputs, *stacking)]
            _multiplied(view, inputs, others, uses)
            uses[view.path].stacked.update(*(view.dims[dim] for dim in stacking))


def _multiplied(view: _View, inputs: Iterable[int], outputs: Iterable[int], uses: list[_Use]) -> None:
    """The first use decides: a tied table, whose rows are looked up, is multiplied the other way round at the end."""
    use = uses[view.path]
    found, others = ({of for dim in dims for of in view.dims[dim]} for dims in (inputs, outputs))
    found, others = found - use.outputs, others - use.inputs
    use.inputs |= found
    use.outputs |= others


def _looked_up(view: _View, equation: Any, uses: list[_Use]) -> _View | None:
    """Rows of a table that data selects; or one index at a time, as a loop over layers takes them."""
    numbers = equation.params["dimension_numbers"]
    chosen = numbers.start_index_map
    others = [dim for dim in range(len(view.dims)) if dim not in chosen]
    if math.prod(equation.invars[1].aval.shape[:-1]) == 1 and {*chosen} == {*numbers.collapsed_slice_dims}:
        uses[view.path].stacked.update(*(view.dims[dim] for dim in chosen))
        return _View(view.path, tuple(view.dims[dim] for dim in others))
    if others:
        _multiplied(view, chosen, others, uses)
        uses[view.path].is_table = True
    return None


def _sliced(view: _View, equation: Any, uses: list[_Use]) -> _View:
    """A dim of which one index is taken stacks; a part of a dim is a view of the dim."""
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    taken = [dim for dim, (old, new) in enumerate(zip(before, after, strict=True)) if new == 1 < old]
    uses[view.path].stacked.update(*(view.dims[dim] for dim in taken))
    return _View(view.path, tuple(() if dim in taken else dims for dim, dims in enumerate(view.dims)))


def _broadcast(view: _View, equation: Any) -> _View | None:
    places = equation.params["broadcast_dimensions"]
    shape = equation.outvars[0].aval.shape
    old = equation.invars[0].aval.shape
    if math.prod(shape) != math.prod(old):
        return None
    return _View(view.path, tuple(view.dims[places.index(dim)] if dim in places else () for dim in range(len(shape))))


def _reshaped(view: _View, equation: Any, uses: list[_Use]) -> _View | None:
    """Joined or split dims; None where the parameter's own dims are cut."""
    atoms = [dim for dims in view.dims for dim in dims if uses[view.path].shape[dim] > 1]
    dims: list[tuple[int, ...]] = []
    for size in equation.outvars[0].aval.shape:
        taken: list[int] = []
        while atoms and math.prod(uses[view.path].shape[dim] for dim in taken) < size:
            taken.append(atoms.pop(0))
        if math.prod(uses[view.path].shape[dim] for dim in taken) != size:
            return None
        dims.append(tuple(taken))
    return _View(view.path, tuple(dims)) if not atoms else None


def _is_scaled(equation: Any, operands: list[_View | None]) -> bool:
    """Whether an operation combines one view with a number."""
    sizes = [math.prod(getattr(atom.aval, "shape", ())) for atom in equation.invars]
    whole = math.prod(equation.outvars[0].aval.shape)
    return (
        all(view is None or size == whole for view, size in zip(operands, sizes, strict=True)) and sizes.count(1) == 1
    )
