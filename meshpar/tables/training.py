"""Trains a model whose embeddings are tables: dense parameters by Optax, rows by the tables' own optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.errors import DataError, Problems, ShardingError
from meshpar.mesh.layout import MeshLayout
from meshpar.mesh.varying import Axes
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.tables.placement import init, struct
from meshpar.tables.request import Counts
from meshpar.tables.state import Pulled, TableState
from meshpar.tables.table import Table
from meshpar.train.program import WHOLE, compile_program, on_shards, shardings, trace

Batch = dict[str, jax.Array]
Loss = Callable[[Any, dict[str, jax.Array], Batch], jax.Array]
"""(dense parameters, the rows of each table, the batch of a device) -> the mean loss of the device's examples, []."""


class State(NamedTuple):
    """The dense parameters, the state of their optimizer, and the tables by name."""

    params: Any
    opt_state: Any
    tables: dict[str, TableState]


class Metrics(NamedTuple):
    """The metrics of a step.

    Args:
      loss: [], the mean over the batch; NaN if an id got no row, see `TableTraining.check`.
      counts: table -> how many rows each device requested, int32[n].
    """

    loss: jax.Array
    counts: dict[str, Counts]


@dataclass(frozen=True)
class TableTraining:
    """Compiles the programs of a training with tables; `training` makes one. `meshpar.fit` trains it in a loop.

    Args:
      axes: over which the batch and every table are sharded.
    """

    mesh: AnyMesh
    tables: Mapping[str, Table]
    axes: Axes
    init: Callable[[jax.Array], Any]
    loss: Loss
    ids: Callable[[Batch], dict[str, jax.Array]]
    optimizer: optax.GradientTransformation
    batch: dict[str, jax.ShapeDtypeStruct]

    @property
    def state(self) -> State:
        """The state as a tree of `ShapeDtypeStruct`, with shardings."""

        def dense(key: jax.Array) -> tuple[Any, Any]:
            params = self.init(key)
            return params, self.optimizer.init(params)

        def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, WHOLE))  # pyright: ignore

        params, opt_state = jax.tree.map(placed, jax.eval_shape(dense, jax.random.key(0)))
        return State(params, opt_state, {name: struct(table, self.mesh) for name, table in self.tables.items()})

    def compile_init(self, options: dict[str, Any] | None = None) -> Callable[[jax.Array], State]:
        """Compiles a function: key -> the first state."""

        def local(key: jax.Array) -> State:
            of_dense, *of_tables = jax.random.split(key, 1 + len(self.tables))
            params = self.init(of_dense)
            tables = {name: init(table, key) for (name, table), key in zip(self.tables.items(), of_tables, strict=True)}
            return State(params, self.optimizer.init(params), tables)

        key = jax.eval_shape(jax.random.key, 0)
        whole = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=NamedSharding(self.mesh, WHOLE))  # pyright: ignore
        function = on_shards(local, self.ctx, WHOLE, self._specs)
        return compile_program(trace(function, (whole,), shardings(self.state)), options)

    def compile_step(self, options: dict[str, Any] | None = None) -> Callable[[State, Batch], tuple[State, Metrics]]:
        """Compiles `step`, which donates the state."""
        arguments = (self.state, self.batch)
        return compile_program(trace(self.step, arguments, self.step_shardings, donate=(0,)), options)

    @property
    def step(self) -> Callable[[State, Batch], tuple[State, Metrics]]:
        """A function of global arrays: (state, batch) -> the next state, and metrics.

        Communication: see `Table.pull` and `Table.push`; an all-reduce of the dense gradients and of the loss.
        """
        return on_shards(self._step, self.ctx, (self._specs, self._batch_specs), (self._specs, self._metrics))

    @property
    def step_shardings(self) -> Any:
        """The shardings of the results of `step`."""
        metrics = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self._metrics)  # pyright: ignore
        return shardings(self.state), metrics

    def put(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """Shards a batch over the devices."""
        return {name: jax.device_put(x, self.batch[name].sharding) for name, x in batch.items()}

    def check(self, metrics: Metrics) -> None:
        """Waits for a step, and checks that every id got its row. If one did not, the loss of the step is NaN.

        Raises:
          DataError: lists each table with ids that got no slot, and the capacity that they need; or with unknown ids.
        """
        problems = Problems()
        for name, counts in jax.device_get(metrics.counts).items():
            table = self.tables[name]
            if overflow := counts.overflow.sum():
                what = f"{overflow} ids of a step got no slot: their rows were zeros, and their gradients are lost"
                problems.add(f"{name}.capacity", what, f"capacity={counts.needed.max()}; it is {table.capacity}")
            if unknown := counts.unknown.sum():
                what = f"{unknown} ids of a step are {table.num_rows} or more, which is the number of rows"
                problems.add(f"{name}.num_rows", what, "more rows, or other ids; -1 stands for no row")
        problems.raise_any(DataError, "the tables do not fit the ids of a step:")

    @property
    def _batch_specs(self) -> dict[str, PartitionSpec]:
        return {name: x.sharding.spec for name, x in self.batch.items()}  # pyright: ignore

    @property
    def ctx(self) -> ParallelContext:
        return ParallelContext(mesh=self.mesh, rules=AxisRules(preset="replicated"), manual=True)

    @property
    def _specs(self) -> Any:
        return jax.tree.map(lambda x: x.sharding.spec, self.state)

    @property
    def _metrics(self) -> Metrics:
        each: Any = PartitionSpec(self.axes)
        loss: Any = WHOLE
        return Metrics(loss, dict.fromkeys(self.tables, Counts(each, each, each)))

    @property
    def mean_loss(self) -> Callable[[Any, dict[str, TableState], Batch], jax.Array]:
        """A function of global arrays: (dense parameters, tables, batch) -> the mean loss, []; NaN as in a step."""

        def local(params: Any, tables: dict[str, TableState], batch: Batch) -> jax.Array:
            pulled, loud = self._pulled(tables, batch)
            rows = {name: found.rows for name, found in pulled.items()}
            return lax.pmean(self.loss(params, rows, batch) + loud, self.axes)

        params, _, tables = self._specs
        return on_shards(local, self.ctx, (params, tables, self._batch_specs), WHOLE)

    def _pulled(self, tables: dict[str, TableState], batch: Batch) -> tuple[dict[str, Pulled], jax.Array]:
        """The rows of the ids of a batch; and NaN if an id of this device got none, else 0."""
        ids = self.ids(batch)
        pulled = {name: table.pull(tables[name], ids[name]) for name, table in self.tables.items()}
        counts = [found.slots.counts for found in pulled.values()]
        num_lost = sum(one.overflow[0] + one.unknown[0] for one in counts)
        return pulled, jnp.where(num_lost > 0, jnp.nan, 0.0)

    def _step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        pulled, loud = self._pulled(state.tables, batch)

        def mean_loss(params: Any, rows: dict[str, jax.Array]) -> jax.Array:
            return lax.pmean(self.loss(params, rows, batch) + loud, self.axes)

        rows = {name: found.rows for name, found in pulled.items()}
        loss, (grads, row_grads) = jax.value_and_grad(mean_loss, argnums=(0, 1))(state.params, rows)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        tables = {
            name: table.push(state.tables[name], pulled[name], row_grads[name]) for name, table in self.tables.items()
        }
        counts = {name: found.slots.counts for name, found in pulled.items()}
        return State(optax.apply_updates(state.params, updates), opt_state, tables), Metrics(loss, counts)


def training(
    init: Callable[[jax.Array], Any],
    loss: Loss,
    ids: Callable[[Batch], dict[str, jax.Array]],
    optimizer: optax.GradientTransformation,
    batch: Mapping[str, Any],
    *,
    tables: Mapping[str, Table],
    mesh: MeshLayout | AnyMesh,
) -> TableTraining:
    """Makes the training of a model with tables: dense parameters are replicated, tables are sharded.

    Args:
      init: key -> the dense parameters.
      loss: (dense parameters, table -> rows [*N, W], the batch of a device) -> the mean loss of its examples, [].
      ids: batch of a device -> int32 ids [*N] for each table.
      optimizer: of the dense parameters.
      batch: an example batch, or `ShapeDtypeStruct`s. The first dim of each array is sharded over the tables' axes.
      tables: all sharded over the same axes.

    Returns:
      A `TableTraining`. Nothing is compiled or allocated yet.

    Raises:
      ShardingError: lists every table and every array of the batch that does not fit the mesh.

    Communication: see `TableTraining.step`.

    >>> items = Table(num_rows=100, width=4, capacity=8, optim={"kind": "row_adagrad", "lr": 0.1})
    >>> batch = {"item": np.arange(8, dtype=np.int32), "y": np.ones(8, np.float32)}
    >>> ratings = training(
    ...     lambda key: {"w": jnp.zeros(4)},
    ...     lambda params, rows, batch: jnp.square(rows["items"] @ params["w"] - batch["y"]).mean(),
    ...     lambda batch: {"items": batch["item"]},
    ...     optax.sgd(0.1), batch, tables={"items": items}, mesh=MeshLayout(data=-1),
    ... )
    >>> state = ratings.compile_init()(jax.random.key(0))
    >>> state, metrics = ratings.compile_step()(state, ratings.put(batch))
    >>> ratings.check(metrics)
    >>> float(metrics.loss)
    1.0
    """
    mesh = mesh.build() if isinstance(mesh, MeshLayout) else mesh
    problems = Problems()
    for name, table in tables.items():
        table.check(mesh, problems, name)
    axes = next((table.axes for table in tables.values()), ())
    if not tables:
        problems.add("tables", "there is none", "at least one table; `meshpar.training` trains dense parameters alone")
    for name, table in tables.items():
        if table.axes != axes:
            what = f"{', '.join(table.axes)}, but another table is sharded over {', '.join(axes)}"
            problems.add(f"{name}.axes", what, "the same axes for all tables: those of the batch")
    num = math.prod(mesh.shape.get(axis, 1) for axis in axes)
    for name, x in batch.items():
        if not x.shape or x.shape[0] % num:
            what = f"{x.dtype}{list(x.shape)} cannot be divided among {num} devices"
            problems.add(f"batch.{name}", what, f"a multiple of {num} as the first dim")
    problems.raise_any(ShardingError, "the tables do not fit the mesh:")
    sharding = NamedSharding(mesh, PartitionSpec(axes))  # pyright: ignore
    dtypes = {name: jax.dtypes.canonicalize_dtype(x.dtype) for name, x in batch.items()}
    structs = {name: jax.ShapeDtypeStruct(x.shape, dtypes[name], sharding=sharding) for name, x in batch.items()}
    return TableTraining(mesh, dict(tables), axes, init, loss, ids, optimizer, structs)
