"""The `parallel:` section of a config: the strategies of the manual lowering and their settings."""

from __future__ import annotations

from typing import Literal

from meshpar.collectives.reduction import Reduce
from meshpar.config import Config, Section, default
from meshpar.errors import Problems
from meshpar.parallel.pipeline.schedule import Pipeline as Schedule
from meshpar.sharding.rules import AxisRules

Overlap = Literal["none", "ring", "bidirectional"]


class TensorParallel(Config):
    """How layers with sequence parallelism communicate their activations."""

    overlap: Overlap = "none"
    """`ring`, `bidirectional`: chunks travel round a ring, in one or both directions, while others are multiplied."""


class FullySharded(Config):
    """How layers communicate the weights that ZeRO-3 shards."""

    overlap: Overlap = "none"
    """`ring`, `bidirectional`: chunks travel round a ring, in one or both directions, while others are multiplied."""


class Parallel(Config):
    """The strategies of the manual lowering. Each reads its own field; all receive the whole object."""

    tensor: Section[TensorParallel] = default(TensorParallel())
    fsdp: Section[FullySharded] = default(FullySharded())
    pipeline: Section[Schedule | None] = default(None)
    """The schedule of the stages on axis pipe, such as `{kind: 1f1b, num_microbatches: 16}`. Default: no pipeline."""
    gradient_reduction: Section[Reduce | None] = default(None)
    """How gradients are summed over devices. Default: XLA's own collectives."""

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches into which the pipeline cuts each part of a batch; 1 without a pipeline."""
        return self.pipeline.num_microbatches if self.pipeline else 1

    @property
    def overlaps(self) -> dict[str, str]:
        """Config key -> value of each overlap that is on."""
        ways = {"parallel.tensor.overlap": self.tensor.overlap, "parallel.fsdp.overlap": self.fsdp.overlap}
        return {key: way for key, way in ways.items() if way != "none"}

    def check(self, rules: AxisRules, is_manual: bool, problems: Problems) -> None:
        """Adds a problem for each strategy that would have no effect under these rules or this lowering."""
        has_sequence = bool(rules.partition_axes("residual_seq"))
        has_storage = any(rules.storage_axes(dim) for dim in rules.table if dim != "batch")
        gathers_weights = rules.zero_stage == 3 and has_storage
        tensor, fsdp = (f"parallel.{name}.overlap" for name in ("tensor", "fsdp"))
        if tensor in self.overlaps and not has_sequence:
            what = "nothing to overlap: the rules do not shard residual_seq, so each layer has the whole sequence"
            problems.add(tensor, what, f"{tensor}=none, or the preset megatron_sp")
        if fsdp in self.overlaps and not gathers_weights:
            what = "nothing to overlap: the rules do not gather weights in the layers, as ZeRO-3 does"
            problems.add(fsdp, what, "rules.zero=3" if has_storage else f"{fsdp}=none, or the preset fsdp")
        if {tensor, fsdp} <= {*self.overlaps} and has_sequence and gathers_weights:
            what = f"{tensor} is on too, but only one operand of a product can travel in chunks"
            problems.add(fsdp, what, f"{tensor}=none, or {fsdp}=none")
        if is_manual:
            return
        if self.overlaps:
            what = "auto: GSPMD chooses the communication, so overlap has no effect"
            problems.add("lowering", what, "lowering=manual")
        if self.pipeline:
            problems.add("parallel.pipeline", "GSPMD knows no pipeline", "lowering=manual, or parallel.pipeline=null")
        if self.gradient_reduction:
            key = "parallel.gradient_reduction"
            what = "under lowering: auto, XLA reduces gradients as it chooses"
            problems.add(key, what, f"lowering=manual, or {key}=null")
