"""A small run of the same structure: what divides, repeats or is padded in the real one does so in this one."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshpar.experiment.config import Precision, Run
from meshpar.mesh.layout import MeshLayout
from meshpar.models.reference import Scale, least_factor
from meshpar.parallel.pipeline.schedule import Schedule, ScheduleFile
from meshpar.train.data import Synthetic

MOST_DEVICES = 8


def shrink(run: Run) -> Run:
    """The run on at most eight devices, if the axes allow it, with a tiny model and float64.

    Kept are: which axes there are, which dims they shard and over how many shards each is cut beyond that, groups of
    query heads, ties, padding of the vocabulary, dropout, remat, accumulation, optimizer and lowering.
    """
    layout = {axis: 2 if size == -1 else size for axis, size in run.mesh.sizes.items()}
    sizes = {axis: size * (run.mesh.dcn.sizes[axis] if run.mesh.dcn else 1) for axis, size in layout.items()}
    mesh = MeshLayout.model_validate(small_sizes(sizes))
    schedule = run.parallel.pipeline
    scale = Scale(run.rules, sizes, mesh.sizes, run.data.seq_len, schedule and schedule.chunks_per_stage)
    model = run.model.reference(scale)
    num_microbatches = least_factor(run.num_microbatches)
    parallel = run.parallel.model_copy(update={"pipeline": schedule and _pipeline(schedule, mesh.pipe)})
    passes = num_microbatches * parallel.num_microbatches
    batch_size = 2 * passes * scale.now("batch")
    vocabulary = model.vocabulary()
    vocab_size = vocabulary.size if vocabulary else run.data.vocab_size
    changes = {
        "model": model,
        "data": Synthetic(batch_size=batch_size, seq_len=scale.small_seq_len, vocab_size=vocab_size),
        "mesh": mesh,
        "num_microbatches": num_microbatches,
        "parallel": parallel,
        "precision": Precision(params="float64", compute="float64", master=run.precision.master and "float64"),
        "contract": None,
    }
    return run.model_copy(update=changes)


def small_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes that multiply to eight at most: of the largest its greatest factor is left out, of none its least.

    >>> small_sizes({"data": 64, "tensor": 8})
    {'data': 2, 'tensor': 4}
    >>> small_sizes({"data": 3, "tensor": 3})
    {'data': 3, 'tensor': 3}
    >>> small_sizes({"data": 2, "pipe": 12, "tensor": 2})
    {'data': 2, 'pipe': 2, 'tensor': 2}
    """
    small = dict(sizes)
    while math.prod(small.values()) > MOST_DEVICES:
        axis = max(small, key=lambda axis: small[axis] // least_factor(small[axis]))
        if small[axis] == least_factor(small[axis]):
            break
        small[axis] //= greatest_factor(small[axis])
    return small


def greatest_factor(number: int) -> int:
    """The largest prime that divides it; 1 of 1.

    >>> [greatest_factor(n) for n in (1, 2, 8, 12, 35)]
    [1, 2, 2, 3, 7]
    """
    while (least := least_factor(number)) < number:
        number //= least
    return number


def _pipeline(schedule: Schedule, num_stages: int) -> Schedule:
    """Twice as many microbatches as stages; orders that are written are of as many as they are."""
    if isinstance(schedule, ScheduleFile):
        return schedule
    return schedule.model_copy(update={"num_microbatches": 2 * num_stages, "cut": None})
