"""Follows the scores of attention through a traced program, from the product of queries and keys to their softmax.

Each array of the program that has the scores' elements is described by `Scores`, each that has one element for a query
by `Row`. A dim of the scores has a label: `batch` for a dim that queries and keys share, `left` or `right` for a dim
that only the left or the right operand of the product has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeGuard

from meshpar.nn.recognized import masks
from meshpar.nn.recognized.known import Known
from meshpar.nn.recognized.masks import Mask, Term, View
from meshpar.partition.rules import elementwise

Label = tuple[Any, ...]
"""A dim of the scores; or the labels of several that a reshape merged."""
LOW = -1e4
"""The exponential of a score that is lower by this is 0 in every dtype."""


@dataclass(frozen=True, eq=False)
class Scores:
    """An array with an element for each pair of a query and a key.

    Args:
      product: the equation of the product of queries and keys.
      frame: the program that the product is in.
      labels: of each dim; None for one of size 1 that the scores do not have.
      scale: by what the product was multiplied.
      cap: by what the hyperbolic tangent of that was multiplied; None if none was taken.
      visible: conditions that all hold where a query attends to a key, with the labels of their dims.
      stage: what was computed so far.
      key: the label of the keys, when a maximum or a sum over them was taken.
      why: why no core computes it; empty if one may.
      values: the same object for two arrays whose elements are the same in another order of dims.
    """

    product: Any
    frame: Any
    labels: tuple[Label | None, ...]
    scale: float = 1.0
    cap: float | None = None
    visible: tuple[tuple[Known | Term, tuple[Label | None, ...]], ...] = ()
    stage: Literal["scores", "shifted", "exponentials", "weights"] = "scores"
    key: Label | None = None
    why: str = ""
    values: object = field(default_factory=object)

    def computed(self, **changes: Any) -> Scores:
        """Other values with the same dims."""
        return replace(self, values=object(), **changes)


@dataclass(frozen=True, eq=False)
class Row:
    """The maximum or the sum of a query's scores, over the keys."""

    of: Scores
    kind: Literal["max", "sum"]
    labels: tuple[Label | None, ...]


def product(eqn: Any, frame: Any) -> Scores:
    """A product of two arrays, which may turn out to be the scores of queries and keys."""
    (contracted, batch) = eqn.params["dimension_numbers"]
    labels: list[Label] = [("batch", i) for i in range(len(batch[0]))]
    for side, (v, over, shared) in enumerate(zip(eqn.invars, contracted, batch, strict=True)):
        name = ("left", "right")[side]
        labels += [(name, dim) for dim in range(v.aval.ndim) if dim not in over and dim not in shared]
    return Scores(eqn, frame, tuple(labels))


def followed(eqn: Any, operands: Sequence[Any]) -> Any:
    """What the result of an operation on scores is; None if it is nothing that attention computes."""
    if not any(isinstance(x, (Scores, Row)) for x in operands):
        return None
    rule = RULES.get(eqn.primitive.name)
    return (rule(eqn, *operands) if rule else None) or _changed(eqn, operands)


def _changed(eqn: Any, operands: Sequence[Any]) -> Scores | None:
    """Scores or weights that an elementwise operation changes by what no core computes.

    They are followed to the end, so that `Found` can say why the attention is left as it is written.
    """
    given = [x for x in operands if isinstance(x, Scores)]
    is_elementwise = eqn.primitive.name in elementwise.RULES and len(eqn.outvars) == 1
    if len(given) != 1 or not is_elementwise or len(given[0].labels) != len(eqn.outvars[0].aval.shape):
        return None
    (x,) = given
    if x.stage == "weights":
        return x.computed(why=x.why or "its weights are changed before they meet the values, as dropout does")
    row = next((one for one in operands if isinstance(one, Row) and one.kind == "sum"), None)
    whole = {"stage": "weights", "key": _key_of(row)} if row else {}
    why = f"its scores are changed ({eqn.primitive.name}), for instance by a bias that is trained"
    return x.computed(why=x.why or why, **whole)


def _same(eqn: Any, x: Any) -> Any:
    return x


def _stopped(eqn: Any, x: Any) -> Any:
    """The maximum, whose gradient cancels. Where scores or their sum have no gradient, it is not that of attention."""
    return x if isinstance(x, Row) and x.kind == "max" else None


def _scaled(by: Callable[[float, float], float]) -> Callable[..., Any]:
    def rule(eqn: Any, left: Any, right: Any) -> Any:
        if isinstance(left, Known) and eqn.primitive.name == "mul":
            left, right = right, left
        if _is_plain(left) and isinstance(right, Known) and right.scalar is not None:
            if left.cap is not None:
                return left.computed(cap=by(left.cap, right.scalar))
            return left.computed(scale=by(left.scale, right.scalar))
        return _divided(eqn, left, right) if eqn.primitive.name == "div" else None

    return rule


def _is_plain(x: Any) -> TypeGuard[Scores]:
    return isinstance(x, Scores) and x.stage == "scores" and not x.visible


def _bounded_by_tanh(eqn: Any, x: Any) -> Any:
    return x.computed(cap=1.0) if _is_plain(x) and x.cap is None else None


def _divided(eqn: Any, left: Any, right: Any) -> Any:
    if not (isinstance(left, Scores) and isinstance(right, Row)):
        return None
    fits = (
        left.stage == "exponentials"
        and right.kind == "sum"
        and right.of.values is left.values
        and _aligned(left, right)
    )
    return left.computed(stage="weights", key=right.of.key or _key_of(right)) if fits else None


def _key_of(row: Row) -> Label | None:
    (key,) = {*row.of.labels} - {*row.labels}
    return key


def _aligned(scores: Scores, row: Row) -> bool:
    """Whether each query's element was computed from these scores, and stands at this query's scores."""
    if row.of.values is not scores.values or len(scores.labels) != len(row.labels):
        return False
    missing = [a for a, b in zip(scores.labels, row.labels, strict=True) if a != b and b is None]
    return len(missing) == 1 and all(a == b or b is None for a, b in zip(scores.labels, row.labels, strict=True))


def _biased(eqn: Any, left: Any, right: Any) -> Any:
    """A mask that is added: 0 where a query attends to a key, and a very negative number elsewhere."""
    if not isinstance(left, Scores):
        left, right = right, left
    if not (isinstance(left, Scores) and left.stage == "scores"):
        return None
    if isinstance(right, Mask):
        return _visible(left, right.terms) if right.on == 0 and right.off <= LOW else None
    if not isinstance(right, Known):
        return None
    bias = right.values
    if not ((bias == 0) | (bias <= LOW)).all():
        return None
    return _masked(left, Known(bias.shape, lambda: bias == 0))


def _masked(scores: Scores, visible: Known) -> Scores | None:
    return _visible(scores, (Term((visible,)),))


def _visible(scores: Scores, terms: tuple[Term, ...] | None) -> Scores | None:
    """The scores where these conditions hold, and very negative numbers elsewhere."""
    if terms is None:
        return None
    added: list[tuple[Known | Term, tuple[Label | None, ...]]] = []
    for term in terms:
        for view in term.views:
            if len(view.shape if isinstance(view, Known) else view.labels) != len(scores.labels):
                return None
        if any(isinstance(view, Known) for view in term.views):
            added.append((_known(term), scores.labels))
        else:
            added.append((term, scores.labels))
    return scores.computed(visible=(*scores.visible, *added))


def _known(term: Term) -> Known:
    (one,) = term.views
    assert isinstance(one, Known)
    return Known(one.shape, lambda: (one.values != 0) != term.is_negated)


def _selected(eqn: Any, which: Any, *cases: Any) -> Any:
    place = next((i for i, x in enumerate(cases) if isinstance(x, Scores)), None)
    other = None if place is None else cases[1 - place]
    if len(cases) != 2 or place is None or cases[place].stage != "scores" or not isinstance(other, Known):
        return None
    if other.scalar is None or not other.scalar <= LOW:
        return None
    if isinstance(which, Known):
        shape = which.shape or (1,) * len(cases[place].labels)
        return _masked(cases[place], Known(shape, lambda: which.values.reshape(shape) == bool(place)))
    mask = masks.as_mask(which) if isinstance(which, (Mask, View)) else None
    return mask and _visible(cases[place], mask.where(bool(place)))


def _shifted(eqn: Any, left: Any, right: Any) -> Any:
    if isinstance(left, Scores) and isinstance(right, Row):
        fits = left.stage == "scores" and right.kind == "max" and _aligned(left, right)
        return left.computed(stage="shifted", key=_key_of(right)) if fits else None
    if isinstance(left, Scores) and isinstance(right, Known):
        return _biased(eqn, left, Known(right.shape, lambda: -right.values))
    if isinstance(left, Scores) and isinstance(right, Mask) and right.on is not masks.NONZERO:
        return _biased(eqn, left, replace(right, on=-right.on, off=-right.off))
    return None


def _exponential(eqn: Any, x: Any) -> Any:
    return x.computed(stage="exponentials") if isinstance(x, Scores) and x.stage in ("scores", "shifted") else None


def _reduced(kind: Literal["max", "sum"], stage: str) -> Callable[..., Any]:
    def rule(eqn: Any, x: Any) -> Any:
        axes = eqn.params["axes"]
        if not (isinstance(x, Scores) and x.stage == stage and len(axes) == 1):
            return None
        if x.labels[axes[0]] is None or (x.key is not None and x.labels[axes[0]] != x.key):
            return None
        return Row(x, kind, tuple(label for i, label in enumerate(x.labels) if i != axes[0]))

    return rule


def _bounded(eqn: Any, left: Any, right: Any) -> Any:
    """`max(-inf, x)`, which `jnp.max` computes with a start."""
    if isinstance(left, Known):
        left, right = right, left
    is_low = isinstance(right, Known) and right.scalar is not None and right.scalar <= LOW
    return left if isinstance(left, Row) and left.kind == "max" and is_low else None


def _reshaped(eqn: Any, x: Any) -> Any:
    """A reshape that adds or drops dims of size 1, or merges dims, such as groups of heads, or undoes that."""
    if (same := masks.reshaped(eqn, x)) or not isinstance(x, Scores) or eqn.params.get("dimensions") is not None:
        return same
    sizes = dict(zip(product(x.product, None).labels, x.product.outvars[0].aval.shape, strict=True))
    left = [one for label in x.labels if label for one in ([label] if label in sizes else label)]
    labels: list[Label | None] = []
    for size in eqn.outvars[0].aval.shape:
        merged: list[Label] = []
        if size == 1 and left and sizes[left[0]] == 1:
            merged.append(left.pop(0))
        while left and math.prod(sizes[one] for one in merged) < size:
            merged.append(left.pop(0))
        if math.prod(sizes[one] for one in merged) != size:
            return None
        labels.append(merged[0] if len(merged) == 1 else tuple(merged) or None)
    return None if left else replace(x, labels=tuple(labels))


RULES: dict[str, Callable[..., Any]] = {
    "mul": _scaled(lambda scale, x: scale * x),
    "div": _scaled(lambda scale, x: scale / x),
    "add": _biased,
    "select_n": _selected,
    "sub": _shifted,
    "exp": _exponential,
    "reduce_max": _reduced("max", "scores"),
    "reduce_sum": _reduced("sum", "exponentials"),
    "max": _bounded,
    **dict.fromkeys(("convert_element_type", "copy", "reduce_precision"), _same),
    "stop_gradient": _stopped,
    "transpose": masks.transposed,
    "broadcast_in_dim": masks.broadcast,
    "squeeze": masks.squeezed,
    "reshape": _reshaped,
    "tanh": _bounded_by_tanh,
}
