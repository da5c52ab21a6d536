"""Checks that a training computes the same on its mesh as on one device; if not, finds the axis at fault."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.config import flatten
from meshpar.data.rows.config import RowData
from meshpar.errors import MeshError, MeshparError, VerificationError
from meshpar.experiment.config import Run, as_run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.mesh.join import share
from meshpar.mesh.layout import MeshLayout, describe_sizes
from meshpar.progress import busy
from meshpar.train.program import on_host
from meshpar.train.state import TrainState
from meshpar.train.training import Training
from meshpar.tree import flatten_with_paths
from meshpar.verification.batches import token_batch
from meshpar.verification.compare import Comparison, compare, without_gradient
from meshpar.verification.report import CHECKPOINT, Row, Sizes, Verification
from meshpar.verification.shrink import shrink
from meshpar.verification.trial import Batches, StepResult, Trial, without_rounding
from meshpar.verification.widened import WIDE, in_float64, of_model

NUM_STEPS = 4


def verify(subject: Run | Training | Path | str, batches: Batches | None = None) -> Verification:
    """Checks that a training computes the same on its mesh as on one device, in float64 on simulated devices.

    It trains on the mesh, on one device, and on one axis at a time, and compares the loss, every gradient, the norm of
    the gradient, and the parameters after each step. It also compares runs that are saved, restored and resumed, on the
    mesh and on one device. With several processes, all of them train together on the mesh; each trains on one device
    and on one axis by itself.

    Args:
      subject: a run or the path of its config, which is shrunk first; or a training, verified in its own size.
      batches: for a training only: a batch for each step, name -> array.

    Raises:
      MeshError: a process does not have as many CPU devices, real or simulated, as the mesh; or the processes cannot
        share the mesh evenly.
      VerificationError: the loss cannot be computed in float64, the reduction of gradients rounds them, or there are
        fewer than two batches.
      ConfigError, ShardingError: see `prepare`.

    Examples:
      >>> from meshpar import AdamW, AxisRules, Llama, MeshLayout, Run, Synthetic, simulate
      >>> simulate(8)
      >>> run = Run(
      ...     model=Llama(num_layers=2, hidden_size=32, num_heads=4, intermediate_size=64),
      ...     data=Synthetic(batch_size=8),
      ...     optim=AdamW(lr=1e-3), mesh=MeshLayout(data=2), rules=AxisRules(preset="replicated"),
      ...     num_steps=10, run_dir="unused",
      ... )
      >>> verify(run).is_equal
      True
    """
    subject = subject if isinstance(subject, Training) else as_run(subject)
    parallel = subject.parallel if isinstance(subject, Run) else subject.ctx.parallel
    if (reduction := parallel.gradient_reduction) and reduction.rounds:
        key = "parallel.gradient_reduction"
        fix = f"verify it with {key}.within=exact {key}.across=exact"
        raise VerificationError(f"{key} rounds gradients: the numbers are close to one device's, but not equal; {fix}")
    if parallel.local:
        what = "parallel.local changes the numbers: slices train apart from each other on purpose"
        raise VerificationError(f"{what}; verify the layout of a slice with parallel.local=null")
    with jax.enable_x64(True):
        if isinstance(subject, Run):
            small = shrink(subject)
            prepared = prepare(small, small.mesh.build(_devices(small.mesh.requested() or 1)))
            found = _first_rows(prepared) if isinstance(small.data, RowData) else _drawn_tokens(small)
            batches = [{name: batch[name] for name in prepared.batch_specs} for batch in found]
            return _verify(_widened(prepared), batches, _changes(subject, small))
        if batches is None or len(batches) < 2:
            raise VerificationError("pass two batches or more, one for each step: the run is interrupted between them")
        return _verify(_widened(subject), [wide_batch(batch) for batch in batches], {})


def _first_rows(prepared: Prepared) -> Batches:
    """The first batches of the run's own rows."""
    rows, _ = prepared.run.data.datasets(prepared.run.seed, prepared.bounds)
    with closing(rows.batches()) as batches:
        return [wide_batch(batch) for batch in islice(batches, NUM_STEPS)]


def _drawn_tokens(run: Run) -> Batches:
    rng = np.random.default_rng(0)
    return [token_batch(rng, run.data.batch_size, run.data.seq_len, run.data.vocab_size) for _ in range(NUM_STEPS)]


def _verify(training: Training, batches: Batches, shrunk: dict[str, tuple[Any, Any]]) -> Verification:
    with busy("training on the mesh, on one device, and on one axis at a time", quiet=True) as show:
        checker = _Checker(training, batches, show)
        rows = list(checker.rows())
        if not rows[0].is_equal and all(row.is_equal for row in rows[1:] if row.axes != CHECKPOINT):
            rows += checker.pairs()
    undecided = tuple(path for path, elements in checker.undecided.items() if elements.any())
    draws = training.key is not None
    verification = Verification(checker.sizes, shrunk, tuple(rows), undecided, draws)
    if verification.is_equal or not draws:
        return verification
    return replace(verification, draws_differ=checker.is_equal_without_draws(verification.culprits[0]))


class _Checker:
    """Compares layouts with a reference on one device, which runs once.

    Args:
      show: called with a line about each layout when it has run.
    """

    def __init__(self, training: Training, batches: Batches, show: Callable[[str], None] = lambda line: None):
        self.training = training
        self.batches = batches
        self.show = show
        self.half = len(batches) // 2
        self.sizes = {axis: size for axis, size in dict(training.mesh.shape).items() if size > 1}
        # State such as batch statistics passes from one microbatch to the next, and a user's loss draws numbers for the
        # rows of a microbatch, so both depend on their number. In 8 bits the gradient of weights is scaled by the
        # tokens of a microbatch.
        draws_in_parts = training.key and not training.is_local
        needs_parts = training.carried or draws_in_parts or training.ctx.number_format
        num_microbatches = training.ctx.num_passes if needs_parts else 1
        plain = Trial(training.on(mesh=_mesh({}), manual=False, num_microbatches=num_microbatches))
        began = time.perf_counter()
        start = plain.start()
        self.rounding = plain.rounding
        self.first = flatten_with_paths(on_host(start)) if self.rounding else {}
        self.reference = plain.run(start, batches)[1]
        show(f"one device, the reference: {time.perf_counter() - began:.1f} s")
        self.undecided = without_gradient(self.reference)

    def rows(self) -> Iterator[Row]:
        """Tries the whole mesh, each axis alone, and one device; then resumed runs, if the whole mesh is equal."""
        whole = Trial(self.training.on(mesh=_mesh(self.sizes, _spread)))
        single = self._trial({})
        first = self._row(describe_sizes(self.sizes), tuple(self.sizes), lambda: self._run(whole))
        yield first
        for axis in self.sizes if len(self.sizes) > 1 else ():
            yield self._alone((axis,))
        if self.sizes:
            ctx = self.training.ctx
            name = f"one device, {ctx.lowering}"
            if ctx.num_microbatches > 1:
                name += f", {ctx.num_microbatches} microbatches"
            yield self._row(name, (), lambda: self._run(single))
        if first.is_equal:
            resumed = f"resumed after step {self.half}"
            yield self._row(resumed, CHECKPOINT, lambda: self._resume(whole, whole))
            yield self._row(f"{resumed}, on one device", CHECKPOINT, lambda: self._resume(whole, single))

    def pairs(self) -> Iterator[Row]:
        """Tries each pair of axes."""
        return (self._alone(pair) for pair in combinations(self.sizes, 2) if len(self.sizes) > 2)

    def is_equal_without_draws(self, row: Row) -> bool:
        if row.axes == CHECKPOINT:
            return False
        try:
            return _Checker(replace(self.training, key=None), self.batches)._alone(row.axes).is_equal
        except Exception:  # the loss needs a key
            return False

    def _trial(self, sizes: Sizes) -> Trial:
        return Trial(self.training.on(mesh=_mesh(sizes)))

    def _alone(self, axes: tuple[str, ...]) -> Row:
        sizes = {axis: self.sizes[axis] for axis in axes}
        return self._row(describe_sizes(sizes), axes, lambda: self._run(self._trial(sizes)))

    def _row(self, name: str, axes: tuple[str, ...], run: Callable[[], Comparison]) -> Row:
        began = time.perf_counter()
        try:
            row = Row(name, axes, run())
        except Exception as error:  # the layout is at fault, since the reference did not fail
            row = Row(name, axes, None, _message(error))
        self.show(f"{name}: {'equal' if row.is_equal else 'not equal'}, {time.perf_counter() - began:.1f} s")
        return row

    def _run(self, trial: Trial) -> Comparison:
        return self._compare(trial.run(self._start(trial), self.batches)[1], 0)

    def _resume(self, first: Trial, then: Trial) -> Comparison:
        state, _ = first.run(self._start(first), self.batches[: self.half])
        restored = first.saved_and_restored(state, then)
        return self._compare(then.run(restored, self.batches[self.half :])[1], self.half)

    def _start(self, trial: Trial) -> TrainState:
        state = trial.start()
        return without_rounding(state, self.first, self.rounding) if self.rounding else state

    def _compare(self, got: Sequence[StepResult], skipped: int) -> Comparison:
        return compare(got, self.reference[skipped:], self.undecided, 1 + skipped)


def _message(error: Exception) -> str:
    """The first line of an error, with the first problem if it lists problems; or what JAX's error of types means."""
    lines = str(error).strip().splitlines() or [""]
    if unsummed := re.search(r"^\* out_specs\.(\S+) is .* varying over \{([^}]*)\}", str(error), re.MULTILINE):
        return f"it cannot be traced: a sum over {unsummed[2]} is missing before the step returns its {unsummed[1]}"
    what = lines[:3] if isinstance(error, MeshparError) and lines[0].endswith(":") else lines[:1]
    return f"{type(error).__name__}: {' '.join(line.strip() for line in what)}"


def _widened(training: Training) -> Training:
    """Changes all floats of a training to float64."""

    def widen(spec: Any) -> Any:
        return replace(spec, dtype=_wide_dtype(spec))

    trees = {name: jax.tree.map(widen, getattr(training, name)) for name in ("specs", "carried", "batch_specs")}
    training = replace(training.on(compute_dtype=np.dtype("float64")), **trees)
    if training.is_local:
        return training
    first = {name: of_model(getattr(training, name)) for name in ("init", "init_carried")}
    evaluation = training.evaluation and in_float64(training.evaluation)
    return replace(training, loss=in_float64(training.loss), evaluation=evaluation, **first)


def wide_batch(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Changes all floats of a batch to float64."""
    return {name: np.asarray(x, _wide_dtype(x)) for name, x in batch.items()}


def _wide_dtype(x: Any) -> np.dtype:
    return WIDE.get(np.dtype(x.dtype), np.dtype(x.dtype))


def _mesh(sizes: Sizes, devices: Callable[[int], list[Any]] | None = None) -> Any:
    return MeshLayout.model_validate(sizes).build((devices or _devices)(math.prod(sizes.values())))


def _devices(count: int) -> list[Any]:
    """CPU devices of this process."""
    found = jax.local_devices(backend="cpu")
    if len(found) < count:
        what = f"{count} CPU devices are needed, {len(found)} are available"
        raise MeshError(f"{what}; call meshpar.simulate({count * jax.process_count()}) first")
    return found[:count]


def _spread(count: int) -> list[Any]:
    """CPU devices of all processes, the same number from each."""
    each = share(count)
    of_process: dict[int, list[Any]] = {}
    for device in jax.devices("cpu"):
        of_process.setdefault(device.process_index, []).append(device)
    return [device for found in of_process.values() for device in found[:each]]


def _changes(run: Run, small: Run) -> dict[str, tuple[Any, Any]]:
    """Key -> (value before, value after) of each key that was shrunk."""
    before = flatten(run)
    after = flatten(small)
    sections = ("model.", "mesh.", "num_microbatches", "data.batch_size", "data.seq_len")
    keys = [key for key in after if key.startswith(sections) and key in before]
    return {key: (before[key], after[key]) for key in keys if before[key] != after[key]}
