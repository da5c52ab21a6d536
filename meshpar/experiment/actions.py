"""Explains, inspects and trains. `explain` and `inspect` are the first steps of `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import jax
from jax.stages import Compiled

from meshpar.experiment.arrays import Data
from meshpar.experiment.config import Run, as_run
from meshpar.experiment.fit_model import fit_model
from meshpar.experiment.fit_run import fit_run
from meshpar.experiment.prepare import prepare
from meshpar.inspection.findings.find import THRESHOLD_BYTES
from meshpar.inspection.findings.planned import Planned
from meshpar.inspection.fit import FitReport, compile_for, judge
from meshpar.inspection.inspect import Inspection
from meshpar.inspection.inspect import inspect as inspect_program
from meshpar.inspection.report.report import Report, report
from meshpar.mesh import compilation_cache, process, targets
from meshpar.sharding.resolve import AnyMesh
from meshpar.train.loop.loop import Steps
from meshpar.train.state import TrainState


def explain(
    run: Run | Path | str, path: str | None = None, num_devices: int | None = None, activations: bool = False
) -> Report:
    """Reports the shards that every device would hold, without any devices. `meshpar explain` prints the report.

    Args:
      run: a run, or the path of a config file.
      path: a glob; only the parameters that match it are reported and drawn.
      num_devices: size of the mesh, needed if one of its axes is -1. Default: the product of the sizes, or one.
      activations: whether to list the activations that a forward pass of an imported model moves.

    Raises:
      ConfigError: no parameter matches `path`, or keys of the run do not fit each other.
      MeshError: the sizes of the mesh do not multiply to the number of devices.
      ShardingError: lists every array that does not fit the rules and the mesh.

    Examples:
      >>> from meshpar import Run, explain
      >>> run = Run(
      ...     model={"kind": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64},
      ...     data={"kind": "synthetic"}, optim={"kind": "adamw", "lr": 1e-3}, num_steps=10, run_dir="unused",
      ...     mesh={"fsdp": 16}, rules="fsdp",
      ... )
      >>> explain(run).arrays["head"].local_shape
      (2, 257)
    """
    run = as_run(run)
    prepared = prepare(run, run.mesh.abstract(num_devices))
    states = prepared.states
    found = report(prepared.placement.params, states.on_device, prepared.selected, states.host, prepared.updates)
    if activations:
        attention = tuple(map(str, prepared.attention))
        found = replace(found, activations=tuple(prepared.activations), attention=attention)
    return found if path is None else found.only(path)


@overload
def inspect(run: Run | Path | str, /, target: None = None, num_devices: int | None = None) -> Inspection: ...


@overload
def inspect(run: Run | Path | str, /, target: str, num_devices: int | None = None) -> FitReport: ...


@overload
def inspect(
    compiled: Compiled | str,
    mesh: AnyMesh | None = None,
    *,
    warnings: Iterable[str] = (),
    planned: Planned | None = None,
    threshold_bytes: int = THRESHOLD_BYTES,
) -> Inspection: ...


def inspect(*program: Any, **options: Any) -> Inspection | FitReport:
    """Reports the communication, FLOPs and memory of a run's step, or of any compiled program. Nothing is run.

    `inspect(run, target=None, num_devices=None)` compiles the step of a run or config file, as `meshpar inspect` does.
    `inspect(compiled, mesh=None, *, warnings=(), planned=None, threshold_bytes=...)` reads a program that you compiled.

    Args:
      target: another machine, such as `v5e:16x16`. The step is compiled for it, and a `FitReport` says whether it fits.
        If JAX has not started in this process, it uses only CPUs afterwards, without a cache of compiled programs.
      num_devices: compile for this many of the local devices. Default: all.
      compiled: a program for one or more devices, or its text. The text alone contains neither the size of temporaries
        nor findings about arguments and outputs.
      mesh: the mesh of the program; its axes are named in the report.
      warnings: XLA's messages from the compilation, see `compiling`.
      planned: arrays that the program gathers, reduces or holds whole on purpose, and that are no findings.
      threshold_bytes: the least size of an array whose replication, or whose gather without `planned`, is a finding.

    Returns:
      An `Inspection`; with `target`, a `FitReport`.

    Raises:
      ContractError: the step exceeds the contract of the run.
      MeshError: there is no such machine, its compiler is not installed, or the step is too big to compile.
      ConfigError, ShardingError: the keys of the run do not fit each other, or its mesh.
      ProgramError: lists every collective that could not be counted.

    Examples:
      >>> import meshpar
      >>> meshpar.simulate(8)
      >>> run = meshpar.Run(
      ...     model={"kind": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64},
      ...     data={"kind": "synthetic", "seq_len": 16}, optim={"kind": "adamw", "lr": 1e-3}, num_steps=10,
      ...     run_dir="unused", mesh={"data": 8},
      ... )
      >>> inspection = meshpar.inspect(run)
      >>> inspection.bytes_per_axis == inspection.traced
      True
      >>> import jax
      >>> meshpar.inspect(jax.jit(lambda x: x @ x).lower(jax.numpy.ones((16, 16))).compile()).flops
      8192
    """
    if program and (isinstance(program[0], (Run, Path)) or _is_path(program[0])):
        return _inspect_run(as_run(program[0]), *program[1:], **options)
    return inspect_program(*program, **options)


def _is_path(program: Any) -> bool:
    """Whether a text names a config file. The text of a program has several lines."""
    return isinstance(program, str) and "\n" not in program


def _inspect_run(run: Run, target: str | None = None, num_devices: int | None = None) -> Inspection | FitReport:
    if target is None:
        prepared = prepare(run, run.mesh.build(jax.devices()[:num_devices] if num_devices else None))
        with compilation_cache.disabled():  # a program from the cache comes without the compiler's warnings
            step = prepared.compile_step()
        return prepared.inspect(step)
    machine = targets.parse(target)
    process.compile_only()
    prepared = prepare(run, run.mesh.build(machine.devices()))
    return judge(prepared.inspect(compile_for(machine, prepared.compile_step)), machine, prepared.mesh)


@overload
def fit(
    run: Run | Path | str,
    *,
    json: bool = False,
    profile: Path | str | None = None,
    dump_hlo: Path | str | None = None,
    callbacks: Sequence[Any] = (),
    signals: bool = False,
    steps: Literal[False] = False,
) -> TrainState: ...


@overload
def fit(*subject: Any, steps: Literal[True], **options: Any) -> Steps: ...


@overload
def fit(
    model: Any,
    loss: Callable[..., Any] | None = None,
    data: Data | None = None,
    *,
    num_steps: int,
    run_dir: Path | str,
    steps: Literal[False] = False,
    **options: Any,
) -> TrainState: ...


def fit(*subject: Any, **options: Any) -> TrainState | Steps:
    """Trains a run or a model of your own, or resumes it from the last checkpoint in its directory.

    `fit(run, *, json=False, profile=None, dump_hlo=None, callbacks=(), signals=False, steps=False)` trains a run, or
    that of a config file.
    `fit(model, loss, data, *, tx, mesh, rules, batch_size, num_steps, run_dir, ...)` trains a Flax model, with `model`,
    `loss` and all options as `training` takes them. `fit(training, data=data, ...)` trains what `training` or
    `meshpar.tables.training` returned. These take `held_out`, `log_every`, `eval_every`, `checkpoints`,
    `early_stopping`, `max_skipped_steps`, `check_replicas_every` and `loggers` too, which have the meanings of a
    config's keys.

    Args:
      run: a run, or the path of a config file.
      data: name -> array of all rows, which are shuffled in each epoch; or a function: step, counted from 0 -> batch.
      batch_size: rows of a step, from all rows.
      held_out: name -> array of the rows of evaluations.
      run_dir: the folder of metrics and checkpoints.
      json: print records as JSON instead of a progress bar.
      profile: a folder for a trace of a few steps.
      dump_hlo: a file for the compiled step's text.
      callbacks: objects with methods such as `on_step_end(state, step, metrics)`, after those of the config; and
        functions (state, step) -> {name: number}, whose numbers are recorded with each evaluation.
      signals: at SIGINT or SIGTERM finish the step, save, and raise `Interrupted`; at a second signal end at once. This
        needs the main thread. By default the caller handles signals: after a `KeyboardInterrupt` nothing more is
        saved, and the next call resumes from the last checkpoint.
      steps: return what a loop runs over: `for state, metrics in fit(..., steps=True)` trains a step for each turn. The
        next step uses the memory of this state. If the loop is left, by a `break` or an error, its last state is saved.

    Returns:
      The last state.

    Raises:
      RunError: the run failed while it trained.
      Interrupted: a signal arrived.
      MeshparError: the config has a fault, or does not fit the devices or the run directory; nothing was trained.

    Examples:
      >>> import tempfile
      >>> from meshpar import Run, fit
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     run = Run(
      ...         model={"kind": "llama", "num_layers": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8},
      ...         data={"kind": "synthetic", "batch_size": 8, "seq_len": 8}, optim={"kind": "adamw", "lr": 1e-3},
      ...         mesh={"data": -1}, num_steps=2, run_dir=folder, loggers=[],
      ...     )
      ...     state = fit(run, json=True)  # doctest: +ELLIPSIS
      {"kind": "run", "step": 0, ...
      >>> int(state.step)
      2
    """
    if not subject and "model" in options:
        subject = (options.pop("model"),)
    is_model = subject and not isinstance(subject[0], (Run, Path, str))
    if is_model and (len(subject) > 1 or options):
        return fit_model(*subject, **options)
    return fit_run(*subject, **options)
