"""A few steps of a training, and all that another layout must agree on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.errors import ProofError
from meshpar.train.gradients import Gradients
from meshpar.train.state import TrainState, shardings
from meshpar.train.step import step_function
from meshpar.train.training import Training
from meshpar.tree import flatten_with_paths

Batches = Sequence[dict[str, np.ndarray]]
Arrays = dict[str, np.ndarray]

# The programs are tiny: what XLA would gain by optimizing them is less than the time it takes.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Taken:
    """One step: kind of quantity -> path -> array, in the order in which a step computes them."""

    loss: Arrays
    gradients: Arrays
    norm: Arrays
    parameters: Arrays
    carried: Arrays


KINDS = ("loss", "gradients", "norm", "parameters", "carried")


@dataclass(frozen=True)
class Trial:
    """A training on one layout, compiled once and run as often as is asked."""

    training: Training

    @cached_property
    def start(self) -> Callable[[], TrainState]:
        """Makes the first state."""
        return self.training.compile_init(QUICK)

    def run(self, state: TrainState, batches: Batches) -> tuple[TrainState, list[Taken]]:
        """Takes a step for each batch.

        Raises:
          ProofError: the loss is computed in less than float64.
        """
        taken = []
        for batch in batches:
            state, metrics, grads = self._step(state, self.training.put(batch))
            taken.append(_taken(metrics, grads, state))
        return state, taken

    def saved_and_restored(self, state: TrainState, there: Trial) -> TrainState:
        """The state as it comes back from a checkpoint, on another layout or on the same."""
        with tempfile.TemporaryDirectory() as folder, checkpoints(Path(folder) / "checkpoints") as saved:
            saved.save(int(state.step), state)
            saved.wait()
            return saved.restore(there.training.placement.structs)

    @cached_property
    def _step(self) -> Callable[..., tuple[TrainState, Any, Any]]:
        """The training's own step, which also returns the gradients."""
        training, seen = self.training, []

        def gradients(*args: Any) -> Gradients:
            seen.append(training.gradients(*args))
            return seen[-1]

        def step(state: TrainState, batch: Any) -> tuple[TrainState, Any, Any]:
            seen.clear()
            new, metrics = step_function(gradients, training.update, training.placement)(state, batch)
            return new, metrics, seen[0].grads  # the others are those that an optimizer asked for

        structs = training.placement.structs
        whole = NamedSharding(training.mesh, PartitionSpec())  # pyright: ignore
        lowered = jax.jit(step, out_shardings=(shardings(structs), whole, whole)).lower(structs, training.batch)
        return lowered.compile(compiler_options=QUICK)


def on(training: Training, mesh: Any, **changes: Any) -> Trial:
    """The same training on another mesh."""
    return Trial(training.on(mesh=mesh, **changes))


def _taken(metrics: Any, grads: Any, state: TrainState) -> Taken:
    metrics, grads, params, carried = jax.device_get((metrics, grads, state.params, state.carried))
    if metrics["loss"].dtype != np.float64:
        what = f"the loss comes out in {metrics['loss'].dtype}, though the parameters are float64"
        raise ProofError(f"{what}: rounding would hide what differs; build the model without a dtype of its own")
    return Taken(
        {"loss": metrics["loss"]},
        flatten_with_paths(grads),
        {"norm": metrics["grad_norm"]},
        flatten_with_paths(params),
        flatten_with_paths(carried),
    )
