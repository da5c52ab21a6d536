"""Is a training on its mesh the training on one device? If not: which axis is guilty, and of what."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.config import flatten
from meshpar.errors import MeshError, ProofError
from meshpar.mesh.layout import MeshLayout, describe_sizes
from meshpar.prepared import prepare
from meshpar.proof.batches import token_batch
from meshpar.proof.compare import Comparison, compare, without_gradient
from meshpar.proof.shrink import shrink
from meshpar.proof.trial import Batches, Taken, Trial, on
from meshpar.proof.verdict import CHECKPOINT, Proof, Row, Sizes
from meshpar.run import Run
from meshpar.train.training import Training

NUM_STEPS = 4


def prove(subject: Run | Training, batches: Batches | None = None) -> Proof:
    """Runs a training in float64 on simulated devices, on its mesh, on one device, and on one axis at a time.

    Compared are loss, every gradient, the gradient's norm and the parameters after each step, and the same of runs
    that were interrupted, saved and resumed, on the mesh and on one device.

    Args:
      subject: a run, which is shrunk first; or a training, which is taken as it is but for the precision.
      batches: what each step is given: name -> array; a run has its own four.

    Raises:
      MeshError: there are not enough CPU devices here, real or simulated.
      ProofError: the loss is not computed in float64, gradients are rounded where they are reduced, or there are not
        two batches.
      ConfigError, ShardingError: as of `prepare`.

    Example:
      >>> from meshpar import AdamW, AxisRules, Llama, MeshLayout, Run, Synthetic, simulate
      >>> simulate(8)
      >>> run = Run(
      ...     model=Llama(num_layers=2, width=32, num_heads=4, mlp_width=64), data=Synthetic(batch_size=8),
      ...     optim=AdamW(lr=1e-3), mesh=MeshLayout(data=2), rules=AxisRules(preset="replicated"),
      ...     num_steps=10, run_dir="unused",
      ... )
      >>> prove(run).is_equal
      True
    """
    parallel = subject.parallel if isinstance(subject, Run) else subject.ctx.parallel
    if (reduction := parallel.gradient_reduction) and reduction.rounds:
        key = "parallel.gradient_reduction"
        fix = f"prove it with {key}.within=exact {key}.across=exact"
        raise ProofError(f"{key} rounds what it sums: it is near one device's numbers, not equal to them; {fix}")
    with jax.enable_x64(True):
        if isinstance(subject, Run):
            small = shrink(subject)
            training = prepare(small, small.mesh.build(_devices(small.mesh.requested() or 1)))
            return _prove(training, _token_batches(small), _changes(subject, small))
        if batches is None or len(batches) < 2:
            raise ProofError("give a batch for each of two steps or more: between them the run is interrupted")
        return _prove(_widened(subject), [_wide(batch) for batch in batches], {})


def _prove(training: Training, batches: Batches, shrunk: dict[str, tuple[Any, Any]]) -> Proof:
    court = _Court(training, batches)
    rows = list(court.rows())
    if not rows[0].is_equal and all(row.is_equal for row in rows[1:] if row.axes != CHECKPOINT):
        rows += court.pairs()
    undecided = tuple(path for path, which in court.undecided.items() if which.any())
    draws = training.key is not None
    proof = Proof(court.sizes, shrunk, tuple(rows), undecided, draws)
    return replace(proof, draws_guilty=draws and not proof.is_equal and court.is_equal_without_draws(proof.guilty[0]))


class _Court:
    """Runs what is compared; the reference runs once."""

    def __init__(self, training: Training, batches: Batches):
        self.training, self.batches, self.half = training, batches, len(batches) // 2
        self.sizes = {axis: size for axis, size in dict(training.mesh.shape).items() if size > 1}
        # What is carried from one microbatch to the next, as batch statistics are, depends on how many there are.
        num_microbatches = training.ctx.num_microbatches if training.carried else 1
        self.plain = on(training, _mesh({}), manual=False, num_microbatches=num_microbatches)
        self.reference = self.plain.run(self.plain.start(), batches)[1]
        self.undecided = without_gradient(self.reference)

    def rows(self) -> Iterator[Row]:
        whole = on(self.training, _mesh(self.sizes))
        here = on(self.training, _mesh({}))
        first = self._row(describe_sizes(self.sizes), tuple(self.sizes), lambda: self._all(whole))
        yield first
        for axis in self.sizes if len(self.sizes) > 1 else ():
            yield self._alone((axis,))
        if self.sizes:
            yield self._row(self._name_here(), (), lambda: self._all(here))
        if first.is_equal:
            resumed = f"resumed after step {self.half}"
            yield self._row(resumed, CHECKPOINT, lambda: self._resumed(whole, whole))
            yield self._row(f"{resumed}, on one device", CHECKPOINT, lambda: self._resumed(whole, here))

    def pairs(self) -> Iterator[Row]:
        """Two axes at a time."""
        return (self._alone(pair) for pair in combinations(self.sizes, 2) if len(self.sizes) > 2)

    def is_equal_without_draws(self, row: Row) -> bool:
        if row.axes == CHECKPOINT:
            return False
        try:
            return _Court(replace(self.training, key=None), self.batches)._alone(row.axes).is_equal
        except Exception:  # a loss that cannot do without a key says nothing
            return False

    def _alone(self, axes: tuple[str, ...]) -> Row:
        sizes = {axis: self.sizes[axis] for axis in axes}
        return self._row(describe_sizes(sizes), axes, lambda: self._all(on(self.training, _mesh(sizes))))

    def _row(self, name: str, axes: tuple[str, ...], run: Callable[[], Comparison]) -> Row:
        try:
            return Row(name, axes, run())
        except Exception as error:  # whatever fails here and not on one device is a verdict on the layout
            return Row(name, axes, None, _said(error))

    def _all(self, trial: Trial) -> Comparison:
        return self._compare(trial.run(trial.start(), self.batches)[1], 0)

    def _resumed(self, first: Trial, then: Trial) -> Comparison:
        state, _ = first.run(first.start(), self.batches[: self.half])
        restored = first.saved_and_restored(state, then)
        return self._compare(then.run(restored, self.batches[self.half :])[1], self.half)

    def _compare(self, got: Sequence[Taken], skipped: int) -> Comparison:
        return compare(got, self.reference[skipped:], self.undecided, 1 + skipped)

    def _name_here(self) -> str:
        ctx = self.training.ctx
        microbatches = f", {ctx.num_microbatches} microbatches" if ctx.num_microbatches > 1 else ""
        return f"one device, {ctx.lowering}{microbatches}"


def _said(error: Exception) -> str:
    """The first line of an error; of JAX's on varying types, what it means."""
    lines = str(error).strip().splitlines() or [""]
    if unsummed := re.search(r"^\* out_specs\.(\S+) is .* varying over \{([^}]*)\}", str(error), re.MULTILINE):
        return f"it cannot be traced: over {unsummed[2]} a sum is missing, before the step gives its {unsummed[1]}"
    return f"{type(error).__name__}: {lines[0]}"


def _widened(training: Training) -> Training:
    widened = lambda tree: jax.tree.map(lambda spec: replace(spec, dtype=_wide_dtype(spec)), tree)
    trees = {name: widened(getattr(training, name)) for name in ("specs", "carried", "batch_specs")}
    return replace(training.on(compute_dtype=np.dtype("float64")), **trees)


def _wide(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x, _wide_dtype(x)) for name, x in batch.items()}


def _wide_dtype(x: Any) -> np.dtype:
    return np.dtype("float64") if jnp.issubdtype(x.dtype, jnp.floating) else np.dtype(x.dtype)


def _token_batches(run: Run) -> Batches:
    rng, data = np.random.default_rng(0), run.data
    return [token_batch(rng, data.batch_size, data.seq_len, data.vocab_size) for _ in range(NUM_STEPS)]


def _mesh(sizes: Sizes) -> Any:
    return MeshLayout.model_validate(sizes).build(_devices(math.prod(sizes.values())))


def _devices(count: int) -> list[Any]:
    there = jax.devices("cpu")
    if len(there) < count:
        raise MeshError(f"{count} CPU devices are needed, {len(there)} are here; say meshpar.simulate({count}) first")
    return there[:count]


def _changes(run: Run, small: Run) -> dict[str, tuple[Any, Any]]:
    before, after = flatten(run), flatten(small)
    sections = ("model.", "mesh.", "num_microbatches", "data.batch_size", "data.seq_len")
    keys = [key for key in after if key.startswith(sections) and key in before]
    return {key: (before[key], after[key]) for key in keys if before[key] != after[key]}
