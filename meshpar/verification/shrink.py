"""Shrinks a run without changing its structure, so that it can be verified on a few simulated devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshpar.data import Ids, Preferences, Synthetic
from meshpar.data.rows.config import RowData
from meshpar.experiment.config import Precision, Run
from meshpar.mesh.layout import MeshLayout
from meshpar.models.reference import Scale, least_factor
from meshpar.parallel.pipeline.schedule import ScheduleFile

MOST_DEVICES = 8


def shrink(run: Run) -> Run:
    """Returns the run with a tiny model in float64, on at most eight devices if its axes allow that.

    These do not change: the axes of the mesh, the dims that they shard, whether a device has one or several elements of
    a dim, groups of query heads, tied embeddings, separate or joined documents, padding, dropout, remat, accumulation,
    optimizer and lowering.
    """
    layout = {axis: 2 if size == -1 else size for axis, size in run.mesh.sizes.items()}
    sizes = {axis: size * (run.mesh.dcn.sizes[axis] if run.mesh.dcn else 1) for axis, size in layout.items()}
    mesh = MeshLayout.model_validate(small_sizes(sizes))
    schedule = run.parallel.pipeline
    scale = Scale(run.rules, sizes, mesh.sizes, run.data.seq_len, schedule and schedule.chunks_per_stage)
    model = run.model.reference(scale)
    num_microbatches = least_factor(run.num_microbatches)
    if schedule and not isinstance(schedule, ScheduleFile):  # a file fixes its number of microbatches
        schedule = schedule.model_copy(update={"num_microbatches": 2 * mesh.pipe, "cut": None})
    parallel = run.parallel.model_copy(update={"pipeline": schedule})
    passes = num_microbatches * parallel.num_microbatches
    batch_size = 2 * passes * scale.now("batch")
    changes = {
        "model": model,
        "data": _small_data(run, model, batch_size, scale.small_seq_len),
        "mesh": mesh,
        "num_microbatches": num_microbatches,
        "parallel": parallel,
        "precision": Precision(
            params="float64",
            compute="float64",
            matmul=run.precision.matmul,
            master=run.precision.master and "float64",
        ),
        "contract": None,
    }
    return run.model_copy(update=changes)


def _small_data(run: Run, model: Any, batch_size: int, seq_len: int) -> Any:
    """Data of fewer rows: the user's own rows as they are, or tokens in place of text."""
    if isinstance(run.data, RowData):
        return run.data.model_copy(update={"batch_size": batch_size})
    vocab_size = model.vocabulary() or run.data.vocab_size
    if isinstance(run.data, Preferences):  # nothing reads its files
        ids = Ids(vocab_size=vocab_size, bos=0)
        return run.data.model_copy(update={"batch_size": batch_size, "seq_len": seq_len, "tokenizer": ids})
    joined = run.data.documents_in_row
    return Synthetic(batch_size=batch_size, seq_len=seq_len, vocab_size=vocab_size, documents_in_row=joined)


def small_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Divides the sizes of axes by prime factors, the greatest of the largest first, until the product is at most 8.

    Each axis keeps its least factor, so the product may be larger.

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
    """The largest prime factor of a number; 1 for 1.

    >>> [greatest_factor(n) for n in (1, 2, 8, 12, 35)]
    [1, 2, 2, 3, 7]
    """
    while (least := least_factor(number)) < number:
        number //= least
    return number
