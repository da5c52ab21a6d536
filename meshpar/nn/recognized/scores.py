"""Follows the scores of attention through a traced program, from the product of queries and keys to their softmax.

Each array of the program that has the scores' elements is described by `Scores`, each that has one element for a query
by `Row`. A dim of the scores has a label: `batch` for a dim that queries and keys share, `left` or `right` for a dim
that only the left or the right operand of the product has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeGuard

from meshpar.nn.recognized.known import Known

Label = tuple[str, int]
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
      visible: masks with the labels of their dims.
      stage: what was computed so far.
      key: the label of the keys, when a maximum or a sum over them was taken.
      values: the same object for two arrays whose elements are the same in another order of dims.
    """

    product: Any
    frame: Any
    labels: tuple[Label | None, ...]
    scale: float = 1.0
    visible: tuple[tuple[Known, tuple[Label | None, ...]], ...] = ()
    stage: Literal["scores", "shifted", "exponentials", "weights"] = "scores"
    key: Label | None = None
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
    return rule(eqn, *operands) if rule else None


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
            return left.computed(scale=by(left.scale, right.scalar))
        return _divided(eqn, left, right) if eqn.primitive.name == "div" else None

    return rule


def _is_plain(x: Any) -> TypeGuard[Scores]:
    return isinstance(x, Scores) and x.stage == "scores" and not x.visible


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
    if isinstance(left, Known):
        left, right = right, left
    if not (isinstance(left, Scores) and left.stage == "scores" and isinstance(right, Known)):
        return None
    bias = right.values
    if not ((bias == 0) | (bias <= LOW)).all():
        return None
    return _masked(left, Known(bias.shape, lambda: bias == 0))


def _masked(scores: Scores, visible: Known) -> Scores | None:
    if len(visible.shape) != len(scores.labels):
        return None
    return scores.computed(visible=(*scores.visible, (visible, scores.labels)))


def _selected(eqn: Any, which: Any, *cases: Any) -> Any:
    if len(cases) != 2 or not isinstance(which, Known):
        return None
    place = next((i for i, x in enumerate(cases) if isinstance(x, Scores)), None)
    other = None if place is None else cases[1 - place]
    if place is None or cases[place].stage != "scores" or not isinstance(other, Known):
        return None
    if other.scalar is None or not other.scalar <= LOW:
        return None
    return _masked(cases[place], Known(which.shape, lambda: which.values == bool(place)))


def _shifted(eqn: Any, left: Any, right: Any) -> Any:
    if isinstance(left, Scores) and isinstance(right, Row):
        fits = left.stage == "scores" and right.kind == "max" and _aligned(left, right)
        return left.computed(stage="shifted", key=_key_of(right)) if fits else None
    if isinstance(left, Scores) and isinstance(right, Known):
        return _biased(eqn, left, Known(right.shape, lambda: -right.values))
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


def _transposed(eqn: Any, x: Any) -> Any:
    return replace(x, labels=tuple(x.labels[i] for i in eqn.params["permutation"]))


def _broadcast(eqn: Any, x: Any) -> Any:
    labels: list[Label | None] = [None] * len(eqn.params["shape"])
    for dim, label in zip(eqn.params["broadcast_dimensions"], x.labels, strict=True):
        labels[dim] = label
    return replace(x, labels=tuple(labels))


def _squeezed(eqn: Any, x: Any) -> Any:
    dropped = {dim % len(x.labels) for dim in eqn.params["dimensions"]}
    return replace(x, labels=tuple(label for i, label in enumerate(x.labels) if i not in dropped))


def _reshaped(eqn: Any, x: Any) -> Any:
    """A reshape that only adds or drops dims of size 1."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if [n for n in before if n > 1] != [n for n in after if n > 1] or eqn.params.get("dimensions") is not None:
        return None
    left = [label for label, n in zip(x.labels, before, strict=True) if n > 1]
    ones = [label for label, n in zip(x.labels, before, strict=True) if n == 1 and label is not None]
    if ones:
        return None
    rest = iter(left)
    return replace(x, labels=tuple(next(rest) if n > 1 else None for n in after))


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
    "transpose": _transposed,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeezed,
    "reshape": _reshaped,
}
