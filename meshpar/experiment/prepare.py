"""Prepares a run: builds its model, resolves its placements, and traces its step, all without devices."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from meshpar.checkpoint.checkpoints import CheckpointMetadata
from meshpar.checkpoint.saved import find
from meshpar.cost.flops import flops, traced_products
from meshpar.cost.memory import ModelStates, model_states
from meshpar.cost.traced import Collective, Traffic, gathers, traced_collectives, traffic
from meshpar.errors import ConfigError, ContractError, ContractWarning, MeshparError, Problems
from meshpar.experiment.config import Run
from meshpar.experiment.validate import check, options_of, task_of
from meshpar.inspection import inspect as inspection
from meshpar.inspection.contract import beyond
from meshpar.inspection.findings.planned import planned_by
from meshpar.inspection.inspect import Inspection, axes_name
from meshpar.inspection.program.hlo import Collective as Sent
from meshpar.inspection.program.hlo import collectives_of, total_sent_bytes
from meshpar.interop.kinds import kinds_of
from meshpar.models.contract import ModelProgram
from meshpar.models.decoder import DecoderModel
from meshpar.nn.quantized_kernel import is_quantized
from meshpar.optim.base import Matrix
from meshpar.optim.freeze import for_good
from meshpar.parallel.checks import check_rules
from meshpar.parallel.local_updates import KEY
from meshpar.parallel.precision import stored_in
from meshpar.parallel.strategies import Parallel
from meshpar.sharding.resolve import AnyMesh, platform_of
from meshpar.sharding.spec import ArraySpec
from meshpar.train.error_feedback import SLICES
from meshpar.train.grpo import GRPO
from meshpar.train.local_step import LocalStep
from meshpar.train.loss import Distill
from meshpar.train.preferences import REFERENCE, OfAnswers
from meshpar.train.step import Step
from meshpar.train.teacher import Teacher, unstaged
from meshpar.train.training import Training, step_key
from meshpar.tree import flatten_with_paths, human_bytes


@dataclass(frozen=True, kw_only=True)
class Prepared(Training):
    """A run that was checked against a mesh: its placements, and the communication and FLOPs of its traced step."""

    run: Run
    kinds: Any
    """Tree of `Matrix` like the parameters: how the loss uses them."""
    taught_by: Prepared | None = None
    """The training of the teacher, on the same mesh."""
    bounds: Mapping[str, int] = field(default_factory=dict)
    """Array of labels -> the number of classes."""
    merged: Callable[[Any], Mapping[str, jax.Array]] | None = None
    """See `ModelProgram`."""

    @cached_property
    def traced_bytes(self) -> Traffic | None:
        """Bytes that a device sends in a step of the manual lowering, by axes, counted in the traced step.

        With local updates they include the bytes of the outer step, divided by the mean number of steps of a round.

        None where GSPMD decides what is sent: for an optimizer that mixes elements, pruning, a teacher whose logits are
        sharded differently, and 2BW with ZeRO-1, which gathers stale weights whole. With `lowering=auto`
        also None if the manual layers do not support the rules.
        """
        if not self._is_countable:
            return None
        return traffic(self.collectives(self._traced_step) + self.outer_collectives)

    @cached_property
    def outer_collectives(self) -> list[Collective]:
        """The collectives of the outer steps of a round, counted per inner step; none without local updates."""
        slices = self.on(manual=True).slices
        if slices is None or self.rounds is None:
            return []
        found = self._zero1_gathers()
        for traced in slices.trace_outer() + slices.trace_reductions():
            found += traced_collectives(traced.jaxpr, self._float_bytes)
        return [replace(one, times=one.times / self.rounds.mean_steps) for one in found]

    @cached_property
    def traced_flops(self) -> dict[str, Fraction] | None:
        """FLOPs of a device's products in a step of the manual lowering, by kind, counted in the traced step.

        A pipeline counts as a stage that has both ends of the model. None where `traced_bytes` is None.
        """
        return flops(traced_products(self._traced_step), self.mesh.size) if self._is_countable else None

    @property
    def countable_step(self) -> ClosedJaxpr | None:
        """The traced step of the manual lowering; None where `traced_bytes` is None."""
        return self._traced_step if self._is_countable else None

    @cached_property
    def gspmd_step(self) -> ClosedJaxpr:
        """The traced step of the `auto` lowering, which has whole arrays and no collectives."""
        training = self.on(manual=False)
        return jax.make_jaxpr(training.step)(training.placement.structs, self.batch | self.given)

    @cached_property
    def _traced_step(self) -> ClosedJaxpr:
        training = self.on(manual=True).on_prepared_states
        return jax.make_jaxpr(training.step)(training.placement.structs, self.batch | self.given)

    def collectives(self, step: ClosedJaxpr) -> list[Collective]:
        """The collectives of a traced manual step, with ZeRO-1's gathers of updated parameters."""
        return traced_collectives(step, self._float_bytes) + self._zero1_gathers()

    def _zero1_gathers(self) -> list[Collective]:
        return gathers(self.placement.updated, self._float_bytes)

    @property
    def _float_bytes(self) -> int:
        """The smallest size of a float that is sent: XLA:CPU sends 16-bit floats as 32-bit ones."""
        return 4 if (platform_of(self.mesh) or "cpu") == "cpu" else 1

    @property
    def _is_countable(self) -> bool:
        """Whether a traced step of the manual lowering contains everything that a device sends."""
        if not self.run.optim.elementwise or self.run.prune:
            return False
        if not all(one.is_countable(self.ctx) for one in self.strategies):
            return False
        problems = Problems()
        check_rules(replace(self.ctx, manual=True), problems)
        return not problems.found

    @cached_property
    def states(self) -> ModelStates:
        """Bytes that a device holds of parameters, gradients and optimizer state, in the manual lowering."""
        placed = self.placement
        own = placed.carried.get(SLICES, {})
        sharded = jax.tree.leaves(placed.sharded)
        stored = jax.tree.leaves((placed.params, own.get("params"), placed.carried.get(REFERENCE)))
        others = (own.get("opt_state"), own.get("rounding"), own.get("means"))
        optimizer = jax.tree.leaves((placed.opt_state, *others))
        frozen = [path in placed.frozen for path in flatten_with_paths(placed.sharded)]
        return model_states(sharded, stored, optimizer, self.ctx, self.run.precision.widths, frozen)

    @property
    def selected(self) -> dict[str, str]:
        """Config key -> the implementation that the key selects for the run's sizes on its mesh, as text."""
        found = self.run.model.selected(task_of(self.run), self.ctx, self.run.data.batch_size)
        if local := self.ctx.local:
            num = self.mesh.shape[local.axis]
            steps = f"{local.every} steps or more" if local.growth else f"{local.every} steps"
            what = f"{num} slices along {local.axis}; {local.outer.kind} after every {steps}"
            what += f" for each of {local.fragments} fragments" if local.fragments > 1 else ""
            what += f", {local.overlap_steps} steps late" if local.overlap_steps else ""
            found = found | {KEY: what + (f", from step {local.start} on" if local.start else "")}
        if reference := self._described_reference:
            found = found | {"loss": reference}
        return found | ({"parallel.pipeline": self.described_cut} if self.described_cut else {})

    @property
    def _described_reference(self) -> str | None:
        """The model that a loss of preferences compares with, as text; None for other losses."""
        if not isinstance(self.run.loss, OfAnswers) or not self.run.loss.has_reference:
            return None
        if REFERENCE not in self.placement.carried:
            return "the reference is the model without its LoRA: no second copy"
        placed = jax.tree.leaves(self.placement.carried[REFERENCE])
        size = human_bytes(sum(math.prod(p.local_shape) * p.spec.dtype.itemsize for p in placed))
        return f"the reference is a second copy of the first parameters: {size} a device"

    @property
    def updates(self) -> dict[str, str]:
        """Path -> what updates the parameter, and whether its weight decays, as text."""
        never = for_good(self.frozen)
        kinds = dict(zip(flatten_with_paths(self.specs), jax.tree.leaves(self.kinds), strict=True))
        found = {path: "frozen" if path in never else self.run.optim.describe(kind) for path, kind in kinds.items()}
        for path, rows in flatten_with_paths(self.frozen_rows or {}).items():
            if rows and path not in never:
                found[path] += f"; {sum(rows.frozen)} of {len(rows.frozen)} layers frozen"
        return found

    @property
    def about(self) -> CheckpointMetadata:
        """The description of the run in its checkpoints."""
        run = self.run
        return CheckpointMetadata(run.model_dump(mode="json"), self.placement.dims, run.seed, run.data.batch_size)

    def inspect(self, step: Step) -> Inspection:
        """Reads a compiled step, and checks it against the run's contract.

        Raises:
          ContractError: lists everything that exceeds `contract`.

        Warns:
          ContractWarning: the compiled step sends more than the traced one.
        """
        placement = self.on_prepared_states.placement
        planned = planned_by(self.ctx, placement.sharded, placement.opt_state, placement.carried.get(SLICES, {}))
        found = inspection.inspect(step.compiled, self.mesh, warnings=step.warnings, planned=planned)
        layers = self.run.model.layer_stack()
        passes = (layers.num_layers if layers else 1) * self.ctx.num_passes
        traced = self._traced_bytes_of(step) if self.ctx.manual else self.traced_bytes
        if self.run.contract:
            problems = self.run.contract.check(found, traced, passes)
            problems.raise_any(ContractError, "the compiled step breaks its contract:")
        if self.ctx.manual and traced is not None:
            _warn_beyond(found.collectives, traced)
        by_axes = {axes_name(axes): round(num_bytes) for axes, num_bytes in (traced or {}).items()}
        states = self.states.on_device if self.ctx.manual else None
        selected = self.selected
        if isinstance(step, LocalStep):
            selected = selected | {KEY: f"{selected[KEY]}: {self._sent_by_outer(step)}"}
        return replace(found, traced=by_axes or None, model_states=states, selected=selected)

    def _sent_by_outer(self, step: LocalStep) -> str:
        """The bytes that a device sends in the compiled outer steps of a round, and per inner step, as text.

        Warns:
          ContractWarning: it sends more than the traced outer step.
        """
        axis = self.placement.slices
        across = Fraction(0)
        for program in (*step.outer, *step.reducing):
            sent = collectives_of(program.compiled, self.mesh)
            if self._is_countable:
                _warn_beyond(sent, traffic(self.collectives(program.jaxpr)))
            across += total_sent_bytes(one for one in sent if axis in (one.axes or ()))
        each = human_bytes(round(across / step.rounds.mean_steps))
        return f"{human_bytes(round(across))} over {axis}, {each} a step"

    def compare(self, step: Step) -> None:
        """Compares the collectives of a compiled step with those of its traced step; the cheap part of `inspect`.

        Raises:
          ProgramError: lists every collective that could not be counted.

        Warns:
          ContractWarning: the compiled step sends more than the traced one.
        """
        if self.ctx.manual and (traced := self._traced_bytes_of(step)) is not None:
            _warn_beyond(collectives_of(step.compiled, self.mesh), traced)
        if isinstance(step, LocalStep):
            self._sent_by_outer(step)

    def _traced_bytes_of(self, step: Step) -> Traffic | None:
        return traffic(self.collectives(step.program.jaxpr)) if self._is_countable else None


def _warn_beyond(collectives: Sequence[Sent], traced: Traffic) -> None:
    if more := beyond(collectives, traced):
        text = "\n".join(["the compiled step sends more than the traced step says:", *map(str, more.found)])
        warnings.warn(text, ContractWarning, stacklevel=3)


def prepare(run: Run, mesh: AnyMesh | None = None) -> Prepared:
    """Checks a run and prepares it, before anything is compiled.

    Args:
      mesh: default: the run's own, on the local devices. An abstract mesh needs no devices.

    Raises:
      ConfigError, MeshError, ShardingError: each lists all problems of its kind.

    Examples:
      >>> from meshpar import Run, prepare
      >>> run = Run(
      ...     model={"kind": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64},
      ...     data={"kind": "synthetic"}, optim={"kind": "adamw", "lr": 1e-3}, num_steps=10, run_dir="unused",
      ...     mesh={"fsdp": 16}, rules="fsdp",
      ... )
      >>> prepared = prepare(run, run.mesh.abstract())
      >>> flatten_with_paths(prepared.placement.params)["head"].local_shape
      (2, 257)
    """
    mesh = run.mesh.build() if mesh is None else mesh
    check(run, mesh)
    prepared = _prepared(run, mesh)
    _ = prepared.placement
    return prepared


def _prepared(run: Run, mesh: AnyMesh) -> Prepared:
    model = run.model.program(replace(task_of(run), mesh=mesh))
    state_paths = model.state.paths if model.state else ()
    specs = stored_in(model.specs, np.dtype(run.precision.params), state_paths)
    ctx = replace(run.context(mesh), rules=model.rules, activation_dims=model.activation_dims)
    options = options_of(run)
    options.check_complex(specs, ctx)
    quantized = tuple(path for path in flatten_with_paths(specs) if is_quantized(path))
    frozen, rows = options.frozen(specs, quantized + state_paths), options.frozen_rows(specs, ctx)
    kinds = _kinds(run, model, specs)
    prepared = Prepared(
        run=run,
        specs=specs,
        init=model.init,
        loss=model.loss,
        evaluation=model.evaluation,
        carried=model.carried,
        init_carried=model.init_carried,
        key=partial(step_key, run.seed) if model.uses_rng else None,
        is_local=run.model.is_local,
        frozen=frozen,
        frozen_rows=rows,
        update=options.update(specs, frozen, rows, kinds, model.state),
        batch_specs=_arrays(run),
        of_rows=model.of_rows,
        bounds=model.bounds,
        merged=model.merged,
        ctx=ctx,
        seed=run.seed,
        is_offloaded=run.offload.optimizer == "host",
        rounds=options.rounds(ctx),
        added=model.added,
        kinds=kinds,
    ).in_stages()
    prepared.check_strategies()
    return prepared if run.distill is None else _taught(prepared, run.distill)


def _arrays(run: Run) -> dict[str, ArraySpec]:
    """The arrays of a batch: those of the data's rows, or packed tokens."""
    rows = run.data.array_specs()
    packed = run.model.batch_specs(run.data.batch_size, run.data.seq_len) if rows is None else rows
    if isinstance(run.loss, GRPO):
        packed = packed | run.loss.arrays(run.data.batch_size, run.data.seq_len)
    return {name: spec for name, spec in packed.items() if name not in run.data.omitted}


def _kinds(run: Run, model: ModelProgram, specs: Any) -> Any:
    """A tree of `Matrix`: how the loss uses each parameter, which it gets in the dtype in which the run computes."""
    given = stored_in(specs, np.dtype(run.precision.compute), model.state.paths if model.state else ())
    copies = {one.key: given for one in model.added if one.is_of_loss}
    carried = model.carried | copies if copies else model.carried
    key = jax.eval_shape(partial(step_key, run.seed), 0) if model.uses_rng else None
    elsewhere = run.model.on_any_device()
    loss = model.loss if elsewhere is run.model else elsewhere.program(task_of(run)).loss
    by_use = kinds_of(loss, given, _arrays(run), key, carried)
    return jax.tree.map(_is_table_by_either, by_use, specs)


def _is_table_by_either(by_use: Matrix, spec: ArraySpec) -> Matrix:
    """The head of a model is a table too, which its names say, but its use does not."""
    return replace(by_use, is_table=by_use.is_table or Matrix.of(spec.dims).is_table)


def _teacher(run: Run, distill: Distill, mesh: AnyMesh) -> Prepared:
    """The run in the teacher's directory, prepared on the student's mesh with the teacher's rules.

    Raises:
      CheckpointError: the directory has no checkpoint.
      ConfigError: the teacher does not fit this run or this mesh.
    """
    config = find(distill.teacher, include=()).meta["config"]
    where = f"distill: the teacher in {distill.teacher}"
    try:
        teacher = Run(**config | {"distill": None, "num_microbatches": 1, "freeze": (), "init": None})
        taught, own = _decoder(teacher), _decoder(run)
        rules = unstaged(distill.rules or run.rules)
        update = {"data": run.data, "lowering": run.lowering, "rules": rules, "parallel": Parallel()}
        prepared = prepare(teacher.model_copy(update=update), mesh)
    except MeshparError as error:
        raise ConfigError(f"{where} does not fit:\n{error}") from None
    if prepared.ctx.axes("seq") != run.context(mesh).axes("seq"):
        raise ConfigError(
            f"{where}: its rules shard rows over other axes than the run's; set the same rules.seq in both"
        )
    if (taught.vocab_size, taught.padded_vocab) != (own.vocab_size, own.padded_vocab):
        what = f"has {taught.vocab_size} token ids in {taught.padded_vocab} rows of its vocabulary"
        raise ConfigError(f"{where} {what}, this model {own.vocab_size} in {own.padded_vocab}")
    return prepared


def _decoder(run: Run) -> DecoderModel:
    """The model of a run with a teacher, or of the teacher.

    Raises:
      ConfigError: it is a user's own.
    """
    if not isinstance(run.model, DecoderModel):
        what = f"a model of kind {run.model.kind} computes its loss itself"
        raise ConfigError(f"{what}; a teacher and its student must be of kind llama or gpt")
    return run.model


def _taught(student: Prepared, distill: Distill) -> Prepared:
    """The same run, with its teacher in the step."""
    taught_by = _teacher(student.run, distill, student.mesh)
    model = _decoder(taught_by.run)
    forward = model.program(task_of(taught_by.run)).forward
    assert forward is not None, "a decoder has a forward"
    teacher = Teacher(
        apply=forward,
        specs=taught_by.specs,
        rules=taught_by.rules,
        student=student.ctx,
        batch_specs=student.batch_specs,
        vocab=model.padded_vocab,
        hidden_size=model.hidden_size,
    )
    return replace(student, taught_by=taught_by, added=(*student.added, teacher))
