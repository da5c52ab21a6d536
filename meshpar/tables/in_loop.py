"""A training with tables as the loop of runs trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.parallel.batch import Batch
from meshpar.parallel.context import ParallelContext
from meshpar.tables.request import Counts
from meshpar.tables.training import Metrics, State, TableTraining
from meshpar.train.evaluate import LazyEvaluation
from meshpar.train.program import compile_program, shardings, trace, whole
from meshpar.train.state import TrainState
from meshpar.train.step import IN_FLIGHT, Step


@dataclass(frozen=True, kw_only=True)
class TableStep(Step):
    """A compiled step whose metrics say of each table how many rows a device requested, see `Counts`."""

    training: TableTraining

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """The next state and the metrics. Before it returns, it checks the step that it has to wait for anyway."""
        oldest = self.in_flight[0] if len(self.in_flight) == IN_FLIGHT else None
        found = super().__call__(state, batch)
        if oldest:
            self._check(oldest)
        return found

    def read(self, metrics: dict[str, jax.Array]) -> dict[str, np.ndarray]:
        for each in self.in_flight:
            self._check(each)
        return {name: np.max(x) for name, x in super().read(metrics).items()}

    def _check(self, metrics: dict[str, jax.Array]) -> None:
        counts = {name: Counts(*(metrics[f"{name}.{x}"] for x in Counts._fields)) for name in self.training.tables}
        self.training.check(Metrics(metrics["loss"], counts))


@dataclass(frozen=True)
class TablesInLoop:
    """The same training with a `TrainState`: the tables are its carried state. Each step checks the steps before it.

    Args:
      seed: from which the first parameters and rows are drawn.
    """

    training: TableTraining
    seed: int

    @property
    def ctx(self) -> ParallelContext:
        return self.training.ctx

    @property
    def structs(self) -> TrainState:
        own = self.training.state
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole(self.training.mesh))
        return TrainState(count, own.params, own.opt_state, count, own.tables)

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """None are known: rows have another place on another number of devices."""
        return {}

    def compile_init(self, options: Any = None, given: Any = None) -> Callable[[], TrainState]:
        """Compiles a function that initializes the state. Checkpoints are restored whole, so nothing is `given`."""
        init = self.training.compile_init(options)
        mesh = whole(self.training.mesh)

        def state() -> TrainState:
            key, count = jax.device_put((jax.random.key(self.seed), np.int32(0)), mesh)
            own = init(key)
            return TrainState(count, own.params, own.opt_state, count + 0, own.tables)

        return state

    def compile_step(self) -> TableStep:
        num_rows = next(iter(self.training.batch.values())).shape[0]

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            new, metrics = self.training.step(State(state.params, state.opt_state, state.carried), batch)
            after = replace(state, step=state.step + 1, params=new.params, opt_state=new.opt_state, carried=new.tables)
            others = {"tokens": jnp.int32(num_rows), "skipped": state.skipped}
            return after, _by_name(metrics) | others

        _, metrics = self.training.step_shardings
        out = shardings(self.structs), _by_name(metrics) | dict.fromkeys(("tokens", "skipped"), metrics.loss)
        traced = trace(step, (self.structs, self.training.batch), out, donate=(0,))
        return TableStep(compile_program(traced), self.training.batch, training=self.training)

    def lazy_evaluation(self) -> LazyEvaluation:
        return LazyEvaluation(self._trace_evaluation)

    def _trace_evaluation(self) -> jax.stages.Traced:
        num_rows = next(iter(self.training.batch.values())).shape[0]

        def evaluate(params: Any, batch: Batch, tables: Any) -> dict[str, jax.Array]:
            loss = self.training.mean_loss(params, tables, batch)
            return {"loss": loss * num_rows, "tokens": jnp.int32(num_rows)}

        state = self.structs
        arguments = (state.params, self.training.batch, state.carried)
        return trace(evaluate, arguments, whole(self.training.mesh))


def _by_name(metrics: Metrics) -> dict[str, Any]:
    counts = {f"{name}.{key}": x for name, of in metrics.counts.items() for key, x in of._asdict().items()}
    return counts | {"loss": metrics.loss}
