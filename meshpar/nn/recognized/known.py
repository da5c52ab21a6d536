"""Arrays of a traced program that depend on no data, such as masks and positions.

They are computed only if somebody asks for their values, and only along the dims in which they vary: a mask of a row
has no copy for each head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.partition.rules import elementwise

MOST_ELEMENTS = 2**28
"""A larger array is not computed, so nothing is known of it."""


@dataclass(frozen=True, eq=False)
class Known:
    """An array of a program that depends on no data.

    Args:
      shape: without repetition: a dim along which it does not vary has size 1.
      make: computes it.
    """

    shape: tuple[int, ...]
    make: Callable[[], Any]

    @cached_property
    def values(self) -> np.ndarray:
        with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
            return np.asarray(self.make())

    @property
    def scalar(self) -> float | None:
        """Its value, if all elements have the same."""
        is_real = not np.iscomplexobj(self.values)
        return float(self.values.reshape(())) if is_real and math.prod(self.shape) == 1 else None

    def full(self, shape: tuple[int, ...]) -> Known:
        """It with all its copies."""
        return self if self.shape == shape else Known(shape, lambda: np.broadcast_to(self.values, shape))


def constant(x: Any) -> Known:
    return Known(tuple(np.shape(x)), lambda: x)


def results(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """What is known of the results of an operation: None for those that depend on data."""
    if not all(isinstance(x, Known) for x in operands) or eqn.effects:
        return [None] * len(eqn.outvars)
    if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in (*eqn.invars, *eqn.outvars)):
        return [None] * len(eqn.outvars)  # NumPy has no random keys
    rule = VIEWS.get(eqn.primitive.name)
    if rule is not None:
        return [rule(eqn, *operands)]
    shapes = [tuple(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name in ELEMENTWISE and len(eqn.outvars) == 1:
        return [_of_elements(eqn, operands)]
    if max(map(math.prod, shapes)) > MOST_ELEMENTS or any(map(_is_program, eqn.params.values())):
        return [None] * len(eqn.outvars)
    given = [x.full(shape) for x, shape in zip(operands, shapes, strict=False)]
    return [
        Known(tuple(v.aval.shape), lambda i=i: _bound(eqn, [x.values for x in given])[i])
        for i, v in enumerate(eqn.outvars)
    ]


def _of_elements(eqn: Any, operands: Sequence[Known]) -> Known | None:
    ndim = len(eqn.outvars[0].aval.shape)
    shape = np.broadcast_shapes(*(x.shape for x in operands if len(x.shape) == ndim))
    if math.prod(shape) > MOST_ELEMENTS:
        return None
    given = [x.full(shape) if len(x.shape) == ndim else x for x in operands]
    return Known(shape, lambda: _bound(eqn, [x.values for x in given])[0])


def _bound(eqn: Any, values: Sequence[Any]) -> list[Any]:
    found = eqn.primitive.bind(*map(jax.numpy.asarray, values), **eqn.params)
    return found if eqn.primitive.multiple_results else [found]


def _is_program(x: Any) -> bool:
    return hasattr(x, "jaxpr") or hasattr(x, "eqns") or (isinstance(x, tuple) and any(map(_is_program, x)))


def _iota(eqn: Any) -> Known:
    dim = eqn.params["dimension"]
    shape = tuple(size if i == dim else 1 for i, size in enumerate(eqn.params["shape"]))
    return Known(shape, lambda: np.arange(shape[dim], dtype=eqn.params["dtype"]).reshape(shape))


def _broadcast(eqn: Any, x: Known) -> Known:
    shape = [1] * len(eqn.params["shape"])
    for dim, size in zip(eqn.params["broadcast_dimensions"], x.shape, strict=True):
        shape[dim] = size
    return Known(tuple(shape), lambda: x.values.reshape(shape))


def _transpose(eqn: Any, x: Known) -> Known:
    permutation = [*map(int, eqn.params["permutation"])]
    return Known(tuple(x.shape[i] for i in permutation), lambda: x.values.transpose(permutation))


def _squeeze(eqn: Any, x: Known) -> Known:
    shape = tuple(size for i, size in enumerate(x.shape) if i not in eqn.params["dimensions"])
    return Known(shape, lambda: x.values.reshape(shape))


def keeps_dims(eqn: Any) -> bool:
    """Whether a reshape only adds or drops dims of size 1."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return [n for n in before if n > 1] == [n for n in after if n > 1] and eqn.params.get("dimensions") is None


def _reshaped(eqn: Any, x: Known) -> Known | None:
    if not keeps_dims(eqn):
        return None
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    left = iter(size for size, n in zip(x.shape, before, strict=True) if n > 1)
    shape = tuple(next(left) if n > 1 else 1 for n in after)
    return Known(shape, lambda: x.values.reshape(shape))


def view(eqn: Any, x: Known) -> Known | None:
    """The result of an operation that only changes the order or the number of dims."""
    return (VIEWS | {"reshape": _reshaped})[eqn.primitive.name](eqn, x)


VIEWS: dict[str, Callable[..., Known]] = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
}
ELEMENTWISE = {*elementwise.RULES} - {"iota", "broadcast_in_dim"}
