"""The root of a config, and the one place where everything meets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import pydantic
from flax import nnx
from jax.sharding import Mesh

from meshpar import config
from meshpar.config import Config
from meshpar.errors import ConfigError, ContractError, ContractWarning, Problems, ProgramError
from meshpar.inspection import inspect as inspection
from meshpar.inspection.contract import Contract, beyond
from meshpar.inspection.inspect import Inspection, axes_name
from meshpar.inspection.planned import planned_by
from meshpar.inspection.report import Report, report
from meshpar.mesh import process
from meshpar.mesh.hardware import chip_of
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Model
from meshpar.nn.describe import describe, functional
from meshpar.parallel.traffic import Activations, Traffic, Widths, step_traffic
from meshpar.plan import targets
from meshpar.plan.fit import Judgement, compile_for, judge
from meshpar.sharding.constrain import Lowering
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.train.checkpoint import checkpoints
from meshpar.train.data import Data
from meshpar.train.evaluate import Evaluation, compile_evaluation
from meshpar.train.gradients import Gradients, Objective, auto, manual
from meshpar.train.loop import Loop
from meshpar.train.loss import Batch, next_token_loss
from meshpar.train.metrics import flops_per_token, recorder
from meshpar.train.optim import Optimizer
from meshpar.train.state import StatePlacement, TrainState, compile_init, place
from meshpar.train.step import Metrics, Step, Update, batch_structs, compile_step, step_function
from meshpar.tree import flatten_with_paths

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
    expects: Contract | None = None
    """What the compiled step may send and hold; it is refused if it goes beyond."""
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

    @property
    def step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The step, not yet compiled."""
        return step_function(self.gradients, self.update, self.placement)

    def compile_step(self) -> Step:
        return compile_step(self.step, self.placement, self.batch)

    @cached_property
    def closed_form(self) -> Traffic | None:
        """Bytes that a device sends in a step, by axes; None if the optimizer mixes elements."""
        run, shape = self.run, self.mesh.shape
        if not run.optim.elementwise:
            return None
        rows = run.data.batch_size // math.prod(shape[axis] for axis in self.how.axes("batch"))
        model, recomputed = run.model, run.model.remat != "none"
        activations = Activations(model.num_layers, rows * run.data.seq_len, model.width, recomputed)
        params, compute = (np.dtype(name).itemsize for name in (run.precision.params, run.precision.compute))
        # XLA's CPU compiler widens what travels in 16 bits.
        widths = Widths(params, max(compute, 4) if self._on_cpu else compute, max(compute, 4))
        return step_traffic(
            self.placement.sharded, self.how, widths, activations, run.num_microbatches, hoists=self._on_cpu
        )

    @property
    def _on_cpu(self) -> bool:
        devices = self.mesh.devices.flat if isinstance(self.mesh, Mesh) else jax.devices()
        return devices[0].platform == "cpu"

    def inspect(self, step: Step) -> Inspection:
        """Reads a compiled step, and holds it to the run's contract.

        Raises:
          ContractError: lists all that goes beyond `expects`.

        Warns:
          ContractWarning: the manual lowering sends more than its closed form.
        """
        meant = planned_by(self.how, self.placement.sharded, self.placement.opt_state)
        told = inspection.inspect(step.compiled, self.mesh, warnings=step.warnings, planned=meant)
        passes = self.run.model.num_layers * self.run.num_microbatches
        if self.run.expects:
            broken = self.run.expects.check(told, self.closed_form, passes)
            broken.raise_any(ContractError, "the compiled step breaks its contract:")
        if self.how.manual and self.closed_form is not None and (more := beyond(told, self.closed_form)):
            text = "\n".join(["the step sends more than the closed form of its presets:", *map(str, more.found)])
            warnings.warn(text, ContractWarning, stacklevel=2)
        form = {axes_name(axes): round(bytes_) for axes, bytes_ in (self.closed_form or {}).items()}
        return replace(told, closed_form=form or None)

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


def load(path: Path, overrides: Sequence[str] = ()) -> Run:
    """Reads a config file, with `key=value` overrides."""
    return config.load(Run, path, overrides)


def simulate(run: Run, num_devices: int | None) -> None:
    """Where the devices are CPUs: presents as many as are asked for, or as the mesh has."""
    if count := num_devices or run.mesh.requested():
        process.simulate(count)


def explain(run: Run, path: str | None = None, num_devices: int | None = None) -> Report:
    """What every device would hold; needs no devices.

    Args:
      path: a glob; reports on, and draws, the parameters that it matches.

    Raises:
      ConfigError: no parameter matches.
    """
    placement = prepare(run, run.mesh.abstract(num_devices)).placement
    told = report(placement.params, placement.sharded, placement.opt_state)
    return told if path is None else told.only(path)


def inspect(run: Run, target: str | None = None) -> Inspection | Judgement:
    """What the run's step communicates, computes and holds, from its compiled program; nothing is allocated.

    Args:
      target: a machine that is not here, such as `v5e:16x16`; the step is compiled for it, and judged.

    Raises:
      ContractError: the step goes beyond what the run expects.
      MeshError: there is no such machine, its compiler is not installed, or the step is too big to compile.
    """
    if target is None:
        prepared = prepare(run)
        return prepared.inspect(prepared.compile_step())
    process.compile_only()
    machine = targets.parse(target)
    prepared = prepare(run, run.mesh.build(machine.devices()))
    return judge(prepared.inspect(compile_for(machine, prepared.compile_step)), machine, prepared.mesh)


def fit(run: Run, *, json: bool = False, profile: Path | None = None, dump_hlo: Path | None = None) -> TrainState:
    """Trains, or goes on from the last checkpoint in the run directory.

    Args:
      json: print records as JSON instead of a progress bar.
      profile: a folder for a trace of a few steps.
      dump_hlo: a file for the compiled step's text.
    """
    prepared = prepare(run)
    with recorder(run.run_dir, run.num_steps, json) as records, checkpoints(run.run_dir / "checkpoints") as saved:
        train_data, held_out = run.data.train(run.seed), run.data.held_out()
        step, evaluate, init = prepared.compile_step(), prepared.compile_evaluation(), prepared.compile_init()
        if dump_hlo:
            dump_hlo.write_text(step.text)
        _hold_to_contract(prepared, step)
        state = init() if saved.latest() is None else saved.restore(prepared.placement.structs)
        loop = Loop(
            step, evaluate, train_data, held_out, records, saved, run.model_dump(mode="json"), run.num_steps,
            run.log_every, run.eval_every, run.checkpoint_every, _mfu(prepared), profile,
        )  # fmt: skip
        return loop.fit(state)


def _hold_to_contract(prepared: Prepared, step: Step) -> None:
    """As `Prepared.inspect`; but a program that cannot be read stops only a run that expects something of it."""
    try:
        prepared.inspect(step)
    except ProgramError as error:
        if prepared.run.expects:
            raise
        warnings.warn(f"the step could not be held to its closed form: {error}", ContractWarning, stacklevel=2)


def _mfu(prepared: Prepared) -> Callable[[float], float] | None:
    """tokens/s -> model FLOPs utilization, where the chip's speed is known."""
    chip, model = chip_of(jax.devices()[0]), prepared.run.model
    if chip is None:
        return None
    unused = {"positions"} if model.tied else {"positions", "table"}
    params = sum(spec.size for path, spec in flatten_with_paths(prepared.specs).items() if path not in unused)
    attention = model.num_heads * model.head_size
    flops = flops_per_token(params, model.num_layers, prepared.run.data.seq_len, attention)
    return lambda tokens_per_s: tokens_per_s * flops / (chip.flops * prepared.mesh.size)


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
            problems.add(
                "data.seq_len",
                f"{run.data.seq_len} is not divisible by the {shards} shards of {dim}",
                f"a multiple of {shards}",
            )
    if run.model.learned_positions and run.data.seq_len > run.model.max_seq_len:
        problems.add("data.seq_len", f"{run.data.seq_len} is more than model.max_seq_len = {run.model.max_seq_len}")
    if run.data.vocab_size > run.model.vocab_size:
        what = f"the data has {run.data.vocab_size} token ids, the model {run.model.vocab_size}"
        problems.add("model.vocab_size", what, f"model.vocab_size={run.data.vocab_size}")
    run.optim.schedule.check(run.num_steps, problems)
    problems.raise_any(ConfigError, "the parts of this config do not fit each other:")


def _step_key(seed: int, step: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), step)
