"""The root of a config, and the one place where everything meets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import pydantic
from flax import nnx

from meshpar.config import Config
from meshpar.errors import ConfigError, Problems
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Model
from meshpar.nn.describe import describe, functional
from meshpar.sharding.constrain import Lowering
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.train.data import Data
from meshpar.train.evaluate import Evaluation, compile_evaluation
from meshpar.train.gradients import Gradients, Objective, auto, manual
from meshpar.train.loss import next_token_loss
from meshpar.train.optim import Optimizer
from meshpar.train.state import StatePlacement, TrainState, compile_init, place
from meshpar.train.step import Step, Update, batch_structs, compile_step

Positive = Annotated[int, pydantic.Field(gt=0)]
Float = Literal["bfloat16", "float32", "float64"]


class Precision(Config):
    """In what parameters are stored and updated, and in what the model computes."""

    params: Float = "float32"
    compute: Float = "float32"


class Run(Config):
    """Everything that a training run is: what a config file holds."""

    model: Model
    data: Data
    optim: Optimizer
    mesh: MeshLayout = MeshLayout()
    rules: AxisRules = AxisRules(preset=("replicated",))
    lowering: Literal["manual", "auto"] = "manual"
    """`manual`: one shard_map with meshpar's own communication. `auto`: GSPMD, where XLA chooses it."""
    precision: Precision = Precision()
    num_steps: Positive
    num_microbatches: Positive = 1
    """A batch is computed in so many parts, one after the other; gradients are reduced once."""
    seed: Annotated[int, pydantic.Field(ge=0)] = 0
    run_dir: Path
    """Where metrics and checkpoints go. A run that finds a checkpoint there goes on from it."""
    log_every: Positive = 10
    eval_every: Positive | None = None
    """Steps between evaluations on held-out data; default: only at the end."""
    checkpoint_every: Positive | None = None
    """Steps between checkpoints; default: only at the end."""


@dataclass(frozen=True)
class Prepared:
    """A run, worked out as far as it goes without a device: each property is one stage of the flow."""

    run: Run
    mesh: AnyMesh

    @cached_property
    def model(self) -> nnx.Module:
        """The model, abstract."""
        return nnx.eval_shape(lambda: self.run.model.build(nnx.Rngs(0)))

    @cached_property
    def specs(self) -> Any:
        """The parameters, as they are stored."""
        dtype = np.dtype(self.run.precision.params)
        return jax.tree.map(lambda spec: replace(spec, dtype=dtype), describe(self.model))

    @cached_property
    def update(self) -> Update:
        optim, num_steps = self.run.optim, self.run.num_steps
        tx = optim.build(num_steps, jax.tree.map(lambda spec: spec.dims, self.specs))
        return Update(tx, optim.clip_norm, optim.learning_rate(num_steps))

    @cached_property
    def placement(self) -> StatePlacement:
        return place(self.specs, self.run.rules, self.mesh, self.update.tx)

    @cached_property
    def how(self) -> Lowering:
        return Lowering(self.mesh, self.run.rules, manual=self.run.lowering == "manual")

    @cached_property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        return batch_structs(self.how, self.run.data.batch_size, self.run.data.seq_len)

    @cached_property
    def objective(self) -> Objective:
        run = self.run
        loss = next_token_loss(functional(self.model), run.model.vocab_size)
        key = partial(_step_key, run.seed) if run.model.dropout else lambda step: None
        return Objective(loss, key, run.num_microbatches, np.dtype(run.precision.compute))

    @property
    def gradients(self) -> Callable[..., Gradients]:
        if self.how.manual:
            return manual(self.objective, self.how, self.placement)
        return auto(self.objective, self.how)

    def compile_step(self) -> Step:
        return compile_step(self.gradients, self.update, self.placement, self.batch)

    def compile_evaluation(self) -> Evaluation:
        return compile_evaluation(self.objective, self.how, self.placement, self.batch)

    def compile_init(self) -> Callable[[], TrainState]:
        def params(key: jax.Array) -> Any:
            return nnx.to_pure_dict(nnx.state(self.run.model.build(nnx.Rngs(key)), nnx.Param))

        return compile_init(params, self.update.tx, self.placement, self.run.seed)


def prepare(run: Run, mesh: AnyMesh | None = None) -> Prepared:
    """Checks what can be checked before anything is compiled.

    Args:
      mesh: default: the run's own, on the devices that are here.

    Raises:
      ConfigError, MeshError, ShardingError: with all problems of their kind.
    """
    prepared = Prepared(run, run.mesh.build() if mesh is None else mesh)
    _check(prepared)
    _ = prepared.placement
    return prepared


def _check(prepared: Prepared) -> None:
    run, problems = prepared.run, Problems()
    rows = int(np.prod([prepared.mesh.shape[a] for a in prepared.how.axes("batch")])) * run.num_microbatches
    if run.data.batch_size % rows:
        what = f"{run.data.batch_size} rows cannot be cut into {rows} equal parts"
        parts = f"({rows // run.num_microbatches} devices x {run.num_microbatches} microbatches)"
        problems.add("data.batch_size", f"{what} {parts}", f"a multiple of {rows}")
    for dim in ("seq", "norm_seq"):
        shards = int(np.prod([prepared.mesh.shape[a] for a in prepared.how.axes(dim)]))
        if run.data.seq_len % shards:
            problems.add("data.seq_len", f"{run.data.seq_len} is not divisible by the {shards} shards of {dim}", f"a multiple of {shards}")
    if run.model.learned_positions and run.data.seq_len > run.model.max_seq_len:
        problems.add("data.seq_len", f"{run.data.seq_len} is more than model.max_seq_len = {run.model.max_seq_len}")
    if run.data.vocab_size > run.model.vocab_size:
        what = f"the data has {run.data.vocab_size} token ids, the model {run.model.vocab_size}"
        problems.add("model.vocab_size", what, f"model.vocab_size={run.data.vocab_size}")
    problems.raise_any(ConfigError, "the parts of this config do not fit each other:")


def _step_key(seed: int, step: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), step)
