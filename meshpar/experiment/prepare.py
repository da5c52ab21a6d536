"""A run, worked out as far as it goes without a device: the one place where everything meets."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from meshpar.checkpoint.checkpoints import CheckpointMetadata
from meshpar.checkpoint.saved import find
from meshpar.cost.flops import flops, traced_products
from meshpar.cost.memory import ModelStates, model_states
from meshpar.cost.traced import Collective, Traffic, gathers, traced_collectives, traffic
from meshpar.errors import ConfigError, ContractError, ContractWarning, MeshparError, Problems
from meshpar.experiment.config import Run
from meshpar.experiment.validate import check, task_of
from meshpar.inspection import inspect as inspection
from meshpar.inspection.contract import beyond
from meshpar.inspection.findings.planned import planned_by
from meshpar.inspection.inspect import Inspection, axes_name
from meshpar.models.contract import Vocabulary
from meshpar.nn.lora import is_lora
from meshpar.nn.supported import check_supported
from meshpar.optim.ema import with_ema
from meshpar.optim.freeze import Freeze, for_good, frozen_until, without
from meshpar.optim.master import with_master
from meshpar.sharding.resolve import AnyMesh
from meshpar.train.gradients import STALE
from meshpar.train.loss import Distill
from meshpar.train.step import Step, Update
from meshpar.train.teacher import Teacher
from meshpar.train.training import Training, step_key
from meshpar.tree import flatten_with_paths


@dataclass(frozen=True, kw_only=True)
class Prepared(Training):
    """A run's training, and what its traced step says of bytes and operations."""

    run: Run
    taught_by: Prepared | None = None
    """The training of the teacher, on this mesh."""
    abstract_platform: str = "cpu"
    """What the step is compiled for, where the mesh is abstract."""

    @cached_property
    def traced_bytes(self) -> Traffic | None:
        """Bytes that a device sends in a step of the manual lowering, by axes, as the traced step says.

        None where GSPMD decides what is sent: of an imported model, of an optimizer that mixes elements, of a teacher
        whose logits are sharded in another way, and where 2BW meets ZeRO-1: stale weights are gathered whole. Under
        GSPMD also None where the manual layers are not written for the rules.
        """
        return traffic(self.collectives(self._traced_step)) if self._says_all else None

    @cached_property
    def traced_flops(self) -> dict[str, Fraction] | None:
        """Operations of a device's products in a step of the manual lowering, by kind, as the traced step says.

        Of a pipeline, those of a stage that has both ends of the model. None where `traced_bytes` are.
        """
        return flops(traced_products(self._traced_step), self.mesh.size) if self._says_all else None

    @cached_property
    def _traced_step(self) -> ClosedJaxpr:
        return jax.make_jaxpr(self.on(manual=True).step)(self.placement.structs, self.batch | self.given)

    def collectives(self, step: ClosedJaxpr) -> list[Collective]:
        """Those of a traced step of the manual lowering, ZeRO-1's gathers of updated parameters included."""
        float_bytes = 4 if self._on_cpu else 1  # XLA:CPU widens 16-bit floats on their way
        updated = jax.tree.leaves(self.placement.trained)
        stored = jax.tree.leaves(without(self.placement.params, self.placement.frozen))
        return traced_collectives(step, float_bytes) + gathers(updated, stored, float_bytes)

    @property
    def _says_all(self) -> bool:
        """Whether a traced step of the manual lowering names all that a device sends."""
        if not self.run.optim.elementwise or not self.run.model.manual_lowering():
            return False
        if self.pipeline and self.pipeline.schedule.is_stale and self.rules.zero_stage == 1:
            return False
        if self.teacher and not self.teacher.is_aligned:
            return False
        problems = Problems()
        check_supported(self.run.model.sharding, replace(self.ctx, manual=True), problems)
        return not problems.found

    @cached_property
    def states(self) -> ModelStates:
        """Bytes that a device holds of parameters, gradients and optimizer state, in the manual lowering."""
        placed = self.placement
        sharded, stored, optimizer = map(jax.tree.leaves, (placed.sharded, placed.params, placed.opt_state))
        frozen = [path in placed.frozen for path in flatten_with_paths(placed.sharded)]
        return model_states(sharded, stored, optimizer, self.ctx, self.run.precision.widths, frozen)

    @property
    def about(self) -> CheckpointMetadata:
        """What a checkpoint says of the run."""
        run = self.run
        return CheckpointMetadata(run.model_dump(mode="json"), self.placement.dims, run.seed, run.data.batch_size)

    @property
    def _on_cpu(self) -> bool:
        if isinstance(self.mesh, Mesh):
            return self.mesh.devices.flat[0].platform == "cpu"
        return self.abstract_platform == "cpu"

    def inspect(self, step: Step) -> Inspection:
        """Reads a compiled step, and holds it to the run's contract.

        Raises:
          ContractError: lists all that goes beyond `contract`.

        Warns:
          ContractWarning: the compiled step sends more than the traced one says.
        """
        meant = planned_by(self.ctx, self.placement.sharded, self.placement.opt_state)
        told = inspection.inspect(step.compiled, self.mesh, warnings=step.program.warnings, planned=meant)
        layers = self.run.model.layer_stack()
        passes = (layers.num_layers if layers else 1) * self.ctx.num_passes
        if self.ctx.manual:
            states = asdict(self.states)
            said = traffic(self.collectives(step.program.jaxpr)) if self._says_all else None
        else:
            states = None
            said = self.traced_bytes
        if self.run.contract:
            broken = self.run.contract.check(told, said, passes)
            broken.raise_any(ContractError, "the compiled step breaks its contract:")
        if states and said is not None and (more := beyond(told, said)):
            text = "\n".join(["the compiled step sends more than the traced step says:", *map(str, more.found)])
            warnings.warn(text, ContractWarning, stacklevel=2)
        traced = {axes_name(axes): round(num_bytes) for axes, num_bytes in (said or {}).items()}
        return replace(told, traced=traced or None, model_states=states)


def prepare(run: Run, mesh: AnyMesh | None = None, abstract_platform: str = "cpu") -> Prepared:
    """Checks what can be checked before anything is compiled.

    Args:
      mesh: default: the run's own, on the devices that are here.
      abstract_platform: what the step is compiled for, if the mesh is abstract: `traced_bytes` depend on it. No device
        is looked for then.

    Raises:
      ConfigError, MeshError, ShardingError: with all problems of their kind.
    """
    mesh = run.mesh.build() if mesh is None else mesh
    check(run, mesh)
    prepared = replace(_prepared(run, mesh), abstract_platform=abstract_platform)
    _ = prepared.placement
    return prepared


def _prepared(run: Run, mesh: AnyMesh) -> Prepared:
    model, dtype = run.model.program(task_of(run)), np.dtype(run.precision.params)
    specs = jax.tree.map(lambda spec: replace(spec, dtype=dtype), model.specs)
    frozen = _frozen(run, specs)
    never = for_good(frozen)
    tx = _optimizer(run, jax.tree.map(lambda spec: spec.dims, without(specs, never)), frozen and without(frozen, never))
    if run.parallel.pipeline and run.parallel.pipeline.is_stale:
        init = model.init
        model = replace(model, carried={STALE: specs}, init_carried=lambda key: {STALE: init(key)})
    master = run.precision.master
    ctx = replace(run.context(mesh), rules=model.rules, activation_dims=model.activation_dims)
    taught_by = _teacher(run, run.distill, mesh) if run.distill else None
    prepared = Prepared(
        run=run,
        specs=specs,
        init=model.init,
        loss=model.loss,
        evaluation=model.evaluation,
        carried=model.carried,
        init_carried=model.init_carried,
        key=partial(step_key, run.seed) if model.uses_rng else None,
        stages=model.parts,
        frozen=frozen,
        update=Update(tx, run.optim.clip_norm, run.optim.learning_rate(run.num_steps), master and np.dtype(master)),
        batch_specs=run.model.batch_specs(run.data.batch_size, run.data.seq_len),
        ctx=ctx,
        seed=run.seed,
        taught_by=taught_by,
    )
    return replace(prepared, teacher=_teaching(taught_by, prepared)) if taught_by else prepared


def _frozen(run: Run, specs: Any) -> Any:
    """How many steps each parameter is frozen; None if none is."""
    beside = tuple(path for path in flatten_with_paths(specs) if not is_lora(path))
    freeze = (*run.freeze, *([Freeze(paths=beside)] if run.lora else []))
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
    kept, ours = find(distill.teacher, include=()).meta["config"], {"data": run.data, "lowering": run.lowering}
    where = f"distill: the teacher in {distill.teacher}"
    try:
        teacher = Run(**kept | {"distill": None, "num_microbatches": 1, "freeze": (), "init": None})
        its, mine = _vocabulary(teacher), _vocabulary(run)
        prepared = prepare(teacher.model_copy(update=ours | {"rules": distill.rules or run.rules}), mesh)
    except MeshparError as error:
        raise ConfigError(f"{where} does not fit:\n{error}") from None
    if its != mine:
        what = f"has {its.size} token ids in {its.padded} rows of its vocabulary"
        raise ConfigError(f"{where} {what}, this model {mine.size} in {mine.padded}")
    return prepared


def _vocabulary(run: Run) -> Vocabulary:
    if not (found := run.model.vocabulary()):
        raise ConfigError(f"{found.because}; teachers and their students are llama and gpt")
    return found


def _teaching(taught_by: Prepared, student: Prepared) -> Teacher:
    forward = taught_by.run.model.program(task_of(taught_by.run)).forward
    assert forward is not None, "a model with a vocabulary gives logits"
    padded = _vocabulary(taught_by.run).padded

    def apply(*args: Any) -> jax.Array:
        return forward(*args).logits

    return Teacher(apply, taught_by.specs, taught_by.rules, student.ctx, student.batch_specs, padded)
