"""Replaces attention in a traced program by the operation that meshpar's own models use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters import partial_eval

from meshpar.nn.recognized import known, masks
from meshpar.nn.recognized.band import Band, Unlike, Visible, visible
from meshpar.nn.recognized.known import Known
from meshpar.nn.recognized.masks import Frame, Mask, Term, View
from meshpar.nn.recognized.operation import Dims, signature
from meshpar.nn.recognized.scores import Label, Scores, followed, product
from meshpar.partition.op import partitioned_p
from meshpar.partition.rules.loops import scan_counts, with_consts
from meshpar.partition.source import Source

CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint"}
"""Operations whose program stands for what it computes. One with a derivative of its own does not."""


@dataclass(frozen=True)
class Found:
    """A softmax between two products.

    Args:
      source: the product with the values.
      seq_len: the number of queries.
      num_keys: the number of keys.
      band: which tokens attend to each other; None if it is left as it is written.
      more: what the data and a cap add to that.
      why: why it is left.
    """

    source: Source
    seq_len: int
    num_keys: int
    band: Band | None = None
    more: tuple[str, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        what = f"{self.source.line}: attention of {self.seq_len} tokens"
        if self.band is None:
            return f"{what} is computed as it is written: {self.why}"
        band = self.band if self.num_keys == self.seq_len else f"{self.num_keys} tokens of another row"
        return ", ".join((f"{what} to {band}", *self.more))


def rewritten(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Found]]:
    """A program whose attention is an operation of its own, and what was found.

    Its results are the same but for rounding.
    """
    walk = _Walk()
    consts = [known.constant(x) for x in closed.consts]
    jaxpr, _ = walk.program(closed.jaxpr, consts, [None] * len(closed.in_avals), Frame())
    if not any(one.band for one in walk.found):
        return closed, walk.found
    return ClosedJaxpr(_without_unused(jaxpr), closed.consts), walk.found


def with_attention(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose attention is an operation of its own."""
    return rewritten(closed)[0]


def _without_unused(jaxpr: Jaxpr) -> Jaxpr:
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


class _Walk:
    """Follows a program in order. What it knows of an array is `Known`, `Scores`, `Row`, `Mask` or `View`."""

    def __init__(self) -> None:
        self.found: list[Found] = []

    def program(
        self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], frame: Frame, caller: Source | None = None
    ) -> tuple[Any, list[Any]]:
        """The program with attention replaced, and what is known of its results."""
        about: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        about |= dict(zip(jaxpr.invars, arguments, strict=True))
        made: dict[Any, Any] = {}

        def read(v: Any) -> Any:
            if isinstance(v, Literal):
                return known.constant(v.val)
            return about.get(v) or View.of(frame.base(v))

        equations = []
        for eqn in jaxpr.eqns:
            new, results = self.equation(eqn, [read(v) for v in eqn.invars], frame, made, caller, read)
            equations.append(new)
            about |= dict(zip(eqn.outvars, results, strict=True))
            made |= dict.fromkeys(eqn.outvars, eqn)
        changed = any(a is not b for a, b in zip(equations, jaxpr.eqns, strict=True))
        results = [_outside(read(v), frame) for v in jaxpr.outvars]
        return (jaxpr.replace(eqns=equations) if changed else jaxpr), results

    def equation(
        self, eqn: Any, operands: list[Any], frame: Frame, made: Any, caller: Source | None, read: Callable[[Any], Any]
    ) -> tuple[Any, list[Any]]:
        name = eqn.primitive.name
        if name in CALLS:
            return self._call(eqn, operands, frame, caller)
        if name == "scan":
            return self._scan(eqn, operands, frame, caller)
        if name == "cond":
            return self._cond(eqn, operands, caller)
        if name == "dot_general":
            weights = next((i for i, x in enumerate(operands) if _is_weights(x)), None)
            if weights is not None:
                return self._attention(eqn, weights, operands[weights], frame, made, caller, read), [None]
            if not any(isinstance(x, Known) for x in operands):
                return eqn, [product(eqn, frame)]
        results = known.results(eqn, operands)
        if len(results) == 1 and results[0] is None:
            as_arrays = [
                View.of(frame.base(v)) if isinstance(x, Mask) else x for v, x in zip(eqn.invars, operands, strict=True)
            ]
            results = [followed(eqn, operands) or masks.followed(eqn, operands) or masks.followed(eqn, as_arrays)]
        return eqn, results

    def _call(self, eqn: Any, operands: list[Any], frame: Frame, caller: Source | None) -> tuple[Any, list[Any]]:
        key = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
        inner = eqn.params[key]
        is_closed = isinstance(inner, ClosedJaxpr)
        jaxpr = inner.jaxpr if is_closed else inner
        consts = [known.constant(x) for x in inner.consts] if is_closed else []
        inside = Frame()
        new, results = self.program(jaxpr, consts, operands, inside, Source.of(eqn, caller))
        if new is jaxpr:
            return eqn, results
        new = _with_arguments(new, len(new.invars), inside)
        params = eqn.params | {key: inner.replace(jaxpr=new) if is_closed else new}
        for name in ("in_shardings", "in_layouts", "donated_invars"):
            if name in params:
                added = {"in_shardings": params[name][:1], "in_layouts": (None,), "donated_invars": (False,)}[name]
                params[name] = params[name] + added * len(inside.captured)
        return eqn.replace(params=params, invars=[*eqn.invars, *_captured(inside, frame)]), results

    def _scan(self, eqn: Any, operands: list[Any], frame: Frame, caller: Source | None) -> tuple[Any, list[Any]]:
        """The body of a loop knows its constants; what it carries and scans may differ in each iteration."""
        num_consts, _ = scan_counts(eqn.params)
        closed = eqn.params["jaxpr"]
        rest = len(closed.in_avals) - num_consts
        fixed = [x if isinstance(x, Known | Mask | View) else None for x in operands[:num_consts]]
        consts = [known.constant(x) for x in closed.consts]
        inside = Frame()
        new, _ = self.program(closed.jaxpr, consts, [*fixed, *[None] * rest], inside, Source.of(eqn, caller))
        nothing = [None] * len(eqn.outvars)
        if new is closed.jaxpr:
            return eqn, nothing
        new = _with_arguments(new, num_consts, inside)
        params = eqn.params | {"jaxpr": closed.replace(jaxpr=new)}
        if inside.captured:
            params = with_consts(params, num_consts + len(inside.captured))
        invars = [*eqn.invars[:num_consts], *_captured(inside, frame), *eqn.invars[num_consts:]]
        return eqn.replace(params=params, invars=invars), nothing

    def _cond(self, eqn: Any, operands: list[Any], caller: Source | None) -> tuple[Any, list[Any]]:
        branches = []
        for closed in eqn.params["branches"]:
            given = [x if isinstance(x, Known) else None for x in operands[1:]]
            consts = [known.constant(x) for x in closed.consts]
            new, _ = self.program(closed.jaxpr, consts, given, Frame(), Source.of(eqn, caller))
            branches.append(closed if new is closed.jaxpr else closed.replace(jaxpr=new))
        nothing = [None] * len(eqn.outvars)
        if all(a is b for a, b in zip(branches, eqn.params["branches"], strict=True)):
            return eqn, nothing
        return eqn.replace(params=eqn.params | {"branches": tuple(branches)}), nothing

    def _attention(
        self, eqn: Any, place: int, weights: Scores, frame: Any, made: Any, caller: Source | None,
        read: Callable[[Any], Any],
    ) -> Any:  # fmt: skip
        """The equation of weights times values, replaced where a core computes the same."""
        source = Source.of(eqn, caller)
        found = _dims(eqn, place, weights, frame)
        key: Any = weights.key
        sizes = _sizes(weights)
        if isinstance(found, Unlike):
            num_keys = sizes[key] if key in sizes else math.prod(sizes[label] for label in key)
            self.found.append(Found(source, num_keys, num_keys, why=found.why))
            return eqn
        dims, seen = found
        swapped = dims.keys == "left"
        q, k = weights.product.invars[::-1] if swapped else weights.product.invars
        q, scale = _unscaled(q, made, weights.scale, read)
        cap = weights.cap
        more = [*dict.fromkeys(map(str, seen.conditions)), *([] if cap is None else [f"scores capped at {cap:g}"])]
        self.found.append(Found(source, sizes[dims.tokens], sizes[key], seen.band, tuple(more)))
        # A cap of c is c tanh(s) of the scores s that the program multiplies; a core's is c tanh(s / c).
        dims = replace(dims, scale=scale * (cap or 1.0), cap=cap)
        arrays = [frame.local(base) for condition in seen.conditions for base in condition.bases]
        operands = [q, k, eqn.invars[1 - place], *arrays]
        params = {"signature": signature(dims, seen, eqn.outvars[0].aval.dtype, [v.aval.shape for v in operands])}
        return eqn.replace(primitive=partitioned_p, invars=operands, params=params)


def _outside(x: Any, frame: Frame) -> Any:
    """What a caller may know of a result: nothing that names an array of the function alone."""
    if isinstance(x, Scores):
        hidden = any(isinstance(term, Term) and frame in term.frames for term, _ in x.visible)
        return x.computed(why=x.why or "its mask is made in another function") if hidden else x
    return x if masks.seen_outside(x, frame) else None


def _captured(inside: Frame, frame: Frame) -> list[Any]:
    """The arrays that a program gets from the one around it."""
    return [frame.local(base) for base in inside.captured]


def _with_arguments(jaxpr: Any, place: int, inside: Frame) -> Any:
    """The program with an argument for each array that it gets from around it."""
    if not inside.captured:
        return jaxpr
    invars = [*jaxpr.invars[:place], *inside.captured.values(), *jaxpr.invars[place:]]
    return jaxpr.replace(invars=invars, debug_info=jaxpr.debug_info.with_unknown_names())


def _is_weights(x: Any) -> bool:
    return isinstance(x, Scores) and x.stage == "weights"


def _unscaled(q: Any, made: Any, scale: float, read: Callable[[Any], Any]) -> tuple[Any, float]:
    """Queries before they were multiplied by a number, and that number times the scale."""
    eqn = made.get(q)
    if eqn is None or eqn.primitive.name not in ("mul", "div"):
        return q, scale
    x, by = eqn.invars
    if eqn.primitive.name == "mul" and isinstance(read(x), Known):
        x, by = by, x
    number = read(by)
    if not isinstance(number, Known) or number.scalar is None or x.aval.shape != q.aval.shape:
        return q, scale
    return x, scale * number.scalar if eqn.primitive.name == "mul" else scale / number.scalar


def _sizes(scores: Scores) -> dict[Label, int]:
    """Label -> the size of the dim."""
    shape = scores.product.outvars[0].aval.shape
    return dict(zip(product(scores.product, None).labels, shape, strict=True))  # pyright: ignore


def _dims(eqn: Any, place: int, weights: Scores, frame: Any) -> tuple[Dims, Visible] | Unlike:
    """How the dims of queries, keys, values and result correspond, if they are those of attention."""
    key: Any = weights.key
    own = product(weights.product, None).labels
    queries = [label for label in own if label and label[0] not in ("batch", key[0])]
    (contracted, batch) = eqn.params["dimension_numbers"]
    shared = [weights.labels[i] for i in batch[place]]
    if unlike := _unlike(eqn, place, weights, frame, queries):
        return Unlike(unlike)
    seen = visible(weights.visible, queries, key)
    if isinstance(seen, Unlike):
        return Unlike(f"its mask {seen.why}")
    if unlike := _uncapped(weights, seen):
        return Unlike(unlike)
    tokens = seen.row or _tokens(queries, _sizes(weights), key)
    value: list[Any] = ["features"] * eqn.invars[1 - place].aval.ndim
    for label, i in zip((*shared, key), (*batch[1 - place], *contracted[1 - place]), strict=True):
        value[i] = label
    left = [label for i, label in enumerate(weights.labels) if i not in (*contracted[place], *batch[place])]
    out = (*shared, *left, "features") if place == 0 else (*shared, "features", *left)
    return Dims(weights.product.params["dimension_numbers"], key[0], tokens, tuple(value), out), seen


def _unlike(eqn: Any, place: int, weights: Scores, frame: Any, queries: Sequence[Label]) -> str:
    """Why two products are not those of attention; empty if they are."""
    key: Any = weights.key
    (contracted, batch) = eqn.params["dimension_numbers"]
    inner = weights.product.params["dimension_numbers"][0]
    own = product(weights.product, None).labels
    value = eqn.invars[1 - place].aval
    if weights.why:
        return weights.why
    if weights.frame is not frame:
        return "queries and keys are multiplied in another function"
    if [weights.labels[i] for i in contracted[place]] != [key]:
        return "its weights are not summed over the keys"
    if key[0] == "batch" or sum(label is not None and label[0] == key[0] for label in own) != 1:
        return "its products are not those of queries, keys and values"
    if len(queries) not in (1, 2) or len(inner[0]) != 1:
        return "its products are not those of queries, keys and values"
    if {weights.labels[i] for i in batch[place]} != {label for label in own if label and label[0] == "batch"}:
        return "queries, keys and values have different rows or heads"
    features = [n for i, n in enumerate(value.shape) if i not in contracted[1 - place] and i not in batch[1 - place]]
    if features != [weights.product.invars[0].aval.shape[inner[0][0]]]:
        return "the heads of values have another size than those of queries and keys"
    return ""


def _uncapped(weights: Scores, seen: Visible) -> str:
    """Why the cap of scores is none that a core computes, or its conditions are not; empty if all are."""
    documents = [one for one in seen.conditions if one.kind == "documents"]
    if len(documents) > 1:
        return "its mask compares two kinds of documents"
    return "the cap of its scores is not positive" if weights.cap is not None and weights.cap <= 0 else ""


def _tokens(queries: Sequence[Label], sizes: dict[Label, int], key: Label) -> Label:
    """The dim of the queries' tokens where no mask tells: one as long as that of the keys, or the longest."""
    return next((label for label in queries if sizes[label] == sizes[key]), max(queries, key=lambda x: sizes[x]))
