"""Masks of a traced program that depend on data, such as the padding of a batch.

A mask is followed from the small arrays that it is made of, so that attention gets these and not one element for each
pair of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshpar.nn.recognized import known
from meshpar.nn.recognized.known import Known

NONZERO = object()
"""The value of a mask that is some number other than 0."""


class Frame:
    """A program that is being read: one function, or the body of a loop."""

    def __init__(self) -> None:
        self.captured: dict[Base, Any] = {}
        """Arrays of programs around this one -> the arguments in which it gets them."""
        self._bases: dict[Any, Base] = {}

    def base(self, var: Any) -> Base:
        return self._bases.setdefault(var, Base(self, var))

    def local(self, base: Base) -> Any:
        """The variable of this program that holds an array."""
        if base.frame is self:
            return base.var
        if base not in self.captured:
            self.captured[base] = type(base.var)(base.var.aval)
        return self.captured[base]


@dataclass(frozen=True, eq=False)
class Base:
    """An array that depends on data."""

    frame: Frame
    var: Any


@dataclass(frozen=True, eq=False)
class View:
    """An array with the elements of another one, in another order of dims or repeated.

    Args:
      labels: for each dim, which dim of the base it is; None for one in which it does not vary.
    """

    base: Base
    labels: tuple[int | None, ...]

    @classmethod
    def of(cls, base: Base) -> View:
        return cls(base, tuple(i if n > 1 else None for i, n in enumerate(base.var.aval.shape)))

    @property
    def dtype(self) -> Any:
        return self.base.var.aval.dtype


@dataclass(frozen=True, eq=False)
class Term:
    """A condition on the elements of an array.

    Args:
      views: one, which is not 0 where the condition holds; or two, which are equal there.
      is_negated: whether it holds elsewhere.
    """

    views: tuple[View | Known, ...]
    is_negated: bool = False

    @property
    def frames(self) -> list[Frame]:
        return [view.base.frame for view in self.views if isinstance(view, View)]


@dataclass(frozen=True, eq=False)
class Mask:
    """An array of two values.

    Args:
      on: where all terms hold.
      off: elsewhere.
    """

    terms: tuple[Term, ...]
    on: Any = np.True_
    off: Any = np.False_

    def where(self, value: bool) -> tuple[Term, ...] | None:
        """The terms that hold where the mask is `value`, as a number is true or false; None if these are no terms."""
        on, off = (True if x is NONZERO else bool(x) for x in (self.on, self.off))
        if (on, off) == (value, not value):
            return self.terms
        if (on, off) == (not value, value) and len(self.terms) == 1:
            return (replace(self.terms[0], is_negated=not self.terms[0].is_negated),)
        return None


def as_mask(x: Any) -> Mask | None:
    """Flags, and arrays that know only 0 and 1, as a mask."""
    if isinstance(x, View):
        return Mask((Term((x,)),)) if x.dtype == bool else None
    if isinstance(x, Known):
        values = x.values
        if not (values == values.astype(bool)).all():
            return None
        return Mask((Term((x,)),), values.dtype.type(1), values.dtype.type(0))
    return x if isinstance(x, Mask) else None


def followed(eqn: Any, operands: Sequence[Any]) -> Any:
    """What is known of the result of an operation on masks; None if it is a new array."""
    if not any(isinstance(x, (View, Mask)) for x in operands):
        return None
    rule = RULES.get(eqn.primitive.name)
    if rule is None:
        return None
    if eqn.primitive.name in known.ELEMENTWISE:
        ndim = len(eqn.outvars[0].aval.shape)
        operands = [_of_rank(x, ndim) if v.aval.ndim < ndim else x for v, x in zip(eqn.invars, operands, strict=True)]
    return rule(eqn, *operands)


def _of_rank(x: Any, ndim: int) -> Any:
    """A number as an array of as many dims as the others, in none of which it varies."""
    if isinstance(x, View):
        return replace(x, labels=(None,) * ndim)
    if isinstance(x, Known):
        return Known((1,) * ndim, lambda: x.values.reshape((1,) * ndim))
    if isinstance(x, Mask):
        terms = tuple(replace(one, views=tuple(_of_rank(view, ndim) for view in one.views)) for one in x.terms)
        return replace(x, terms=terms)
    return x


def seen_outside(x: Any, frame: Frame) -> bool:
    """Whether what is known of a result of a program names no array that only this program has."""
    if isinstance(x, View):
        return x.base.frame is not frame
    return not (isinstance(x, Mask) and any(frame in term.frames for term in x.terms))


def _viewed(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The rule of a view, from one for anything with labels."""

    def of_part(eqn: Any, x: Any) -> Any:
        return known.view(eqn, x) if isinstance(x, Known) else change(eqn, x)

    def rule(eqn: Any, x: Any) -> Any:
        if isinstance(x, View):
            return change(eqn, x)
        terms = []
        for term in x.terms:
            views = tuple(of_part(eqn, view) for view in term.views)
            if any(view is None for view in views):
                return None
            terms.append(replace(term, views=views))
        return replace(x, terms=tuple(terms))

    return rule


def transposed(eqn: Any, x: Any) -> Any:
    return replace(x, labels=tuple(x.labels[i] for i in eqn.params["permutation"]))


def broadcast(eqn: Any, x: Any) -> Any:
    labels: list[Any] = [None] * len(eqn.params["shape"])
    for dim, label in zip(eqn.params["broadcast_dimensions"], x.labels, strict=True):
        labels[dim] = label
    return replace(x, labels=tuple(labels))


def squeezed(eqn: Any, x: Any) -> Any:
    dropped = {dim % len(x.labels) for dim in eqn.params["dimensions"]}
    return replace(x, labels=tuple(label for i, label in enumerate(x.labels) if i not in dropped))


def reshaped(eqn: Any, x: Any) -> Any:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if not known.keeps_dims(eqn) or any(
        n == 1 and label is not None for label, n in zip(x.labels, before, strict=True)
    ):
        return None
    rest = iter(label for label, n in zip(x.labels, before, strict=True) if n > 1)
    return replace(x, labels=tuple(next(rest) if n > 1 else None for n in after))


def _same(eqn: Any, x: Any) -> Any:
    return x


def _converted(eqn: Any, x: Any) -> Any:
    dtype = np.dtype(eqn.params["new_dtype"])
    if isinstance(x, View) and dtype.kind == "b":
        return Mask((Term((x,)),))
    mask = as_mask(x)
    if mask is None:
        return None
    on = np.True_ if mask.on is NONZERO and dtype.kind == "b" else mask.on
    return replace(mask, on=on if on is NONZERO else dtype.type(on), off=dtype.type(mask.off))


def _mapped(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The rule of an operation of a mask and a number."""

    def rule(eqn: Any, left: Any, right: Any) -> Any:
        is_left = isinstance(right, Known)
        mask, number = (as_mask(left), right) if is_left else (as_mask(right), left)
        if mask is None or not isinstance(number, Known) or number.scalar is None or mask.on is NONZERO:
            return None
        by = number.values.reshape(())
        with np.errstate(all="ignore"):
            values = [function(x, by) if is_left else function(by, x) for x in (mask.on, mask.off)]
        return replace(mask, on=values[0], off=values[1])

    return rule


def _both(eqn: Any, left: Any, right: Any) -> Any:
    """Where both masks hold."""
    masks = as_mask(left), as_mask(right)
    if any(mask is None or mask.on is NONZERO or not mask.on or mask.off for mask in masks):
        return None
    return Mask(masks[0].terms + masks[1].terms)  # pyright: ignore[reportOptionalMemberAccess]


def _multiplied(eqn: Any, left: Any, right: Any) -> Any:
    if any(isinstance(x, Known) and x.scalar is not None for x in (left, right)):
        return _mapped(np.multiply)(eqn, left, right)
    factors = [Mask((Term((x,)),), NONZERO, 0) if isinstance(x, View) else as_mask(x) for x in (left, right)]
    if any(x is None or x.off != 0 or not (x.on is NONZERO or x.on == 1) for x in factors):
        return None
    ones = [x.on for x in factors if x]
    return Mask(factors[0].terms + factors[1].terms, NONZERO if NONZERO in ones else ones[0], 0)  # pyright: ignore


def _unequal(eqn: Any, left: Any, right: Any) -> Any:
    x, number = (left, right) if isinstance(right, Known) else (right, left)
    is_zero = isinstance(number, Known) and number.scalar == 0
    if is_zero and isinstance(x, View):
        return Mask((Term((x,)),))
    if is_zero and isinstance(x, Mask) and x.on is NONZERO:
        return replace(x, on=np.True_, off=np.False_)
    return _mapped(np.not_equal)(eqn, left, right)


def _equal(eqn: Any, left: Any, right: Any) -> Any:
    if not (isinstance(left, View) and isinstance(right, View)):
        return _mapped(np.equal)(eqn, left, right)
    dims = [{i for i, label in enumerate(x.labels) if label is not None} for x in (left, right)]
    return Mask((Term((left, right)),)) if dims[0] != dims[1] else None


def _selected(eqn: Any, which: Any, *cases: Any) -> Any:
    mask = as_mask(which)
    if mask is None or mask.on is NONZERO or len(cases) != 2:
        return None
    if not all(isinstance(x, Known) and x.scalar is not None for x in cases):
        return None
    on, off = (cases[int(x)].values.reshape(()) for x in (mask.on, mask.off))
    return replace(mask, on=on, off=off)


def _inverted(eqn: Any, x: Any) -> Any:
    mask = as_mask(x)
    return mask and replace(mask, on=np.logical_not(mask.on), off=np.logical_not(mask.off))


RULES: dict[str, Callable[..., Any]] = {
    "transpose": _viewed(transposed),
    "broadcast_in_dim": _viewed(broadcast),
    "squeeze": _viewed(squeezed),
    "reshape": _viewed(reshaped),
    **dict.fromkeys(("copy", "stop_gradient"), _same),
    "convert_element_type": _converted,
    "and": _both,
    "not": _inverted,
    "mul": _multiplied,
    "ne": _unequal,
    "eq": _equal,
    "select_n": _selected,
    "add": _mapped(np.add),
    "sub": _mapped(np.subtract),
    "div": _mapped(np.divide),
    "gt": _mapped(np.greater),
    "ge": _mapped(np.greater_equal),
    "lt": _mapped(np.less),
    "le": _mapped(np.less_equal),
}
