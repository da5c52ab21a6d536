"""A small run of the same structure: what divides, repeats or is padded in the real one does so in this one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshpar.mesh.layout import AXES, MeshLayout
from meshpar.models import Import
from meshpar.nn.transformer import Decoder
from meshpar.parallel.pipeline.schedule import Schedule, Written
from meshpar.run import Precision, Run
from meshpar.train.data import Synthetic

MOST_DEVICES = 8
HEAD_DIM, SEQ_LEN, VOCAB_MULTIPLE = 4, 16, 8


def shrink(run: Run) -> Run:
    """The run on at most eight devices, if the axes allow it, with a tiny model and float64.

    Kept are: which axes there are, which dims they shard and over how many shards each is cut beyond that, groups of
    query heads, ties, padding of the vocabulary, dropout, remat, accumulation, optimizer and lowering.
    """
    layout = {axis: 2 if size == -1 else size for axis, size in run.mesh.sizes.items()}
    sizes = {axis: size * (run.mesh.dcn.sizes[axis] if run.mesh.dcn else 1) for axis, size in layout.items()}
    mesh = MeshLayout.model_validate(small_sizes(sizes))
    cut = _Cut(run, sizes, mesh.sizes)
    imported = isinstance(run.model, Import)  # nothing is known of its sizes
    model = run.model.model_dump() | ({} if imported else _model(run, cut))
    num_microbatches = least_factor(run.num_microbatches)
    schedule = run.parallel.pipeline
    parallel = run.parallel.model_copy(update={"pipeline": schedule and _pipeline(schedule, mesh.pipe)})
    passes = num_microbatches * parallel.num_microbatches
    batch_size, seq_len = 2 * passes * cut.now("batch"), _seq_len(cut)
    vocab_size = run.data.vocab_size if imported else model["vocab_size"]
    changes = {
        "model": type(run.model).model_validate(model),
        "data": Synthetic(batch_size=batch_size, seq_len=seq_len, vocab_size=vocab_size),
        "mesh": mesh,
        "num_microbatches": num_microbatches,
        "parallel": parallel,
        "precision": Precision(params="float64", compute="float64", master=run.precision.master and "float64"),
        "expects": None,
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


def least_factor(number: int) -> int:
    """The smallest prime that divides it; 1 of 1.

    >>> [least_factor(n) for n in (1, 2, 8, 9, 35)]
    [1, 2, 2, 3, 5]
    """
    return next((d for d in range(2, number + 1) if number % d == 0), 1)


def greatest_factor(number: int) -> int:
    """The largest prime that divides it; 1 of 1.

    >>> [greatest_factor(n) for n in (1, 2, 8, 12, 35)]
    [1, 2, 2, 3, 7]
    """
    while (least := least_factor(number)) < number:
        number //= least
    return number


@dataclass(frozen=True)
class _Cut:
    """Into how many shards a dim is cut, in the run and in the small one."""

    run: Run
    before: Mapping[str, int]
    after: Mapping[str, int]

    def was(self, dim: str) -> int:
        return self._shards(dim, self.before)

    def now(self, dim: str) -> int:
        return self._shards(dim, self.after)

    def small(self, dim: str, size: int) -> int:
        """The size of a dim: one part a shard, if it was so; else as many as the least factor says."""
        return self.now(dim) * least_factor(max(1, size // self.was(dim)))

    def _shards(self, dim: str, sizes: Mapping[str, int]) -> int:
        return math.prod(sizes[axis] for axis in self.run.rules.table.get(dim, ()) if axis in AXES)


def _model(run: Run, cut: _Cut) -> dict[str, Any]:
    model = run.model
    assert not isinstance(model, Import)
    heads, kv_heads = _heads(run, cut)
    width = math.lcm(HEAD_DIM * heads, cut.now("embed"))
    mlp_width = cut.now("mlp") * (width // cut.now("mlp") + 1)
    vocab_multiple = VOCAB_MULTIPLE * cut.now("vocab")
    is_padded = model.padded_vocab > model.vocab_size
    is_longer = model.learned_positions and model.max_seq_len > run.data.seq_len
    return _window(model) | {
        "num_layers": _num_layers(run, cut),
        "layers_multiple": cut.now("layers") if model.stacked_layers > model.num_layers else 1,
        "num_heads": heads,
        "num_kv_heads": model.num_kv_heads and kv_heads,
        "head_dim": model.head_dim and HEAD_DIM,
        "width": width,
        "mlp_width": mlp_width,
        "vocab_size": 4 * vocab_multiple - 3 * is_padded,
        "vocab_multiple": vocab_multiple if is_padded else 1,
        "max_seq_len": math.lcm(_seq_len(cut), cut.now("positions")) * (1 + is_longer),
    }


def _num_layers(run: Run, cut: _Cut) -> int:
    """Two; in a pipeline one for each part of it, and one more if they were not alike."""
    layers = run.model.num_layers  # pyright: ignore[reportAttributeAccessIssue]
    if run.parallel.pipeline is None:
        return min(layers, 2)
    chunks = run.parallel.pipeline.chunks_per_stage
    return cut.now("stage") * chunks + (layers % (cut.was("stage") * chunks) > 0)


def _pipeline(schedule: Schedule, num_stages: int) -> Schedule:
    """Twice as many microbatches as stages; orders that are written are of as many as they are."""
    if isinstance(schedule, Written):
        return schedule
    return schedule.model_copy(update={"num_microbatches": 2 * num_stages, "cut": None})


def _window(model: Decoder) -> dict[str, Any]:
    if model.window is None:
        return {}
    full_layers = tuple(layer for layer in model.full_layers if layer < 2)
    return {"window": min(model.window, SEQ_LEN // 2), "full_layers": full_layers}


def _heads(run: Run, cut: _Cut) -> tuple[int, int]:
    """Heads of queries, and of keys: fewer than shards, if they were."""
    model = run.model
    assert not isinstance(model, Import)
    heads, kv_heads = model.num_heads, model.kv_heads
    if cut.was("kv_heads") == cut.was("heads"):
        small = cut.small("kv_heads", kv_heads)
        return small * least_factor(heads // kv_heads), small
    small = math.lcm(cut.small("heads", heads), least_factor(heads // kv_heads))
    return small, math.gcd(small, max(1, kv_heads * cut.now("heads") // cut.was("heads")))


def _seq_len(cut: _Cut) -> int:
    return math.lcm(SEQ_LEN, cut.now("seq"), cut.now("norm_seq"))
