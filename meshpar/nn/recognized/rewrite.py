"""Replaces attention in a traced program by the operation that meshpar's own models use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters import partial_eval

from meshpar.nn.recognized import known
from meshpar.nn.recognized.band import Band, Unlike, band
from meshpar.nn.recognized.known import Known
from meshpar.nn.recognized.operation import Dims, signature
from meshpar.nn.recognized.scores import Label, Scores, followed, product
from meshpar.partition.op import partitioned_p
from meshpar.partition.rules.loops import scan_counts
from meshpar.partition.source import Source

CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint"}
"""Operations whose program stands for what it computes. One with a derivative of its own does not."""


@dataclass(frozen=True)
class Found:
    """A softmax between two products.

    Args:
      source: the product with the values.
      band: which tokens attend to each other; None if it is left as it is written.
      why: why it is left.
    """

    source: Source
    seq_len: int
    band: Band | None = None
    why: str = ""

    def __str__(self) -> str:
        what = f"{self.source.line}: attention of {self.seq_len} tokens"
        return f"{what} to {self.band}" if self.band else f"{what} is computed as it is written: {self.why}"


def rewritten(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Found]]:
    """A program whose attention is an operation of its own, and what was found.

    Its results are the same but for rounding.
    """
    walk = _Walk()
    jaxpr, _ = walk.program(closed.jaxpr, [known.constant(x) for x in closed.consts], [None] * len(closed.in_avals))
    if not any(one.band for one in walk.found):
        return closed, walk.found
    return ClosedJaxpr(_without_unused(jaxpr), closed.consts), walk.found


def with_attention(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose attention is an operation of its own."""
    return rewritten(closed)[0]


def _without_unused(jaxpr: Jaxpr) -> Jaxpr:
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


class _Walk:
    """Follows a program in order. What it knows of an array is `Known`, `Scores`, `Row` or None."""

    def __init__(self) -> None:
        self.found: list[Found] = []

    def program(
        self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], caller: Source | None = None
    ) -> tuple[Any, list[Any]]:
        """The program with attention replaced, and what is known of its results."""
        about: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        about |= dict(zip(jaxpr.invars, arguments, strict=True))
        made: dict[Any, Any] = {}

        def read(v: Any) -> Any:
            return known.constant(v.val) if isinstance(v, Literal) else about.get(v)

        equations = []
        for eqn in jaxpr.eqns:
            new, results = self.equation(eqn, [read(v) for v in eqn.invars], jaxpr, made, caller, read)
            equations.append(new)
            about |= dict(zip(eqn.outvars, results, strict=True))
            made |= dict.fromkeys(eqn.outvars, eqn)
        changed = any(a is not b for a, b in zip(equations, jaxpr.eqns, strict=True))
        results = [read(v) for v in jaxpr.outvars]
        return (jaxpr.replace(eqns=equations) if changed else jaxpr), results

    def equation(
        self, eqn: Any, operands: list[Any], frame: Any, made: Any, caller: Source | None, read: Callable[[Any], Any]
    ) -> tuple[Any, list[Any]]:
        name = eqn.primitive.name
        if name in CALLS:
            return self._call(eqn, operands, caller)
        if name == "scan":
            return self._scan(eqn, operands, caller)
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
            results = [followed(eqn, operands)]
        return eqn, results

    def _call(self, eqn: Any, operands: list[Any], caller: Source | None) -> tuple[Any, list[Any]]:
        key = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
        inner = eqn.params[key]
        is_closed = isinstance(inner, ClosedJaxpr)
        jaxpr = inner.jaxpr if is_closed else inner
        consts = [known.constant(x) for x in inner.consts] if is_closed else []
        new, results = self.program(jaxpr, consts, operands, Source.of(eqn, caller))
        if new is jaxpr:
            return eqn, results
        changed = inner.replace(jaxpr=new) if is_closed else new
        return eqn.replace(params=eqn.params | {key: changed}), results

    def _scan(self, eqn: Any, operands: list[Any], caller: Source | None) -> tuple[Any, list[Any]]:
        """The body of a loop knows its constants; what it carries and scans may differ in each iteration."""
        num_consts, _ = scan_counts(eqn.params)
        closed = eqn.params["jaxpr"]
        rest = len(closed.in_avals) - num_consts
        fixed = [x if isinstance(x, Known) else None for x in operands[:num_consts]]
        consts = [known.constant(x) for x in closed.consts]
        new, _ = self.program(closed.jaxpr, consts, [*fixed, *[None] * rest], Source.of(eqn, caller))
        nothing = [None] * len(eqn.outvars)
        if new is closed.jaxpr:
            return eqn, nothing
        return eqn.replace(params=eqn.params | {"jaxpr": closed.replace(jaxpr=new)}), nothing

    def _cond(self, eqn: Any, operands: list[Any], caller: Source | None) -> tuple[Any, list[Any]]:
        branches = []
        for closed in eqn.params["branches"]:
            given = [x if isinstance(x, Known) else None for x in operands[1:]]
            consts = [known.constant(x) for x in closed.consts]
            new, _ = self.program(closed.jaxpr, consts, given, Source.of(eqn, caller))
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
        seq_len = _sizes(weights)[key]
        if isinstance(found, Unlike):
            self.found.append(Found(source, seq_len, why=found.why))
            return eqn
        dims, kind = found
        swapped = dims.keys == "left"
        q, k = weights.product.invars[::-1] if swapped else weights.product.invars
        q, scale = _unscaled(q, made, weights.scale, read)
        dims = replace(dims, scale=scale)
        self.found.append(Found(source, seq_len, kind))
        operands = [q, k, eqn.invars[1 - place]]
        params = {"signature": signature(dims, kind, eqn.outvars[0].aval.dtype, [v.aval.shape for v in operands])}
        return eqn.replace(primitive=partitioned_p, invars=operands, params=params)


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


def _dims(eqn: Any, place: int, weights: Scores, frame: Any) -> tuple[Dims, Band] | Unlike:
    """How the dims of queries, keys, values and result correspond, if they are those of attention."""
    key: Any = weights.key
    own = product(weights.product, None).labels
    queries = [label for label in own if label and label[0] not in ("batch", key[0])]
    (contracted, batch) = eqn.params["dimension_numbers"]
    shared = [weights.labels[i] for i in batch[place]]
    if unlike := _unlike(eqn, place, weights, frame, queries):
        return Unlike(unlike)
    found = band(weights.visible, queries, key)
    if isinstance(found, Unlike):
        return Unlike(f"its mask {found.why}")
    kind, row = found
    tokens = row or _tokens(queries, _sizes(weights), key)
    if _sizes(weights)[tokens] != _sizes(weights)[key]:
        return Unlike("queries and keys are not the tokens of one row")
    value: list[Any] = ["features"] * eqn.invars[1 - place].aval.ndim
    for label, i in zip((*shared, key), (*batch[1 - place], *contracted[1 - place]), strict=True):
        value[i] = label
    left = [label for i, label in enumerate(weights.labels) if i not in (*contracted[place], *batch[place])]
    out = (*shared, *left, "features") if place == 0 else (*shared, "features", *left)
    return Dims(weights.product.params["dimension_numbers"], key[0], tokens, tuple(value), out), kind


def _unlike(eqn: Any, place: int, weights: Scores, frame: Any, queries: Sequence[Label]) -> str:
    """Why two products are not those of attention; empty if they are."""
    key: Any = weights.key
    (contracted, batch) = eqn.params["dimension_numbers"]
    inner = weights.product.params["dimension_numbers"][0]
    own = product(weights.product, None).labels
    value = eqn.invars[1 - place].aval
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


def _tokens(queries: Sequence[Label], sizes: dict[Label, int], key: Label) -> Label:
    """The dim of the queries' tokens where no mask tells: one as long as that of the keys."""
    return next((label for label in queries if sizes[label] == sizes[key]), queries[0])
