"""The root of a config: everything that a training run is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic

from meshpar import config
from meshpar.checkpoint.retention import Retention
from meshpar.config import Config, Positive, Seed
from meshpar.cost.memory import Widths
from meshpar.inspection.contract import Contract
from meshpar.interop import user_code
from meshpar.interop.flax_model import Import
from meshpar.mesh import process
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Family
from meshpar.nn.lora import LoRA
from meshpar.optim import Optimizer
from meshpar.optim.freeze import Freeze
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.strategies import Parallel
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.train.data import Data
from meshpar.train.loop.stopping import EarlyStopping
from meshpar.train.loss import Distill, LossConfig
from meshpar.train.records.loggers import Logger, TensorBoard

Model = Annotated[Family | Import, pydantic.Field(discriminator="kind")]
"""A model of meshpar's own, or the user's."""
Paths = tuple[str, ...]
Float = Literal["bfloat16", "float32", "float64"]


class Precision(Config):
    """In what numbers are stored, computed, summed and updated."""

    params: Float = "float32"
    """Of the parameters, as they are stored."""
    compute: Float = "float32"
    """In which the model computes, and parameters are gathered."""
    gradients: Float | None = None
    """In which gradients are summed over microbatches and devices. Default: float32 at least."""
    master: Float | None = None
    """In which the optimizer keeps parameters of its own, if these are wider than the stored ones."""

    @property
    def widths(self) -> Widths:
        """Bytes of an element in each of them."""
        compute = np.dtype(self.compute).itemsize
        sums = max(compute, 4)
        gradients = np.dtype(self.gradients).itemsize if self.gradients else sums
        return Widths(np.dtype(self.params).itemsize, compute, gradients, sums)


class Init(Config):
    """From where the first parameters are taken, a checkpoint or a folder; what is not taken is drawn."""

    from_checkpoint: Path | None = None
    """A checkpoint, or the folder of a run, of which the last is meant."""
    include: Paths = ("params.**",)
    """Globs of paths of the train state."""
    exclude: Paths = ()
    """Globs of what is not taken, though `include` matches it: a new head, `params.head.**`."""
    from_hf: Path | None = None
    """A folder with `config.json` and safetensors, as Hugging Face's libraries write them. It is read in place."""

    @pydantic.model_validator(mode="after")
    def _one_source(self) -> Init:
        if (self.from_checkpoint is None) == (self.from_hf is None):
            raise ValueError("takes one of from_checkpoint and from_hf")
        return self


class Run(Config):
    """Everything that a training run is: what a config file holds."""

    model: Model
    loss: LossConfig = LossConfig()
    """What is minimized."""
    data: Data
    optim: Optimizer
    lora: LoRA | None = None
    """Trains a little beside the model, and freezes the model."""
    distill: Distill | None = None
    """A teacher to learn from."""
    freeze: tuple[Freeze, ...] = ()
    """Parameters that keep their values: globs, or `{paths: [...], until: 100}`."""
    mesh: MeshLayout = MeshLayout()
    rules: AxisRules = AxisRules(preset=("replicated",))
    lowering: Literal["manual", "auto"] = "manual"
    """`manual`: one shard_map with meshpar's own communication. `auto`: GSPMD, where XLA chooses it."""
    parallel: Parallel = Parallel()
    """Strategies of the manual lowering: overlaps, a pipeline, how gradients are reduced."""
    precision: Precision = Precision()
    num_steps: Positive
    num_microbatches: Positive = 1
    """A batch is computed in so many parts, one after the other; gradients are reduced once."""
    contract: Contract | None = None
    """What the compiled step may send and hold; it is refused if it goes beyond."""
    seed: Seed = 0
    run_dir: Path
    """Where metrics and checkpoints go. A run that finds a checkpoint there goes on from it."""
    log_every: Positive = 10
    eval_every: Positive | None = None
    """Steps between evaluations on held-out data; default: only at the end."""
    init: Init | None = None
    """From where the first parameters are taken; default: they are drawn."""
    checkpoints: Retention = Retention()
    """How often, and which stay."""
    early_stopping: EarlyStopping | None = None
    """When to end before `num_steps`."""
    max_skipped_steps: Positive | None = 10
    """A step whose loss or gradients are not finite is skipped. So many in a row end the run; null for any number."""
    loggers: tuple[Logger, ...] = (TensorBoard(),)
    """Who gets the records beside `run_dir/metrics.jsonl`: tensorboard, wandb, mlflow."""

    @pydantic.model_validator(mode="after")
    def _evaluates_before_it_stops(self) -> Run:
        if self.early_stopping and not self.eval_every:
            raise ValueError("early_stopping looks at evaluations: set eval_every, the steps between them")
        return self

    def context(self, mesh: AnyMesh) -> ParallelContext:
        """How the run's programs use a mesh."""
        dcn = self.mesh.dcn.sizes if self.mesh.dcn else {}
        accum = self.precision.gradients
        return ParallelContext(
            mesh=mesh,
            rules=self.rules,
            manual=self.lowering == "manual",
            parallel=self.parallel,
            compute_dtype=np.dtype(self.precision.compute),
            accum_dtype=accum and np.dtype(accum),
            num_microbatches=self.num_microbatches,
            dcn_axes=tuple(axis for axis, size in dcn.items() if size > 1),
        )


def load(path: Path, overrides: Sequence[str] = ()) -> Run:
    """Reads a config file, with `key=value` overrides.

    Raises:
      ConfigError: with all problems of the config; or it names code that it may not import, see `interop.user_code`.
    """
    loaded = config.load(Run, path, overrides)
    targets = {("model.target",): getattr(loaded.model, "target", None), ("loss", "loss.target"): loaded.loss.target}
    for keys, target in targets.items():
        if target:
            is_on_command_line = any(f"{key}={target}" in overrides for key in keys)
            user_code.permit(target, None if is_on_command_line else path)
    return loaded


def simulate(run: Run, num_devices: int | None) -> None:
    """Where the devices are CPUs: presents as many as are asked for, or as the mesh has."""
    if count := num_devices or run.mesh.requested():
        process.simulate(count)
