"""Splits a layer's derivative into three functions: forward (F), input gradient (B), weight gradient (W).

`jax.vjp` computes both gradients at once. Here its jaxpr is cut by data flow: equations that the output needs are F,
those that the input's gradient needs are B, the rest is W. F returns residuals for B and W, and B a stash for W.
Weights, and values computed from weights alone (gathered or cast ones), are not stored: each part reads or recomputes
them. So B and W together cost as much as the whole backward, two forwards; two calls of `jax.vjp` would cost over four.

This file depends on JAX's internals, which may change in any release: it reads the equations of jaxprs and builds new
ones with `jax.extend.core` (`Jaxpr` with its `effects` and `debug_info`, `ClosedJaxpr`, `jaxpr_as_fun`), it knows the
names of the primitives that call functions and of their parameters `jaxpr` and `call_jaxpr`, and it relies on
`jax.vjp` tracing both passes into one jaxpr. Run tests/equivalence/test_pipelines.py on each supported version of JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core

from meshpar.mesh.varying import hidden_as
from meshpar.parallel.local import zeros_of
from meshpar.parallel.outputs import Shares

# The primitives that call a function, which `_flattened` inlines.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
_AGAIN = "computed_again"
"""The scope of what the backward of a `jax.checkpoint` of the user's own computes again."""
Policy = Callable[..., bool]
Avals = tuple[Any, ...]


@dataclass(frozen=True)
class Split:
    """F, B and W of one layer, as functions of its parameters.

    Args:
      residuals: types of the values that F returns for B and W.
      stash: types of the values that B returns for W.
      again: types of those of them that are activations, which B computes again.
      shares: the types of the layer's `Shares`.
    """

    _forward: core.ClosedJaxpr
    _input_gradient: core.ClosedJaxpr
    _weight_gradient: core.ClosedJaxpr
    _consts: list[Any]
    residuals: Avals
    stash: Avals
    again: Avals
    shares: Shares
    _params: Any

    @property
    def recomputes(self) -> bool:
        """Whether B computes more activations again for W than F saves for both."""
        return _num_bytes(self.again) > _num_bytes(self.residuals)

    def forward(self, params: Any, x: Any, rest: Any) -> tuple[Any, Shares, list[jax.Array]]:
        """Returns y, the layer's `Shares`, and the residuals."""
        made = _call(self._forward, *self._given(params, rest), *jax.tree.leaves(x))
        trees = jax.tree.structure((x, self.shares))
        y, shares = jax.tree.unflatten(trees, made[: trees.num_leaves])
        return y, shares, made[trees.num_leaves :]

    def input_gradient(
        self, params: Any, residuals: Sequence[jax.Array], dy: Any, dloss: Any, rest: Any
    ) -> tuple[Any, list[jax.Array]]:
        """Returns dx and the stash.

        Args:
          dloss: the cotangent of the layer's share of the loss; None if it has none.
        """
        cotangents = jax.tree.leaves((dy, dloss))
        saved = _as_made(residuals, self.residuals)
        made = _call(self._input_gradient, *self._given(params, rest), *saved, *cotangents)
        tree = jax.tree.structure(dy)
        return jax.tree.unflatten(tree, made[: tree.num_leaves]), made[tree.num_leaves :]

    def weight_gradient(
        self, params: Any, residuals: Sequence[jax.Array], stash: Sequence[jax.Array], rest: Any
    ) -> Any:
        """Returns the gradient of the parameters."""
        saved = [*_as_made(residuals, self.residuals), *_as_made(stash, self.stash)]
        leaves = _call(self._weight_gradient, *self._given(params, rest), *saved)
        return jax.tree.unflatten(self._params, leaves)

    def _given(self, params: Any, rest: Any) -> list[Any]:
        return [*self._consts, *jax.tree.leaves((params, rest))]


def _num_bytes(avals: Avals) -> int:
    return sum(x.size * x.dtype.itemsize for x in avals)


def _as_made(saved: Sequence[jax.Array], avals: Avals) -> list[jax.Array]:
    """Values from the slots of a stage, typed as where they were made: within a `shard_map` that knows no stages."""
    return [hidden_as(x, aval) for x, aval in zip(saved, avals, strict=True)]


def split(
    fn: Callable[..., tuple[Any, Shares]], policy: Policy, params: Any, x: Any, rest: Any, again: bool = False
) -> Split:
    """Splits the derivative of `fn` into F, B and W.

    Args:
      fn: (params, x, rest) -> (y, shares); x and y are trees of arrays of the same types.
      policy: the values that F may save, as in `jax.checkpoint`; B recomputes the others.
      again: whether B also recomputes what the backward of a checkpoint in `fn` computes again.
      rest: inputs that are not differentiated, such as a batch and a key.
    """
    traced, (_, names) = jax.make_jaxpr(fn, return_shape=True)(params, x, rest)
    num_x = len(jax.tree.leaves(x))
    shares = jax.tree.unflatten(jax.tree.structure(names), traced.out_avals[num_x:])

    def whole(params: Any, x: Any, rest: Any, cotangents: Any) -> Any:
        def differentiated(params: Any, x: Any) -> Any:
            y, (loss, metrics) = fn(params, x, rest)
            return (y, loss), metrics

        (y, loss), pull, metrics = jax.vjp(differentiated, params, x, has_aux=True)
        return y, loss, metrics, pull(cotangents)

    cotangents = x, jax.tree.map(zeros_of, shares.loss)
    traced = jax.make_jaxpr(whole)(params, x, rest, cotangents)
    flat = jax.make_jaxpr(_flattened(traced, again))(*jax.tree.leaves((params, x, rest, cotangents)))
    num_params = len(jax.tree.leaves(params))
    num_rest = len(jax.tree.leaves(rest))
    invars = flat.jaxpr.invars
    after_x = num_params + num_x
    given = [*flat.jaxpr.constvars, *invars[:num_params], *invars[after_x : after_x + num_rest]]
    cut = _Cut(flat, policy, given, invars[num_params:after_x], invars[after_x + num_rest :])
    return cut.split(jax.tree.structure(params), shares)


@dataclass
class _Cut:
    """Cuts one flat jaxpr. Its outputs are y, shares of the loss and metrics, gradients of the parameters, dx.

    Args:
      given: variables that every part gets: constants, parameters, rest.
      producer: variable -> the number of the equation that computes it.
      of_x, of_dy: variables that depend on x and on the cotangents.
    """

    flat: core.ClosedJaxpr
    policy: Policy
    given: list[Any]
    x: Sequence[Any]
    cotangents: Sequence[Any]
    producer: dict[Any, int] = field(default_factory=dict)
    of_x: set[Any] = field(default_factory=set)
    of_dy: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.of_x.update(self.x)
        self.of_dy.update(self.cotangents)
        for number, eqn in enumerate(self.flat.jaxpr.eqns):
            for made in eqn.outvars:
                self.producer[made] = number
            for reached in (self.of_x, self.of_dy):
                if any(not _is_literal(v) and v in reached for v in eqn.invars):
                    reached.update(eqn.outvars)

    def split(self, params: Any, shares: Shares) -> Split:
        num_outputs = len(self.x) + len(jax.tree.leaves(shares))
        outputs = self.flat.jaxpr.outvars[:num_outputs]
        gradients = self.flat.jaxpr.outvars[num_outputs:]
        dparams, dx = gradients[: -len(self.x)], gradients[-len(self.x) :]
        residuals: dict[Any, None] = {}
        in_backward = self._needed(dx, residuals, {})
        made = {v for number in in_backward for v in self.flat.jaxpr.eqns[number].outvars}
        stash: dict[Any, None] = {}
        in_weights = self._needed(dparams, residuals, stash, made | {*self.cotangents})
        in_forward = self._cone([*outputs, *residuals])
        return Split(
            self._part(in_forward, [*self.given, *self.x], [*outputs, *residuals]),
            self._part(in_backward, [*self.given, *residuals, *self.cotangents], [*dx, *stash]),
            self._part(in_weights, [*self.given, *residuals, *stash], dparams),
            list(self.flat.consts), tuple(v.aval for v in residuals), tuple(v.aval for v in stash),
            tuple(v.aval for v in stash if v not in self.of_dy), shares, params,
        )  # fmt: skip

    def _needed(
        self, targets: Iterable[Any], residuals: dict[Any, None], stash: dict[Any, None], made: Iterable[Any] = ()
    ) -> set[int]:
        """The equations that compute `targets`. Adds the values that they read to `residuals`, or `stash` if in `made`.

        Args:
          made: values that an earlier part of the backward has.
        """
        made = set(made)
        given = set(self.given)
        found: set[int] = set()
        todo = [v for v in targets if not _is_literal(v)]
        while todo:
            v = todo.pop()
            if v in given or v in residuals or v in stash or (v in self.cotangents and not made):
                continue
            if v in made and (v in self.of_x or v in self.of_dy):
                stash[v] = None
            elif self._is_saved(v):
                residuals[v] = None
            elif self.producer[v] not in found:
                found.add(self.producer[v])
                todo += [u for u in self.flat.jaxpr.eqns[self.producer[v]].invars if not _is_literal(u)]
        return found

    def _is_saved(self, v: Any) -> bool:
        """Whether F saves a value: the input, or a value that depends on it and that the policy saves."""
        if v in self.x:
            return True
        if v not in self.of_x or v in self.of_dy:
            return False
        eqn = self.flat.jaxpr.eqns[self.producer[v]]
        if _AGAIN in str(eqn.source_info.name_stack):
            return False
        return bool(self.policy(eqn.primitive, *(u.aval for u in eqn.invars), **eqn.params))

    def _cone(self, targets: Iterable[Any]) -> set[int]:
        """All equations that `targets` depend on."""
        found: set[int] = set()
        todo = [v for v in targets if not _is_literal(v)]
        while todo:
            number = self.producer.get(todo.pop())
            if number is not None and number not in found:
                found.add(number)
                todo += [u for u in self.flat.jaxpr.eqns[number].invars if not _is_literal(u)]
        return found

    def _part(self, numbers: set[int], invars: Sequence[Any], outvars: Sequence[Any]) -> core.ClosedJaxpr:
        return _part(self.flat.jaxpr, [self.flat.jaxpr.eqns[number] for number in sorted(numbers)], invars, outvars)


def _flattened(closed: core.ClosedJaxpr, marks: bool) -> Callable[..., list[Any]]:
    """The same function with all calls inlined, so that it can be cut between any two operations.

    Args:
      marks: whether operations that the backward of a checkpoint computes again get the scope `_AGAIN`.
    """

    def run(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(v: Any) -> Any:
            return v.val if _is_literal(v) else values[v]

        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            if eqn.primitive.name in _CALLS and inner is not None:
                inner = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
                again = marks and eqn.params.get("differentiated", False)
                with jax.named_scope(_AGAIN) if again else nullcontext():
                    made = run(inner.jaxpr, inner.consts, [read(v) for v in eqn.invars])
            else:
                invars: list[Any] = [v for v in eqn.invars if not _is_literal(v)]
                made = _call(_part(jaxpr, [eqn], invars, eqn.outvars), *map(read, invars))
            values.update(zip(eqn.outvars, made, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return lambda *args: run(closed.jaxpr, closed.consts, args)


def _part(
    of: core.Jaxpr, eqns: Sequence[core.JaxprEqn], invars: Sequence[Any], outvars: Sequence[Any]
) -> core.ClosedJaxpr:
    """A jaxpr of some of the equations of another."""
    effects = set().union(*(eqn.effects for eqn in eqns))
    jaxpr = core.Jaxpr((), list(invars), list(outvars), list(eqns), effects, debug_info=of.debug_info)
    return core.ClosedJaxpr(jaxpr, ())


def _call(closed: core.ClosedJaxpr, *args: Any) -> list[Any]:
    return core.jaxpr_as_fun(closed)(*args)


def _is_literal(v: Any) -> bool:
    return isinstance(v, core.Literal)
