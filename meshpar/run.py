"""The root of a config, and the one place where everything meets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import optax
import pydantic
from flax import nnx
from jax.sharding import Mesh

from meshpar import config, imports
from meshpar.checkpoint.checkpoints import About, Checkpoints, checkpoints
from meshpar.checkpoint.kept import Kept
from meshpar.checkpoint.saved import FOLDER, Saved, find
from meshpar.checkpoint.selection import EVERYTHING
from meshpar.collectives.reduction import Reduce
from meshpar.config import Config
from meshpar.errors import (
    ConfigError,
    ContractError,
    ContractWarning,
    MeshparError,
    Problems,
    ProgramError,
    ScheduleError,
)
from meshpar.imported import imported
from meshpar.inspection import inspect as inspection
from meshpar.inspection.contract import Contract, beyond
from meshpar.inspection.inspect import Inspection, axes_name
from meshpar.inspection.planned import planned_by
from meshpar.inspection.report import Report, report
from meshpar.io.huggingface import open_pretrained
from meshpar.mesh import process
from meshpar.mesh.hardware import chip_of
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Import, Model
from meshpar.nn.describe import describe, functional
from meshpar.nn.lora import LoRA, is_lora
from meshpar.nn.staged import parts
from meshpar.nn.transformer import Decoder, Transformer
from meshpar.parallel.pipeline.cut import cut_layers
from meshpar.parallel.pipeline.execute import Pipeline, num_permutes
from meshpar.parallel.pipeline.schedule import Pipeline as Schedule
from meshpar.parallel.pipeline.simulate import simulate as simulate_schedule
from meshpar.parallel.traffic import Activations, Stages, Traffic, Widths, step_traffic, teacher_traffic
from meshpar.plan import targets
from meshpar.plan.fit import Judgement, compile_for, judge
from meshpar.plan.memory import ModelStates, model_states
from meshpar.pretrained import PretrainedBeginning
from meshpar.sharding.constrain import Lowering
from meshpar.sharding.overlap import FullySharded, Overlap, TensorParallel
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.begin import Beginning
from meshpar.train.data import Data
from meshpar.train.data.packing import ARRAYS
from meshpar.train.ema import averaged, with_ema
from meshpar.train.evaluate import Callback
from meshpar.train.freeze import Freeze, for_good, frozen_until
from meshpar.train.frozen import without
from meshpar.train.gradients import STALE
from meshpar.train.loggers import Logger, TensorBoard
from meshpar.train.loop import Loop
from meshpar.train.loss import TEACHER, Criterion, Distill, next_token_loss, summed_cross_entropy
from meshpar.train.master import with_master
from meshpar.train.metrics import flops_per_token, recorder
from meshpar.train.optim import Optimizer
from meshpar.train.state import TrainState
from meshpar.train.step import Step, Update
from meshpar.train.stopping import EarlyStopping
from meshpar.train.teacher import Teacher
from meshpar.train.training import Training, step_key
from meshpar.tree import flatten_with_paths

Paths = tuple[str, ...]
Positive = Annotated[int, pydantic.Field(gt=0)]
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

    def widths(self, least: int = 1) -> Widths:
        """Bytes of an element in each of them, `least` at least."""
        params, compute = np.dtype(self.params).itemsize, np.dtype(self.compute).itemsize
        sums = max(compute, 4)
        gradients = np.dtype(self.gradients).itemsize if self.gradients else sums
        return Widths(*(max(width, least) for width in (params, compute, gradients, sums)), declared=gradients)


class Init(Config):
    """From where the first parameters are taken, a checkpoint or a folder; what is not taken is drawn."""

    from_checkpoint: Path | None = None
    """A checkpoint, or the folder of a run, of which the last is meant."""
    take: Paths = ("params.**",)
    """Globs of paths of the train state."""
    leave: Paths = ()
    """Globs of what is not taken, though `take` matches it: a new head, `params.head.**`."""
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
    loss: Criterion = Criterion()
    """What is minimized."""
    data: Data
    optim: Optimizer
    adapt: LoRA | None = None
    """Trains a little beside the model, and freezes the model."""
    distill: Distill | None = None
    """A teacher to learn from."""
    freeze: tuple[Freeze, ...] = ()
    """Parameters that keep their values: globs, or `{paths: [...], until: 100}`."""
    mesh: MeshLayout = MeshLayout()
    rules: AxisRules = AxisRules(preset=("replicated",))
    lowering: Literal["manual", "auto"] = "manual"
    """`manual`: one shard_map with meshpar's own communication. `auto`: GSPMD, where XLA chooses it."""
    tensor: TensorParallel = TensorParallel()
    fsdp: FullySharded = FullySharded()
    precision: Precision = Precision()
    reduce: Reduce | None = None
    """How the manual lowering sums gradients over devices. Default: XLA's own collectives."""
    num_steps: Positive
    num_microbatches: Positive = 1
    """A batch is computed in so many parts, one after the other; gradients are reduced once."""
    pipeline: Schedule | None = None
    """How each of these parts goes through the stages of axis pipe: `{kind: 1f1b, num_microbatches: 16}`."""
    expects: Contract | None = None
    """What the compiled step may send and hold; it is refused if it goes beyond."""
    seed: Annotated[int, pydantic.Field(ge=0)] = 0
    run_dir: Path
    """Where metrics and checkpoints go. A run that finds a checkpoint there goes on from it."""
    log_every: Positive = 10
    eval_every: Positive | None = None
    """Steps between evaluations on held-out data; default: only at the end."""
    init: Init | None = None
    """From where the first parameters are taken; default: they are drawn."""
    checkpoints: Kept = Kept()
    """How often, and which stay."""
    early_stopping: EarlyStopping | None = None
    """When to end before `num_steps`."""
    loggers: tuple[Logger, ...] = (TensorBoard(),)
    """Who gets the records beside `run_dir/metrics.jsonl`: tensorboard, wandb, mlflow."""

    @pydantic.model_validator(mode="after")
    def _evaluates_before_it_stops(self) -> Run:
        if self.early_stopping and not self.eval_every:
            raise ValueError("early_stopping looks at evaluations: set eval_every, the steps between them")
        return self


@dataclass(frozen=True, kw_only=True)
class Prepared(Training):
    """A run's training, and what the run's presets say of its step."""

    run: Run
    taught_by: Prepared | None = None
    """The training of the teacher, on this mesh."""

    @cached_property
    def closed_form(self) -> Traffic | None:
        """Bytes that a device sends in a step, by axes; None of an imported model, of an optimizer that mixes elements,
        if no layer learns, and of a teacher whose logits are sharded in another way."""
        run, shape = self.run, self.mesh.shape
        if self.pipeline and self.pipeline.schedule.is_stale and self.how.rules.zero_stage == 1:
            return None  # the weights before the last update lie in shards, and are gathered too
        layers_learn = any("layers" in one.spec.dims for one in jax.tree.leaves(self.placement.trained))
        if not run.optim.elementwise or isinstance(run.model, Import) or not layers_learn:
            return None
        rows = run.data.batch_size // math.prod(shape[axis] for axis in self.how.axes("batch"))
        model, tokens = run.model, rows * run.data.seq_len
        layers, stages = self._in_stages(tokens) if self.pipeline else (model.num_layers, None)
        activations = Activations(layers, tokens, model.width, model.remat != "none", model.remat == "full")
        # XLA's CPU compiler widens what travels in 16 bits.
        widths = run.precision.widths(least=4 if self._on_cpu else 2)
        sent = step_traffic(
            self.placement.sharded, self.how, widths, activations, self.how.num_microbatches, self._on_cpu, stages,
            self.placement.frozen,
        )  # fmt: skip
        if not self.taught_by:
            return sent
        assert self.teacher
        if not self.teacher.is_aligned:
            return None
        model = _decoder(self.taught_by.run)
        activations = Activations(model.num_layers, rows * run.data.seq_len, model.width, False, False)
        more = teacher_traffic(self.taught_by.placement.sharded, self.teacher.how, widths, activations)
        return {axes: sent.get(axes, Fraction(0)) + more.get(axes, Fraction(0)) for axes in sent | more}

    def _in_stages(self, tokens: int) -> tuple[int, Stages]:
        """Layers that a stage computes, and what the pipeline sends."""
        assert self.pipeline is not None
        (ticks, cut), passes = self.pipeline.plan(self.how), self.run.num_microbatches
        num_stages, moves = len(cut.layers), self.pipeline.moves(self.how)
        permutes, moved = num_permutes(num_stages), moves.num_permutes * moves.unit if moves else 0
        per_microbatch = tokens // self.how.num_microbatches
        shared = "table" if not isinstance(self.run.model, Import) and self.run.model.tied else None
        return cut.layers[0].size, Stages(ticks.num_ticks * passes, permutes, passes, moved, per_microbatch, shared)

    @cached_property
    def states(self) -> ModelStates:
        """Bytes that a device holds of parameters, gradients and optimizer state, in the manual lowering."""
        placed = self.placement
        sharded, stored, optimizer = map(jax.tree.leaves, (placed.sharded, placed.params, placed.opt_state))
        frozen = [path in placed.frozen for path in flatten_with_paths(placed.sharded)]
        return model_states(sharded, stored, optimizer, self.how, self.run.precision.widths(), frozen)

    @property
    def about(self) -> About:
        """What a checkpoint says of the run."""
        run = self.run
        return About(run.model_dump(mode="json"), self.placement.dims, run.seed, run.data.batch_size)

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
        passes = getattr(self.run.model, "num_layers", 1) * self.how.num_microbatches
        if self.run.expects:
            broken = self.run.expects.check(told, self.closed_form, passes)
            broken.raise_any(ContractError, "the compiled step breaks its contract:")
        if self.how.manual and self.closed_form is not None and (more := beyond(told, self.closed_form)):
            text = "\n".join(["the step sends more than the closed form of its presets:", *map(str, more.found)])
            warnings.warn(text, ContractWarning, stacklevel=2)
        form = {axes_name(axes): round(bytes_) for axes, bytes_ in (self.closed_form or {}).items()}
        return replace(told, closed_form=form or None, model_states=asdict(self.states) if self.how.manual else None)


def prepare(run: Run, mesh: AnyMesh | None = None) -> Prepared:
    """Checks what can be checked before anything is compiled.

    Args:
      mesh: default: the run's own, on the devices that are here.

    Raises:
      ConfigError, MeshError, ShardingError: with all problems of their kind.
    """
    mesh = run.mesh.build() if mesh is None else mesh
    _check(run, mesh)
    prepared = _prepared(run, mesh)
    _ = prepared.placement
    return prepared


def _prepared(run: Run, mesh: AnyMesh) -> Prepared:
    model = _imported(run) if isinstance(run.model, Import) else _built(run, run.model)
    dtype, shape = np.dtype(run.precision.params), (run.data.batch_size, run.data.seq_len)
    specs = jax.tree.map(lambda spec: replace(spec, dtype=dtype), model.pop("specs"))
    frozen = _frozen(run, specs)
    never = for_good(frozen)
    tx = _optimizer(run, jax.tree.map(lambda spec: spec.dims, without(specs, never)), frozen and without(frozen, never))
    if run.pipeline and run.pipeline.is_stale:
        init = model["init"]
        model |= {"carried": {STALE: specs}, "init_carried": lambda key: {STALE: init(key)}}
    master, sums = run.precision.master, run.precision.gradients
    taught_by = _teacher(run, run.distill, mesh) if run.distill else None
    batch_specs = {name: ArraySpec(shape, np.dtype("int32"), ("batch", "seq")) for name in ARRAYS}
    prepared = Prepared(
        **model,
        run=run,
        specs=specs,
        frozen=frozen,
        update=Update(tx, run.optim.clip_norm, run.optim.learning_rate(run.num_steps), master and np.dtype(master)),
        batch_specs=batch_specs,
        mesh=mesh,
        rules=run.rules,
        manual=run.lowering == "manual",
        dtype=np.dtype(run.precision.compute),
        sums=sums and np.dtype(sums),
        seed=run.seed,
        num_microbatches=run.num_microbatches,
        taught_by=taught_by,
        reduce=run.reduce,
        slow=tuple(axis for axis, size in run.mesh.dcn.sizes.items() if size > 1) if run.mesh.dcn else (),
        overlap=Overlap(run.tensor.overlap, run.fsdp.overlap),
    )
    return replace(prepared, teacher=_teaching(taught_by, prepared)) if taught_by else prepared


def _frozen(run: Run, specs: Any) -> Any:
    """How many steps each parameter is frozen; None if none is."""
    beside = tuple(path for path in flatten_with_paths(specs) if not is_lora(path))
    freeze = (*run.freeze, *([Freeze(paths=beside)] if run.adapt else []))
    return frozen_until(freeze, specs, run.num_steps) if freeze else None


def _optimizer(run: Run, dims: Any, frozen: Any) -> optax.GradientTransformation:
    """Of what is trained, at once or from a step on."""
    tx = run.optim.build(run.num_steps, dims, frozen if any(jax.tree.leaves(frozen)) else None)
    tx = with_master(tx, np.dtype(run.precision.master)) if run.precision.master else tx
    return with_ema(tx, run.optim.ema) if run.optim.ema else tx


def _teacher(run: Run, distill: Distill, mesh: AnyMesh) -> Prepared:
    """The run that is kept in the teacher's directory, as prepared on this mesh under the rules of a teacher.

    Raises:
      CheckpointError: there is none.
      ConfigError: it does not fit this run, or this mesh.
    """
    kept, ours = find(distill.teacher).meta["config"], {"data": run.data, "lowering": run.lowering}
    where = f"distill: the teacher in {distill.teacher}"
    try:
        teacher = Run.model_validate(kept | {"distill": None, "num_microbatches": 1, "freeze": (), "init": None})
        its, mine = _decoder(teacher), _decoder(run)
        prepared = prepare(teacher.model_copy(update=ours | {"rules": distill.rules or run.rules}), mesh)
    except (pydantic.ValidationError, MeshparError) as error:
        raise ConfigError(f"{where} does not fit:\n{error}") from None
    if (its.vocab_size, its.padded_vocab) != (mine.vocab_size, mine.padded_vocab):
        what = f"has {its.vocab_size} token ids in {its.padded_vocab} rows of its vocabulary"
        raise ConfigError(f"{where} {what}, this model {mine.vocab_size} in {mine.padded_vocab}")
    return prepared


def _decoder(run: Run) -> Decoder:
    if isinstance(run.model, Import):
        raise ConfigError(f"{run.model.target} is imported; teachers and their students are llama and gpt")
    return run.model


def _teaching(taught_by: Prepared, student: Prepared) -> Teacher:
    model, rules = _decoder(taught_by.run), taught_by.rules
    apply = functional(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))
    return Teacher(apply, taught_by.specs, rules, student.how, student.batch_specs, model.padded_vocab)


def _built(run: Run, model: Decoder) -> dict[str, Any]:
    """What a model of meshpar's own is to the training."""

    def build(rngs: nnx.Rngs) -> Transformer:
        built = model.build(rngs)
        if run.adapt:
            run.adapt.adapt(built, rngs)
        return built

    abstract = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    return {
        "specs": describe(abstract),
        "init": lambda key: nnx.to_pure_dict(nnx.state(build(nnx.Rngs(key)), nnx.Param)),
        "loss": run.loss.build(functional(abstract), model.vocab_size, run.distill),
        "evaluation": next_token_loss(functional(abstract), model.vocab_size),
        "key": partial(step_key, run.seed) if model.dropout else None,
        "pipeline": run.pipeline and _pipeline(run.pipeline, abstract),
    }


def _pipeline(schedule: Schedule, model: Transformer) -> Pipeline:
    return Pipeline(parts(model, partial(summed_cross_entropy, vocab_size=model.model.vocab_size)), schedule)


def _imported(run: Run) -> dict[str, Any]:
    """What the user's model is to the training; it is read anew, for nothing of it stands in the config."""
    assert isinstance(run.model, Import)
    if run.adapt:
        raise ConfigError("adapt: LoRA adapts the projections of meshpar's own models, not of an imported one")
    found = imported(run.model, run.loss, run.data.seq_len, run.seed)
    if found.vocab_size and run.data.vocab_size > found.vocab_size:
        what = f"the data has {run.data.vocab_size} token ids, the logits of {run.model.target} are of"
        raise ConfigError(f"{what} {found.vocab_size}")
    return {
        "specs": found.specs,
        "init": found.init,
        "loss": found.loss,
        "evaluation": found.evaluation,
        "carried": found.carried,
        "init_carried": found.init_carried,
        "key": partial(step_key, run.seed) if found.draws else None,
    }


def load(path: Path, overrides: Sequence[str] = ()) -> Run:
    """Reads a config file, with `key=value` overrides.

    Raises:
      ConfigError: with all problems of the config; or it names code that it may not import, see `meshpar.imports`.
    """
    loaded = config.load(Run, path, overrides)
    targets = {("model.target",): getattr(loaded.model, "target", None), ("loss", "loss.target"): loaded.loss.target}
    for keys, target in targets.items():
        if target:
            is_on_command_line = any(f"{key}={target}" in overrides for key in keys)
            imports.permit(target, None if is_on_command_line else path)
    return loaded


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
    prepared = prepare(run, run.mesh.abstract(num_devices))
    told = report(prepared.placement.params, asdict(prepared.states))
    return told if path is None else told.only(path)


def inspect(run: Run, target: str | None = None, num_devices: int | None = None) -> Inspection | Judgement:
    """What the run's step communicates, computes and holds, from its compiled program; nothing is allocated.

    Args:
      target: a machine that is not here, such as `v5e:16x16`; the step is compiled for it, and judged.
      num_devices: compile for the first so many of the devices that are here; default: all.

    Raises:
      ContractError: the step goes beyond what the run expects.
      MeshError: there is no such machine, its compiler is not installed, or the step is too big to compile.
    """
    if target is None:
        prepared = prepare(run, run.mesh.build(jax.devices()[:num_devices]))
        return prepared.inspect(prepared.compile_step())
    process.compile_only()
    machine = targets.parse(target)
    prepared = prepare(run, run.mesh.build(machine.devices()))
    return judge(prepared.inspect(compile_for(machine, prepared.compile_step)), machine, prepared.mesh)


def fit(
    run: Run,
    *,
    json: bool = False,
    profile: Path | None = None,
    dump_hlo: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainState:
    """Trains, or goes on from the last checkpoint in the run directory.

    Args:
      json: print records as JSON instead of a progress bar.
      profile: a folder for a trace of a few steps.
      dump_hlo: a file for the compiled step's text.
      callbacks: (state, step) -> name -> number: what else each evaluation records.
    """
    prepared = prepare(run)
    saving = checkpoints(run.run_dir / FOLDER, run.checkpoints, prepared.about)
    with recorder(run.run_dir, run.num_steps, json, run.loggers) as records, saving as saved:
        beginning = _beginning(prepared, saved)
        train_data, held_out = run.data.datasets(run.seed)
        step, evaluate = prepared.compile_step(), prepared.compile_evaluation()
        if dump_hlo:
            dump_hlo.write_text(step.text)
        _hold_to_contract(prepared, step)
        if prepared.taught_by and run.distill:
            step = replace(step, given={TEACHER: _taught(prepared.taught_by, run.distill, step.given[TEACHER])})
        state = beginning.state() if beginning else prepared.compile_init()()
        if beginning:
            records.record("restored", int(state.step), **beginning.record())
        loop = Loop(
            step, evaluate, train_data, held_out, records, saved, run.model_dump(mode="json"), run.num_steps,
            run.log_every, run.eval_every, _mfu(prepared), profile,
            run.early_stopping, callbacks,
        )  # fmt: skip
        return loop.fit(state)


def _taught(teacher: Prepared, distill: Distill, structs: Any) -> Any:
    """The parameters that a teacher is evaluated with, and nothing else of its checkpoint."""
    take = ["opt_state.ema.**"] if teacher.run.optim.ema else ["params.**"]
    params = averaged(find(distill.teacher).restore(teacher.placement.structs, take))
    return jax.tree.map(lambda x, struct: jax.device_put(x.astype(struct.dtype), struct.sharding), params, structs)


def _beginning(prepared: Prepared, saved: Checkpoints) -> Beginning | PretrainedBeginning | None:
    """A run goes on from its own last checkpoint, if there is one.

    Raises:
      CheckpointError, ConfigError: it does not fit, or what is to be taken of another does not.
    """
    init, last = prepared.run.init, saved.latest()
    if last is not None:
        source, globs = Saved(saved.directory / str(last)), (EVERYTHING, ())
    elif init is not None and init.from_hf is not None:
        pretrained = open_pretrained(init.from_hf)
        pretrained.check(prepared.run.model)
        return PretrainedBeginning(prepared, pretrained)
    elif init is not None and init.from_checkpoint is not None:
        source, globs = find(init.from_checkpoint), (init.take, init.leave)
    else:
        return None
    beginning = Beginning(prepared, source, *globs, saved.about.config)
    _ = beginning.selection
    return beginning


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
    if chip is None or isinstance(model, Import):
        return None
    unused = {"positions"} if model.tied else {"positions", "table"}
    params = sum(spec.size for path, spec in flatten_with_paths(prepared.specs).items() if path not in unused)
    attention = model.num_heads * model.head_size
    flops = flops_per_token(params, model.num_layers, prepared.run.data.seq_len, attention)
    return lambda tokens_per_s: tokens_per_s * flops / (chip.flops * prepared.mesh.size)


def _check(run: Run, mesh: AnyMesh) -> None:
    how, problems = Lowering(mesh, run.rules, run.lowering == "manual"), Problems()
    num_microbatches = run.num_microbatches * (run.pipeline.num_microbatches if run.pipeline else 1)
    rows = math.prod(mesh.shape[axis] for axis in how.axes("batch")) * num_microbatches
    if run.data.batch_size % rows:
        what = f"{run.data.batch_size} rows cannot be cut into {rows} equal parts"
        parts = f"({rows // num_microbatches} devices x {num_microbatches} microbatches)"
        problems.add("data.batch_size", f"{what} {parts}", f"a multiple of {rows}")
    for dim in ("seq", "norm_seq"):
        shards = math.prod(mesh.shape[axis] for axis in how.axes(dim))
        if run.data.seq_len % shards:
            problems.add(
                "data.seq_len",
                f"{run.data.seq_len} is not divisible by the {shards} shards of {dim}",
                f"a multiple of {shards}",
            )
    if isinstance(run.model, Import):
        if how.manual:
            problems.add("lowering", "a model that is imported is lowered by GSPMD", "lowering=auto")
    else:
        _check_decoder(run, run.model, problems)
    Overlap(run.tensor.overlap, run.fsdp.overlap).check(run.rules, how.manual, problems)
    _check_pipeline(run, how, problems)
    _check_kept(run, problems)
    if run.reduce and run.lowering == "auto":
        problems.add("reduce", "under lowering: auto, XLA reduces gradients as it chooses", "lowering: manual")
    if (run.adapt or run.freeze) and (run.tensor.overlap, run.fsdp.overlap) != ("none", "none"):
        key = "adapt" if run.adapt else "freeze"
        problems.add(key, "is not proven beside a collective matmul, and so not allowed", f"no {key}, or no overlap")
    if run.reduce and run.fsdp.overlap != "none":
        what = "a kernel that is gathered in chunks has its gradient scattered in chunks, by no declared reduction"
        problems.add("reduce", what, "fsdp.overlap=none, or no reduce")
    run.optim.schedule.check(run.num_steps, problems)
    problems.raise_any(ConfigError, "the parts of this config do not fit each other:")


def _check_pipeline(run: Run, how: Lowering, problems: Problems) -> None:
    num_stages = math.prod(how.mesh.shape[axis] for axis in how.axes("stage"))
    if run.pipeline is None:
        if how.manual and num_stages > 1:
            what = f"the rules cut the model into {num_stages} stages, and nothing says in which order they work"
            problems.add("pipeline", what, "pipeline={kind: 1f1b, num_microbatches: 8}, or no preset pipeline")
        return
    if not how.manual:
        problems.add("pipeline", "GSPMD knows no pipeline", "lowering=manual, or no pipeline")
    elif not isinstance(run.model, Import):
        before = len(problems)
        run.pipeline.check(num_stages, problems)
        try:
            cut_layers(run.pipeline, num_stages, run.model.num_layers)
            if len(problems) == before:
                simulate_schedule(run.pipeline, num_stages)
        except ScheduleError as error:
            problems.add("pipeline", str(error))
    beside = {
        "loss": run.loss != Criterion(),
        "distill": run.distill is not None,
        "freeze": bool(run.freeze),
        "adapt": run.adapt is not None,
        "reduce": run.reduce is not None,
        "tensor.overlap": run.tensor.overlap != "none",
        "fsdp.overlap": run.fsdp.overlap != "none",
    }
    for key in (key for key, is_set in beside.items() if is_set):
        problems.add(key, "is not proven beside a pipeline, and so not allowed", f"no {key}, or no pipeline")


def _check_kept(run: Run, problems: Problems) -> None:
    kept = run.checkpoints
    if kept.keep_best and kept.every and kept.every % (run.eval_every or run.num_steps):
        when = f"every {run.eval_every} steps" if run.eval_every else "at the end"
        what = f"a checkpoint every {kept.every} steps needs an evaluation to be judged by, and there is one {when}"
        problems.add("checkpoints.keep_best", what, f"eval_every={kept.every}")


def _check_decoder(run: Run, model: Decoder, problems: Problems) -> None:
    if run.loss.target:
        problems.add("loss", "is of a model that is imported", "model.kind=import, or no loss")
    if model.learned_positions and run.data.seq_len > model.max_seq_len:
        problems.add("data.seq_len", f"{run.data.seq_len} is more than model.max_seq_len = {model.max_seq_len}")
    if run.data.vocab_size > model.vocab_size:
        what = f"the data has {run.data.vocab_size} token ids, the model {model.vocab_size}"
        problems.add("model.vocab_size", what, f"model.vocab_size={run.data.vocab_size}")
