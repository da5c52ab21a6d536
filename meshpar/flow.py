"""What a run is taken through: explained, inspected, trained. The first two are prefixes of the third."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from meshpar.checkpoint.checkpoints import Checkpoints, checkpoints
from meshpar.checkpoint.saved import FOLDER, Saved, find
from meshpar.checkpoint.selection import EVERYTHING
from meshpar.errors import ContractWarning, ProgramError
from meshpar.inspection.inspect import Inspection
from meshpar.inspection.report import Report, report
from meshpar.io.huggingface import open_pretrained
from meshpar.mesh import process
from meshpar.mesh.hardware import chip_of
from meshpar.models import Import
from meshpar.plan import targets
from meshpar.plan.fit import Judgement, compile_for, judge
from meshpar.prepared import Prepared, prepare
from meshpar.pretrained import PretrainedBeginning
from meshpar.run import Run
from meshpar.train.begin import Beginning
from meshpar.train.ema import averaged
from meshpar.train.evaluate import Callback
from meshpar.train.loop import Loop
from meshpar.train.loss import TEACHER, Distill
from meshpar.train.metrics import flops_per_token, recorder
from meshpar.train.state import TrainState
from meshpar.train.step import Step
from meshpar.tree import flatten_with_paths


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
    real = lambda spec: model.num_layers / model.stacked_layers if "layers" in spec.dims else 1
    used = {path: spec for path, spec in flatten_with_paths(prepared.specs).items() if path not in unused}
    params = round(sum(spec.size * real(spec) for spec in used.values()))
    attention = model.num_heads * model.head_size
    flops = flops_per_token(params, model.num_layers, prepared.run.data.seq_len, attention)
    return lambda tokens_per_s: tokens_per_s * flops / (chip.flops * prepared.mesh.size)
