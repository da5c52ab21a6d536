"""Runs a few steps of a training and collects all quantities on which layouts must agree."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.checkpoint.agree import of_first
from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.errors import VerificationError
from meshpar.train.gradients import Gradients
from meshpar.train.program import on_host, shardings, structs, whole
from meshpar.train.state import TrainState
from meshpar.train.step import step_function
from meshpar.train.training import Training
from meshpar.tree import flatten_with_paths, map_with_path

Batches = Sequence[dict[str, np.ndarray]]
Arrays = dict[str, np.ndarray]

# The programs are tiny, so optimizing them takes longer than it saves. With jax 0.10's older emitters of fusions, they
# compile in a third of the time.
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):
    QUICK["xla_cpu_use_fusion_emitters"] = False


@dataclass(frozen=True)
class StepResult:
    """The arrays of one step by path, for each kind of quantity. A step computes the kinds in this order."""

    loss: Arrays
    gradients: Arrays
    norm: Arrays
    parameters: Arrays
    carried: Arrays


KINDS = tuple(field.name for field in fields(StepResult))


@dataclass(frozen=True)
class Trial:
    """A training on one layout. It is compiled once and can run several times."""

    training: Training

    @cached_property
    def start(self) -> Callable[[], TrainState]:
        """The compiled function that returns the initial state."""
        return self.training.compile_init(QUICK)

    def run(self, state: TrainState, batches: Batches) -> tuple[TrainState, list[StepResult]]:
        """Runs a step on each batch.

        Raises:
          VerificationError: the loss is not computed in float64.
        """
        results = []
        layers = self.training.stored_layers
        for batch in batches:
            if layers:
                state = layers.to_step(jax.tree.map(jnp.copy, state))  # a copy, because `to_step` donates its argument
            state, metrics, grads = self._step(state, self.training.put(batch))
            if layers:
                state = layers.to_model(state)
                grads = layers.gradients(grads)
            results.append(_result(metrics, grads, state))
        return state, results

    @cached_property
    def rounding(self) -> float:
        """How much two programs' initial floats can differ, relative to an array's largest; 0 if they are float64."""
        floats = [
            x.dtype
            for x in jax.tree.leaves(self.training.drawn)
            if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != np.float64
        ]
        return 8 * max((float(jnp.finfo(dtype).eps) for dtype in floats), default=0.0)

    def saved_and_restored(self, state: TrainState, there: Trial) -> TrainState:
        """Saves the state, and restores it on the layout of `there`."""
        with _folder() as folder, checkpoints(folder / "checkpoints") as saved:
            saved.save(int(state.step), state)
            saved.wait()
            of_first(0)  # waits until the first process has named the checkpoint
            return saved.restore(there.training.placement.structs)

    @cached_property
    def _step(self) -> Callable[..., tuple[TrainState, Any, Any]]:
        """The training's step, compiled so that it also returns the gradients."""
        training = self.training.on_prepared_states
        computed: list[Gradients] = []

        def gradients(*args: Any) -> Gradients:
            computed.append(training.gradients(*args))
            return computed[-1]

        def step(state: TrainState, batch: Any) -> tuple[TrainState, Any, Any]:
            computed.clear()
            new, metrics = step_function(gradients, training.update, training.placement)(state, batch)
            return new, metrics, computed[0].grads  # optimizers such as SAM compute further gradients

        state = replace(training.placement.structs, is_prepared=self.training.stored_layers is not None)
        out = shardings(state), whole(training.mesh), shardings(structs(training.placement.trained))
        lowered = jax.jit(step, out_shardings=out).lower(state, training.batch)
        return lowered.compile(compiler_options=QUICK)


def without_rounding(state: TrainState, reference: Arrays, rounding: float) -> TrainState:
    """The state with the reference's numbers in each array of floats that differs from it by rounding alone.

    Programs of different meshes round what a user's init computes in float32 differently, and training amplifies it.
    """

    def of(path: str, x: Any) -> Any:
        wanted = reference.get(path)
        if wanted is None or wanted.shape != x.shape or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if np.abs(on_host(x) - wanted).max(initial=0) > rounding * np.abs(wanted).max(initial=0):
            return x
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: wanted[index])

    return map_with_path(of, state)


@contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder. Several processes share one, below the current folder, which must be the same for all."""
    if jax.process_count() == 1:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    shared = Path.cwd() / f".verify-{of_first(secrets.randbits(31)):08x}"
    try:
        yield shared
    finally:
        of_first(0)  # the others have read it
        if jax.process_index() == 0:
            shutil.rmtree(shared, ignore_errors=True)


def _result(metrics: Any, grads: Any, state: TrainState) -> StepResult:
    metrics, grads, params, carried = on_host((metrics, grads, state.params, state.carried))
    if metrics["loss"].dtype != np.float64:
        what = f"the loss is {metrics['loss'].dtype}, though the parameters are float64"
        raise VerificationError(f"{what}: rounding would hide differences; build the model without a dtype of its own")
    return StepResult(
        {"loss": metrics["loss"]},
        flatten_with_paths(grads),
        {"norm": metrics["grad_norm"]},
        flatten_with_paths(params),
        flatten_with_paths(carried),
    )
