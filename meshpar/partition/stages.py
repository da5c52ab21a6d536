"""The loss of any model in the stages of a pipeline: each part of a `Cut`, planned on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from meshpar.mesh.varying import varying
from meshpar.parallel.batch import TEACHER_HEAD, Batch
from meshpar.parallel.context import ParallelContext, manual
from meshpar.parallel.data import gathering_again
from meshpar.parallel.outputs import Shares
from meshpar.parallel.pipeline.model import CARRIED, LayerCounts, LayerStack, PipelineModel, Totals
from meshpar.parallel.trainable import is_masked
from meshpar.partition.chain import cut
from meshpar.partition.cut import Argument, Cut
from meshpar.partition.layout import Layout, count
from meshpar.partition.loss import PartitionedLoss, of_whole_arrays, traced
from meshpar.partition.plan import Placed, Scope
from meshpar.partition.program import Use
from meshpar.partition.rules import RULES
from meshpar.partition.rules.loops import carried_layout, planned_body, used_as
from meshpar.partition.scans import LAYERS, scanned
from meshpar.partition.stack import Own
from meshpar.sharding.rules import UNNAMED
from meshpar.sharding.spec import ArraySpec
from meshpar.tree import flatten_with_paths


@dataclass(frozen=True)
class StagedLoss:
    """A loss of whole arrays, cut at its stacks of layers. It is a `parallel.pipeline.model.Stages`.

    Args:
      ctx: the context of the training.
      key: the step's random key, as a struct; None if the loss uses no randomness.
      cost: program -> its FLOPs, which decide how many layers each stage gets.
    """

    loss: PartitionedLoss
    ctx: ParallelContext
    key: Any = None
    cost: Callable[[ClosedJaxpr], Any] = lambda program: 0

    @property
    def cut(self) -> Cut:
        return self._cut[0]

    @property
    def metrics(self) -> list[str]:
        """The names of the loss's metrics, in the order of its results."""
        return sorted(self._cut[1].metrics)

    def with_named_layers(self) -> Any:
        """The specs of the parameters; the first dim of those that loops scan is `layers`, if it had no name."""
        leaves, tree = jax.tree.flatten(self.loss.params)
        stacks = scanned(self._traced[0], len(leaves))
        named = [
            replace(x, dims=(LAYERS, *x.dims[1:])) if i in stacks and x.dims[0] == UNNAMED else x
            for i, x in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, named)

    @cached_property
    def _traced(self) -> tuple[ClosedJaxpr, Any]:
        arguments = self._arguments
        with of_whole_arrays(self.ctx):
            closed, results = traced(self.loss.loss, jax.tree.leaves(arguments), jax.tree.structure(arguments))
            return self.loss.rewrite(closed), results

    @cached_property
    def _cut(self) -> tuple[Cut, Any]:
        closed, results = self._traced
        with of_whole_arrays(self.ctx):
            specs = flatten_with_paths(self.loss.params)
            others = [*(f"batch[{name!r}]" for name in sorted(self._batch)), *(["key"] if self.key is not None else [])]
            others += [f"carried.{path}" for path in flatten_with_paths(self.loss.carried)]
            names = [*((path, spec.dims) for path, spec in specs.items()), *((name, ()) for name in others)]
            found = [Argument(name, v.aval, dims) for (name, dims), v in zip(names, closed.jaxpr.invars, strict=True)]
            num_carried = len(jax.tree.leaves(self.loss.carried))
            return cut(closed, found, len(specs), len(self._batch), num_carried), results

    @cached_property
    def head(self) -> float:
        """The cost of what follows the layers, in layers."""
        layer = self.cost(self.cut.layer)
        return float(self.cost(self.cut.end) / layer) if layer else 0.0

    @property
    def params_of_a_layer(self) -> list[int]:
        """The number of parameters of a layer of each stack."""
        specs = jax.tree.leaves(self.loss.params)
        return [sum(specs[i].size for i in one.of_layers) // self.stacked(one) for one in self.cut.stacks]

    def stacked(self, cut: Cut) -> int:
        """The layers that the parameters of a stack have rows for. A model may have padded them."""
        first = cut.own[0]
        return jax.tree.leaves(self.loss.params)[first].shape[0] if isinstance(first, int) else cut.num_layers

    def layer_counts(self) -> LayerCounts:
        first, *others = self.cut.stacks
        then = tuple(LayerCounts(one.num_layers, self.stacked(one), 0.0, one.is_stacked) for one in others)
        unit = float(self.cost(first.layer))
        costs = tuple(float(self.cost(one.layer)) / unit if unit else 1.0 for one in others)
        return LayerCounts(first.num_layers, self.stacked(first), self.head, first.is_stacked, then, costs)

    def states(self, carried: Any, key: jax.Array | None, num_microbatches: int) -> tuple[Batch, Any]:
        """As in `Stages`. The state depends on no batch, so it is known before the microbatches are."""
        if not jax.tree.leaves(self.loss.carried):
            return {}, carried
        ctx = manual()
        assert ctx is not None, "a pipeline runs only in the manual lowering"
        leaves, tree = jax.tree.flatten(carried)
        with of_whole_arrays(ctx):
            scope = Scope(ctx, RULES)
            layouts = self.loss.state_layouts(ctx, carried)
            keys = [Layout.whole(x.shape, x.dtype) for x in jax.tree.leaves(key)]
            nodes = [scope.input(layout) for layout in (*keys, *layouts)]
            results = scope.plan(self.cut.state.jaxpr, self.cut.state.consts, nodes)
            scope.program.outputs = [
                used_as(scope, node, layout) for node, layout in zip(results, layouts, strict=True)
            ]

        def following(state: list[Any], _: None) -> tuple[list[Any], list[Any]]:
            return scope.program.run(*jax.tree.leaves(key), *state), state

        after, states = lax.scan(following, leaves, None, length=num_microbatches)
        return {f"{CARRIED}{i}": x for i, x in enumerate(states)}, jax.tree.unflatten(tree, after)

    def divided(self, params: Any) -> dict[str, Any]:
        leaves = jax.tree.leaves(params, is_leaf=is_masked)
        stacks = self.cut.stacks
        of_layers = {i for one in stacks for i in one.of_layers}
        stacked = {
            _key(number): {_name(own): _stacked([leaves[i] for i in _each(own)], own) for own in one.own}
            for number, one in enumerate(stacks)
        }
        return stacked | {str(i): x for i, x in enumerate(leaves) if i not in of_layers}

    def joined(self, divided: dict[str, Any]) -> Any:
        leaves = dict(divided)
        for number, own in ((number, own) for number, one in enumerate(self.cut.stacks) for own in one.own):
            x = divided[_key(number)][_name(own)]
            leaves |= {str(i): x if is_masked(x) or isinstance(own, int) else x[m] for m, i in enumerate(_each(own))}
        tree = jax.tree.structure(self.loss.params)
        return jax.tree.unflatten(tree, [leaves[str(i)] for i in range(tree.num_leaves)])

    def on_shards(self, params: dict[str, Any], batch: Batch, key: jax.Array | None) -> PipelineModel:
        ctx = manual()
        assert ctx is not None, "a pipeline runs only in the manual lowering"
        carried = jax.tree.unflatten(jax.tree.structure(self.loss.carried), _carried(batch))
        layouts = self.loss.layouts(ctx, (self.joined(params), _rows(batch), key, carried))
        with of_whole_arrays(ctx):
            return _Parts(self.cut, ctx, layouts, key, self).model()

    @property
    def _batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The whole arrays of a microbatch; of one slice, if slices train alone."""
        num = self.ctx.num_passes * count(self.ctx.slice_axes, self.ctx.mesh.shape)

        def of(name: str, spec: ArraySpec) -> jax.ShapeDtypeStruct:
            rows = spec.shape[0] if name == TEACHER_HEAD else spec.shape[0] // num
            return jax.ShapeDtypeStruct((rows, *spec.shape[1:]), spec.dtype)

        batch = {name: of(name, spec) for name, spec in self.loss.batch.items()}
        rows = next(iter(batch.values())).shape[0]
        return batch | {"rows": jax.ShapeDtypeStruct((rows,), np.dtype("int32"))}

    @property
    def _arguments(self) -> tuple[Any, Any, Any, Any]:
        def param(spec: ArraySpec) -> jax.ShapeDtypeStruct:
            is_float = jnp.issubdtype(spec.dtype, jnp.floating)
            dtype = np.dtype(self.ctx.compute_dtype or spec.dtype) if is_float else spec.dtype
            return jax.ShapeDtypeStruct(spec.shape, dtype)

        return jax.tree.map(param, self.loss.params), self._batch, self.key, jax.tree.map(_struct, self.loss.carried)


class _StackPlan:
    """The plan of a stack.

    Args:
      entry: the scope of what stands before it, and `starts`, the message that this makes.
    """

    def __init__(self, cut: Cut, ctx: ParallelContext, layouts: Sequence[Layout], entry: Scope, starts: Any) -> None:
        self.cut = cut
        self.entry = entry
        self.shared = Scope(ctx, RULES)
        # A message differs between devices with different rows, and between stages.
        varies = frozenset(ctx.gradient_axes + ctx.slice_axes)
        carried = [carried_layout(entry, node) for node in starts]
        carried = [replace(x, varies=x.varies | varies) for x in carried]
        data = [layouts[i] for i in cut.data]
        own = [_row(layouts[own]) if isinstance(own, int) else layouts[own[0]] for own in cut.own]
        nodes = self.shared.plan(cut.shared.jaxpr, cut.shared.consts, [self.shared.input(x) for x in data])
        num_fixed = len(nodes) - cut.num_rows
        fixed = [self.shared.settled(node) if isinstance(node, Placed) else node for node in nodes[:num_fixed]]
        rows = [
            self.shared.settled(node, ((), *self.shared.settled_axes(node.layout)[1:])) for node in nodes[num_fixed:]
        ]
        before = [x.layout if isinstance(x, Placed) else x for x in fixed] + [_row(x.layout) for x in rows]
        self.body, self.message = planned_body(self.shared, cut.layer, before, carried, own)
        self.body.returning(self.message)
        inner = self.body.scope
        inner.program.outputs += [_part_of_sum(inner, node) for node in self.body.outs[len(self.message) :]]
        self.fixed = [x for x in fixed if isinstance(x, Placed)]
        captured = [placed for placed, _ in self.body.scope.captured]
        self.shared.program.outputs = [Use(x.register) for x in (*self.fixed, *rows, *captured)]
        entry.program.outputs = [
            used_as(entry, node, layout) for node, layout in zip(starts, self.message, strict=True)
        ]

    def layer(self, params: Any, message: Sequence[Any], shared: Sequence[Any], index: Any) -> list[Any]:
        num_fixed, num_rows = len(self.fixed), self.cut.num_rows
        rows = [lax.dynamic_index_in_dim(a, index, keepdims=False) for a in shared[num_fixed : num_fixed + num_rows]]
        own = [params[_name(own)] for own in self.cut.own]
        return self.body.run(*shared[:num_fixed], *rows, *message, *own, *shared[num_fixed + num_rows :])


class _Parts:
    """The plans of the parts of a cut.

    Layers of all stacks pass on the same list of arrays. Each stack has some of them for its own message, and passes
    on the others as they are.
    """

    def __init__(self, cut: Cut, ctx: ParallelContext, layouts: Sequence[Layout], key: Any, staged: StagedLoss) -> None:
        self.cut = cut
        self.ctx = ctx
        self.key = key
        self.staged = staged
        self.outer = [layouts[i] for i in cut.outer]
        self.stacks: list[_StackPlan] = []
        message: list[Layout] = []
        for one in cut.stacks:
            entry, starts = self._planned(one.first, message)
            self.stacks.append(_StackPlan(one, ctx, layouts, entry, starts))
            message = self.stacks[-1].message
        self.last, ends = self._planned(cut.end, message)
        self.last.program.outputs = [_part_of_sum(self.last, node) for node in ends]
        self.slots, self.places = _slots([stack.message for stack in self.stacks])

    def _planned(self, closed: ClosedJaxpr, message: Sequence[Layout]) -> tuple[Scope, Sequence[Any]]:
        scope = Scope(self.ctx, RULES)
        return scope, scope.plan(closed.jaxpr, closed.consts, [scope.input(x) for x in (*self.outer, *message)])

    def model(self) -> PipelineModel:
        first, *others = (self._stack(number) for number in range(len(self.stacks)))
        return PipelineModel(
            **first,
            embed=lambda params, batch, key: self._entered(0, params, [], batch),
            loss=self._loss,
            then=tuple(LayerStack(**one, enter=partial(self._entered, i)) for i, one in enumerate(others, 1)),
        )

    def _stack(self, number: int) -> dict[str, Any]:
        """The arguments of `LayerStack`."""
        plan = self.stacks[number]
        num_passed = len(plan.message)

        def layer(params: Any, x: Any, batch: Batch, shared: Any, key: Any, index: Any) -> tuple[Any, Shares]:
            made = plan.layer(params, self._message(number, x), shared, index)
            shares = dict(zip(plan.cut.adds, made[num_passed:], strict=True))
            names = enumerate(self.staged.metrics, 2)
            metrics = {name: shares[i] for i, name in names if i in shares}
            return self._slotted(number, made[:num_passed], x), Shares(shares.get(0), metrics)

        return {
            "layers": _key(number),
            "num_layers": plan.cut.num_layers,
            "stacked_layers": self.staged.stacked(plan.cut),
            "shared": lambda batch, x: plan.shared.program.run(*self._data(batch)),
            "layer": layer,
            "policy": gathering_again(jax.checkpoint_policies.everything_saveable),
            "unroll": plan.cut.unroll,
            "recomputes": True,
        }

    def _data(self, batch: Batch) -> list[Any]:
        return [*jax.tree.leaves(_rows(batch)), *jax.tree.leaves(self.key), *_carried(batch)]

    def _outer(self, params: dict[str, Any], batch: Batch) -> list[Any]:
        num_params = self.cut.data[0]
        return [*(params[str(i)] for i in self.cut.outer if i < num_params), *self._data(batch)]

    def _entered(self, number: int, params: dict[str, Any], x: Any, batch: Batch) -> list[Any]:
        """What the first layer of a stack gets."""
        before = self._message(number - 1, x) if number else []
        made = self.stacks[number].entry.program.run(*self._outer(params, batch), *before)
        return self._slotted(number, made, [_zeros(layout, self.ctx) for layout in self.slots])

    def _message(self, number: int, x: Sequence[Any]) -> list[Any]:
        return [x[place] for place in self.places[number]]

    def _slotted(self, number: int, message: Sequence[Any], x: Sequence[Any]) -> list[Any]:
        """What layers pass on, with the message of a stack in its places."""
        new = dict(zip(self.places[number], message, strict=True))
        return [new.get(place, old) for place, old in enumerate(x)]

    def _loss(self, params: Any, x: Any, batch: Batch) -> Totals:
        message = self._message(len(self.stacks) - 1, x)
        sums = [jnp.asarray(x) for x in self.last.program.run(*self._outer(params, batch), *message)]  # or a constant
        names = self.staged.metrics
        return sums[0], sums[1], dict(zip(names, sums[2:], strict=True))


def _part_of_sum(scope: Scope, node: Any) -> Use:
    """A result of a device, which is added to those of all devices with other tokens, and of other stages."""
    axes = ((),) * len(node.layout.shape)
    placed, ctx = scope.demand(scope.ready(node), axes), scope.ctx
    partial = tuple(axis for axis in ctx.loss_axes if axis not in ctx.stage_axes)
    return Use(placed.register, axes, frozenset(ctx.loss_axes + ctx.slice_axes), partial)


def _slots(messages: Sequence[Sequence[Layout]]) -> tuple[list[Layout], list[list[int]]]:
    """Arrays that hold the message of any stack, and the places of each message in them."""
    slots: list[Layout] = []
    places = []
    for message in messages:
        own: list[int] = []
        for layout in message:
            free = (i for i, x in enumerate(slots) if i not in own and _form(x) == _form(layout))
            own.append(next(free, len(slots)))
            slots += [layout] if own[-1] == len(slots) else []
        places.append(own)
    return slots, places


def _form(layout: Layout) -> tuple[Any, ...]:
    return layout.shape, layout.dtype, layout.axes, layout.varies


def _zeros(layout: Layout, ctx: ParallelContext) -> jax.Array:
    return varying(jnp.zeros(layout.local_shape(ctx.mesh.shape), layout.dtype), tuple(sorted(layout.varies)))


def _key(number: int) -> str:
    """The name of the layers of a stack among the parameters."""
    return f"{LAYERS} {number}" if number else LAYERS


def _rows(batch: Batch) -> Batch:
    return {name: x for name, x in batch.items() if not name.startswith(CARRIED)}


def _carried(batch: Batch) -> list[jax.Array]:
    """The carried state that a microbatch gets, in the order of its tree."""
    num = len(batch) - len(_rows(batch))
    return [batch[f"{CARRIED}{i}"] for i in range(num)]


def _struct(spec: ArraySpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


def _each(own: Own) -> tuple[int, ...]:
    return own if isinstance(own, tuple) else (own,)


def _name(own: Own) -> str:
    return str(_each(own)[0])


def _stacked(leaves: Sequence[Any], own: Own) -> Any:
    """The parameters of all layers in one array. One that is frozen in some layers is trained in the stack."""
    if isinstance(own, int):
        return leaves[0]
    given = [x for x in leaves if not is_masked(x)]
    return jnp.stack(leaves) if len(given) == len(leaves) else (given or leaves)[0]


def _row(layout: Layout) -> Layout:
    """The layout of a row of a stack."""
    axes = layout.axes[1:]
    return replace(
        layout, shape=layout.shape[1:], axes=axes, names=layout.names[1:], is_pinned=layout.is_pinned and any(axes),
        stored=tuple((dim - 1, over) for dim, over in layout.stored),
    )  # fmt: skip
