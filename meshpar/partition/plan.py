"""Plans a traced program on a mesh: for every operation the layout of its operands and results.

The idea is Mesh-TensorFlow's (arXiv:1811.02084), on jaxprs. `Scope.plan` walks the operations in order. A rule for
each primitive says, by a `Signature` mostly, which dims correspond; `Scope.operation` lets the operands decide which
axes shard them, and notes what has to be moved. Three laws make a plain block send what a hand-written one sends:

- A sum over a sharded dim stays *pending* until its value is needed. It ends as an all-reduce, or as a reduce-scatter
  where the value is sharded over the axis next; Megatron's sequence parallelism is the rule that it is.
- A value that depends on no data, such as a mask, a table of positions or random bits, is *deferred*: it is computed
  where it is used, in the layout of that use, so that no device computes more of it than it needs.
- A parameter that is stored in shards is gathered by the operation that uses it first, inside a loop's body.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
from jax.extend.core import Literal

from meshpar.errors import ShardingError
from meshpar.mesh.varying import Axes
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.data import gathered
from meshpar.partition.layout import Layout, count, moves
from meshpar.partition.nodes import Deferred, Placed
from meshpar.partition.program import Program, Step, Use
from meshpar.partition.signature import Assigned, Call, Operand, Signature, assign, sharded
from meshpar.partition.source import Source

Rules = Mapping[str, Callable[["Scope", Any, list[Any]], Sequence[Any]]]
"""Name of a primitive -> (scope, equation, nodes of its operands) -> nodes of its results."""
COLLECTIVE_MATMUL = "collective matmul"
"""The name of a product that communicates while it computes."""


class Unknown(ShardingError):
    """An operation that the partitioner has no rule for."""


class Observer(Protocol):
    """What sees the operations of a program as they are planned."""

    def operation(self, eqn: Any, signature: Signature, layouts: Sequence[Layout]) -> None:
        """An operation, and the layouts of its operands."""

    def loop(self, layout: Layout) -> None:
        """A loop over the first dim of a value with this layout."""


class Scope:
    """The plan of one jaxpr: the whole program, or the body of a loop.

    Args:
      ctx: the mesh, the rules of its axes and their roles.
      rules: name of a primitive -> how it is planned.
      outer: the scope that this one's program is in.
      is_derivative: whether the program is a forward or backward of a derivative, which JAX does not differentiate.
      observer: sees each operation as it is planned.
    """

    def __init__(
        self,
        ctx: ParallelContext,
        rules: Rules,
        outer: Scope | None = None,
        is_derivative: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self.ctx = ctx
        self.rules = rules
        self.outer = outer
        self.observer = outer.observer if outer else observer
        self.caller: Source | None = outer.caller if outer else None
        self.in_8_bits: list[str] = outer.in_8_bits if outer else []
        """The lines of the products that are rounded to `ctx.number_format`."""
        self.in_chunks: list[str] = outer.in_chunks if outer else []
        """The lines of the products that gather their weights in chunks."""
        self.is_derivative = is_derivative or bool(outer and outer.is_derivative)
        self.program = Program(dict(ctx.mesh.shape))
        self.captured: list[tuple[Placed, int]] = []
        """Values of the outer scope that this one reads, and the registers in which it gets them."""
        self.made: list[Callable[[], Any]] = []
        """For each value that a node keeps because it was made once, what forgets it."""

    @property
    def sizes(self) -> Any:
        return self.program.sizes

    # Registers ---------------------------------------------------------------------------------------------------

    def register(self, layout: Layout) -> Placed:
        self.program.layouts.append(layout)
        return Placed(len(self.program.layouts) - 1, layout)

    def input(self, layout: Layout) -> Placed:
        """A new argument of the program."""
        placed = self.register(layout)
        if layout.stored:
            placed.uses = 1  # `plan` counts how often it is read
        self.program.inputs.append(placed.register)
        return placed

    def constant(self, x: Any) -> Placed:
        aval = jax.typeof(x)
        placed = self.register(Layout.whole(aval.shape, aval.dtype))
        self.program.constants[placed.register] = x
        return placed

    def step(
        self,
        compute: Callable[..., Any],
        uses: Sequence[Use],
        layouts: Sequence[Layout],
        source: Source,
        inner: tuple[tuple[Program, int], ...] = (),
        equation: tuple[str, str, str] | None = None,
        then: Callable[..., Any] | None = None,
    ) -> list[Placed]:
        placed = [self.register(layout) for layout in layouts]
        outs = tuple(one.register for one in placed)
        self.program.steps.append(Step(compute, tuple(uses), outs, source, inner, equation, then))
        return placed

    def mark(self) -> tuple[Any, ...]:
        """The state of the plan, for `reset`."""
        program = self.program
        own = (len(program.layouts), len(program.inputs), len(program.steps), len(self.captured), len(self.made))
        return (*own, self.outer.mark() if self.outer else None)

    def reset(self, mark: tuple[Any, ...]) -> None:
        """Forgets what was planned since `mark`."""
        layouts, inputs, steps, captured, made, outer = mark
        for forget in self.made[made:]:
            forget()
        del self.program.layouts[layouts:]
        del self.program.inputs[inputs:]
        del self.program.steps[steps:]
        del self.captured[captured:]
        del self.made[made:]
        if self.outer:
            self.outer.reset(outer)

    # Walking -----------------------------------------------------------------------------------------------------

    def plan(self, jaxpr: Any, consts: Sequence[Any], nodes: Sequence[Any]) -> list[Any]:
        """Plans a jaxpr within this scope: nodes of its arguments -> nodes of its results."""
        uses = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal))
        uses.update(v for v in jaxpr.outvars if not isinstance(v, Literal))
        env: dict[Any, Any] = {}

        def read(v: Any) -> Any:
            return self.constant(v.val) if isinstance(v, Literal) else env[v]

        def write(v: Any, node: Any, is_new: bool = True) -> None:
            if is_new or node.uses == 1:
                node.uses = uses[v]
            env[v] = node

        for v, x in zip(jaxpr.constvars, consts, strict=True):
            write(v, x if isinstance(x, (Placed, Deferred)) else self.constant(x))
        for v, node in zip(jaxpr.invars, nodes, strict=True):
            write(v, node, is_new=False)
        for eqn in jaxpr.eqns:
            for v, node in zip(eqn.outvars, self.planned(eqn, [read(v) for v in eqn.invars]), strict=True):
                write(v, node)
        return [read(v) for v in jaxpr.outvars]

    def planned(self, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
        rule = self.rules.get(eqn.primitive.name)
        if rule is None:
            raise self.unknown(eqn)
        return rule(self, eqn, nodes)

    def unknown(self, eqn: Any) -> Unknown:
        """The error for an operation without a rule."""
        return Unknown(_unknown(self.source(eqn)))

    def source(self, eqn: Any) -> Source:
        """The line of the user's code that an operation of this scope stands for."""
        return Source.of(eqn, self.caller)

    @contextmanager
    def called(self, eqn: Any) -> Iterator[None]:
        """Plans what is in the `with` block as the operations of a function that this equation calls."""
        before = self.caller
        self.caller = self.source(eqn)
        try:
            yield
        finally:
            self.caller = before

    # Operations --------------------------------------------------------------------------------------------------

    def operation(
        self,
        eqn: Any,
        signature: Signature,
        nodes: Sequence[Any],
        assigned: Assigned | None = None,
        stored: int | None = None,
    ) -> list[Placed]:
        """Plans an operation by its signature.

        Args:
          assigned: the axes that shard its labels. Default: the operands decide.
          stored: an operand that is stored in shards, which the operation gathers itself.
        """
        nodes = [node if i == stored else self.ready(node, self.source(eqn)) for i, node in enumerate(nodes)]
        copies: set[str] = set()
        if assigned is None:
            assigned, partial, copies = self._decided(eqn, signature, nodes)
        else:
            partial = self._passing(signature, nodes)
            partial = () if {*partial} & _axes_of(assigned) else partial
        placed = [
            self.demand(node, sharded(labels, assigned)) for node, labels in zip(nodes, signature.ins, strict=True)
        ]
        uses = [
            self.use(one, sharded(labels, assigned), partial) for one, labels in zip(placed, signature.ins, strict=True)
        ]
        varies = frozenset(copies).union(*(use.varies for use in uses))
        if stored is not None:
            varies |= nodes[stored].layout.varies | {a for _, axes in nodes[stored].layout.stored for a in axes}
            uses[stored] = Use(placed[stored].register)
        uses = [replace(use, varies=varies) for use in uses]
        signature.check(assigned)
        if self.observer:
            self.observer.operation(eqn, signature, [node.layout for node in nodes])
        layouts = self._results(eqn, signature, nodes, assigned, varies, partial)
        local_shapes = tuple(layout.local_shape(self.sizes) for layout in layouts)
        call = Call(assigned, local_shapes, self.sizes)

        def compute(*shards: Any) -> Sequence[Any]:
            return signature.compute(call, *shards)

        source = self.source(eqn)
        if stored is not None:
            return self.step(compute, uses, layouts, replace(source, name=COLLECTIVE_MATMUL))
        # JAX does not differentiate a derivative, and the products of `streamed` are differentiated.
        equation = None if self.is_derivative else signature.equation
        of_product = signature.then
        then = of_product and (lambda *arrays: of_product(call, *arrays))
        return self.step(compute, uses, layouts, source, equation=equation, then=then)

    def assigned(self, signature: Signature, nodes: Sequence[Any], passes: bool = False) -> Assigned:
        """The axes that the operands decide on."""
        return assign(signature, [self._operand(node, passes) for node in nodes], self.sizes)

    def _decided(self, eqn: Any, signature: Signature, nodes: Sequence[Any]) -> tuple[Assigned, Axes, set[str]]:
        """The axes that shard an operation's labels; those over which sums pass; those over which results are copies.

        With sequence parallelism an operation may contract tokens that are sharded over an axis, and a product may meet
        a sum that is pending over it. Either that sum ends, or the tokens are gathered, as Megatron's layers gather
        them: whichever sends fewer bytes.
        """
        passing = self._passing(signature, nodes)
        assigned = self.assigned(signature, nodes, bool(passing))
        if {*passing} & _axes_of(assigned):
            # Another operand is sharded over the axis of the sum, so the sum ends in the shards of that operand.
            passing, assigned = (), self.assigned(signature, nodes)
        tokens = {*self.ctx.axes("residual_seq")}.difference(*(x.layout.used for x in nodes if x.layout.is_pinned))
        contracted = tokens & {axis for label in signature.summed for axis in assigned.get(label, ())}
        if any(node.layout.is_weight for node in nodes):  # what is contracted with it is a feature, not a token
            contracted = set()
        met = self._passing(replace(signature, linear="one"), nodes) if signature.is_product else ()
        if not contracted and not (met and {*met} <= tokens):
            return assigned, passing, set()
        whole = {label: tuple(axis for axis in axes if axis not in tokens) for label, axes in assigned.items()}
        choices = (assigned, passing, set()), (whole, met or passing, set() if self.is_derivative else contracted)
        return min(choices, key=lambda choice: self._sent(eqn, signature, nodes, *choice[:2]))

    def _sent(self, eqn: Any, signature: Signature, nodes: Sequence[Any], assigned: Assigned, passing: Axes) -> int:
        """The bytes that a device sends to move the operands of an operation, and to end the sums of its results."""
        uses = [
            self.use(node, sharded(labels, assigned), passing).moves(node.layout, self.sizes)
            for node, labels in zip(nodes, signature.ins, strict=True)
            if isinstance(node, Placed)
        ]
        results = self._results(eqn, signature, nodes, assigned, frozenset(), passing)
        ends = [moves(layout, self.settled_axes(layout), frozenset(), self.sizes) for layout in results]
        return sum(move.sent for found in (*uses, *ends) for move in found)

    def use(self, placed: Placed, axes: tuple[Axes, ...], partial: Axes = ()) -> Use:
        """The use of a value sharded over `axes`, typed as varying over no more axes than it has to be."""
        layout = placed.layout
        partial = tuple(axis for axis in partial if axis in layout.pending)
        left = {axis for axis in layout.varies if axis not in layout.used and axis not in layout.pending}
        sharding = {axis for dim in axes for axis in dim}
        return Use(placed.register, axes, frozenset(left | sharding | {*partial}), partial)

    def ready(self, node: Any, source: Source | None = None) -> Any:
        """The node, gathered if it is a parameter that is stored in shards.

        Args:
          source: what needs it.
        """
        if isinstance(node, Deferred) or not node.layout.stored:
            return node
        if node.whole is None:
            stored = node.layout.stored
            layout = replace(
                node.layout, stored=(), varies=node.layout.varies | {a for _, axes in stored for a in axes}
            )
            use = Use(node.register)
            source = replace(source or Source(""), name="gather of a parameter")
            (node.whole,) = self.step(lambda x: [gathered(x, stored, self.ctx)], [use], [layout], source)
            self.made.append(partial(setattr, node, "whole", None))
        return node.whole

    def demand(self, node: Any, axes: tuple[Axes, ...]) -> Placed:
        """The value of a node; one that is deferred is computed sharded over `axes`."""
        if isinstance(node, Placed):
            return node
        if axes not in node.made:
            node.made[axes] = node.make(axes)
            self.made.append(partial(node.made.pop, axes))
        return node.made[axes]

    def settled(self, node: Any, axes: tuple[Axes, ...] | None = None, source: Source | None = None) -> Placed:
        """The value, without pending sums, as a register: sharded over `axes`, or as it is.

        Args:
          source: what needs it so.
        """
        node = self.ready(node, source)
        axes = self.settled_axes(node.layout) if axes is None else axes
        placed = self.demand(node, axes)
        if placed.layout.axes == axes and not placed.layout.pending:
            return placed
        use = self.use(placed, axes)
        layout = replace(placed.layout, axes=axes, pending=(), varies=use.varies)
        return self.step(lambda x: [x], [use], [layout], source or Source("move"))[0]

    def settled_axes(self, layout: Layout) -> tuple[Axes, ...]:
        """The axes that shard a value after its pending sums end.

        Megatron's sequence parallelism: a sum that is pending over an axis of `residual_seq` ends in shards of `seq`,
        if the value has features, as the residual stream does.
        """
        axes = list(layout.axes)
        for axis in layout.pending:
            if axis in self.ctx.axes("residual_seq") and "seq" in layout.names:
                dim = layout.names.index("seq")
                has_features = math.prod(layout.shape[dim + 1 :]) > 1
                if has_features and layout.shape[dim] % count((*axes[dim], axis), self.sizes) == 0:
                    axes[dim] = (*axes[dim], axis)
        return tuple(axes)

    def _operand(self, node: Any, passes: bool) -> Operand:
        layout = node.layout
        wanted = layout.axes if passes else self.settled_axes(layout)
        return Operand(layout, wanted, isinstance(node, Placed))

    def _passing(self, signature: Signature, nodes: Sequence[Any]) -> Axes:
        """The axes over which the operation's result stays a pending sum of its operands'."""
        pending = [node.layout.pending for node in nodes]
        if signature.linear == "no" or not any(pending):
            return ()
        if any(over and node.uses != 1 for over, node in zip(pending, nodes, strict=True)):
            return ()
        if signature.linear == "all":
            return pending[0] if all({*over} == {*pending[0]} for over in pending) else ()
        if signature.linear == "first":
            return pending[0] if not any(pending[1:]) else ()
        (first, *others) = [over for over in pending if over]
        return first if not others else ()

    def _results(
        self,
        eqn: Any,
        signature: Signature,
        nodes: Sequence[Any],
        assigned: Assigned,
        varies: frozenset[str],
        partial: Axes,
    ) -> list[Layout]:
        names: dict[Any, str] = {}
        for node, labels in zip(nodes, signature.ins, strict=True):
            for label, name in zip(labels, node.layout.names, strict=True):
                if label is not None and name:
                    names.setdefault(label, name)
        summed = tuple(axis for label in signature.summed for axis in assigned.get(label, ()))
        closed = {axis for label in signature.closed for axis in assigned.get(label, ())}
        pinned = signature.pins or (signature.views and all(node.layout.is_pinned for node in nodes))
        operands = [node.layout for node in nodes if math.prod(node.layout.shape) > 1]  # numbers scale a weight
        is_weight = bool(operands) and all(layout.is_weight for layout in operands)
        axes = [sharded(labels, assigned) for labels in signature.outs]
        return [
            Layout(
                tuple(v.aval.shape), v.aval.dtype, over, tuple(names.get(x, "") for x in labels), (*partial, *summed),
                varies - closed | {axis for dim in over for axis in dim}, pinned, is_weight,
            )
            for v, labels, over in zip(eqn.outvars, signature.outs, axes, strict=True)
        ]  # fmt: skip

    # Other scopes ------------------------------------------------------------------------------------------------

    def entered(self, inner: Scope, node: Any, layout: Layout | None = None) -> Any:
        """A node of this scope as a node of an inner one, of which it becomes an argument."""
        if isinstance(node, Placed):
            return inner.input(layout or node.layout)

        def make(axes: tuple[Axes, ...]) -> Placed:
            placed = self.demand(node, axes)
            argument = inner.input(placed.layout)
            inner.captured.append((placed, argument.register))
            return argument

        return Deferred(node.layout, make)


def _axes_of(assigned: Assigned) -> set[str]:
    return {axis for axes in assigned.values() for axis in axes}


def _unknown(source: Source) -> str:
    what = f"{source.line}: meshpar has no rule that partitions the operation {source.name!r}"
    return f"{what}; write it with other operations, or use lowering=auto, where XLA partitions it"
