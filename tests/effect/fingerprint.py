"""What a run does, as text: its programs, the sharding of its state, its first batches, and how its loop is called.

Two runs with the same fingerprint do the same, so a key in which they differ has no effect.
"""

from __future__ import annotations

import hashlib
import io
import re
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

from meshpar import Run, fit
from meshpar.config import Config
from meshpar.experiment import fit_run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.serve.rollouts import Rollouts
from meshpar.train.training import Training
from meshpar.tree import flatten_with_paths

ADDRESS = re.compile(r"0x[0-9a-f]+|<function [^>]*>|id=\d+")


def program(run: Run) -> dict[str, str]:
    """The traced step, evaluation and initialization, the shardings, and what is selected; no device is used."""
    prepared = prepare(run, run.mesh.abstract())
    parts = {"selected": lambda: prepared.selected, "metrics": lambda: _metrics(run, prepared)}
    return of_training(prepared) | {name: _hash(part()) for name, part in parts.items()}


def of_training(training: Training) -> dict[str, str]:
    """The programs and the shardings of a training."""
    prepared = training.on_prepared_states
    parts: dict[str, Callable[[], Any]] = {
        "state": lambda: _shardings(training.placement.structs),
        "batch": lambda: _shardings(training.batch),
        "dims": lambda: training.placement.dims,
        "options": lambda: training.ctx.compiler_options,
        "order": lambda: None if training.order is None else training.order.tolist(),
        "rounds": lambda: training.rounds,
        "step": lambda: _text(
            jax.make_jaxpr(prepared.step)(prepared.placement.structs, training.batch | training.given)
        ),
        "init": lambda: _text(jax.make_jaxpr(lambda: training.init(jax.random.key(training.seed)))()),
        "key": lambda: training.key and _text(jax.make_jaxpr(training.key)(0)),
        "evaluation": lambda: _text(training.lazy_evaluation().traced.jaxpr),
        "outer": lambda: _outer(training),
    }
    return {name: _hash(part()) for name, part in parts.items()}


def _hash(part: Any) -> str:
    return hashlib.sha256(ADDRESS.sub("", str(part)).encode()).hexdigest()


def data(run: Run) -> str:
    """The first two batches, and the first that is held out."""
    rows = np.arange(run.data.batch_size)
    batches = [part.rows(i, rows) for part in run.data.datasets(run.seed) for i in range(min(2, len(part)))]
    return hashlib.sha256(repr([{k: x.tolist() for k, x in sorted(b.items())} for b in batches]).encode()).hexdigest()


def loop(run: Run, **arguments: Any) -> str:
    """What `fit` gives to the loop, to the checkpoints and to the records of a run; nothing is compiled or trained."""

    def call(folder: Path) -> Any:
        return fit(run.model_copy(update={"run_dir": folder / run.run_dir.name}), **{"json": True} | arguments)

    return spied_on(fit_run, ("Loop", "checkpoints", "recorder"), call)


def spied_on(module: Any, names: Sequence[str], call: Callable[[Path], Any], shown: tuple[type, ...] = ()) -> str:
    """What a function of a module gives to the classes and functions `names`, and the files that it makes.

    Args:
      call: calls it with a folder to write into.
      shown: types of values that tell what they are by their text, besides plain ones.
    """
    given: dict[str, Any] = {}

    def trained(state: Any, shows: bool) -> Any:
        given["signals"] = getattr(signal.getsignal(signal.SIGTERM), "__qualname__", "")
        given["shows"] = shows
        yield from ()
        return state

    def spied(name: str) -> Callable[..., Any]:
        made = getattr(module, name)

        def spy(*args: Any, **more: Any) -> Any:
            found = [x.loss if isinstance(x, Rollouts) else x for x in (*args, *more.values())]
            given[name] = [x for x in found if isinstance(x, (int, float, str, Config, tuple, Path, *shown))]
            return SimpleNamespace(steps=trained) if name == "Loop" else made(*args, **more)

        return spy

    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        patches.enter_context(redirect_stdout(io.StringIO()))
        patches.enter_context(redirect_stderr(io.StringIO()))
        for name in names:
            patches.enter_context(patch.object(module, name, spied(name)))
        patches.enter_context(patch.object(Training, "compile_step", lambda self: SimpleNamespace(text="")))
        patches.enter_context(patch.object(Training, "compile_init", lambda self: lambda: SimpleNamespace(step=0)))
        call(Path(folder))
        files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
        return ADDRESS.sub("", f"{given} {files}".replace(folder, ""))


def _shardings(structs: Any) -> dict[str, str]:
    return {path: f"{x.shape} {x.dtype} {x.sharding}" for path, x in flatten_with_paths(structs).items()}


def _outer(prepared: Training) -> list[str]:
    slices = prepared.slices
    return [_text(traced.jaxpr) for traced in slices.trace_outer() + slices.trace_reductions()] if slices else []


def _metrics(run: Run, prepared: Prepared) -> Any:
    """The metrics of all rows together, and what is computed for them."""
    of_rows = prepared.lazy_row_results()
    return (sorted(getattr(run.loss, "row_metrics", ())), _text(of_rows.traced.jaxpr)) if of_rows else None


def _text(jaxpr: Any) -> str:
    """The text of a jaxpr, and the values of the arrays that it closes over."""
    consts = [hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in jaxpr.consts if hasattr(x, "shape")]
    return f"{jaxpr}\n{consts}"
