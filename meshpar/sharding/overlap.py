"""Which communication is hidden behind the products that it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshpar.config import Config
from meshpar.errors import Problems
from meshpar.sharding.rules import AxisRules

Way = Literal["none", "ring", "bidirectional"]


class TensorParallel(Config):
    """How layers with sequence parallelism communicate their activations."""

    overlap: Way = "none"
    """`ring`, `bidirectional`: in chunks that travel one way or both, each multiplied while others are on their way."""


class FullySharded(Config):
    """How layers communicate the weights that ZeRO-3 gathers."""

    overlap: Way = "none"
    """`ring`, `bidirectional`: in chunks that travel one way or both, each multiplied while others are on their way."""


@dataclass(frozen=True)
class Overlap:
    """Which communication is hidden behind the products that it is for, and whether chunks go one way or both.

    Args:
      tensor: that of activations, in layers with sequence parallelism.
      fsdp: the gathers of weights, under ZeRO-3.
    """

    tensor: Way = "none"
    fsdp: Way = "none"

    def check(self, rules: AxisRules, is_manual: bool, problems: Problems) -> None:
        """Adds why an overlap that is asked for cannot be: it would otherwise do nothing, and say nothing."""
        sequence = bool(rules.activation_axes("norm_seq"))
        stores = any(rules.storage_axes(dim) for dim in rules.table if dim != "batch")
        weights = rules.zero_stage == 3 and stores
        of_sequence, of_weights = self.tensor != "none", self.fsdp != "none"
        if of_sequence and not sequence:
            what = "the rules shard no norm_seq: each layer has the whole sequence"
            problems.add("tensor.overlap", what, "tensor.overlap=none, or the preset megatron_sp")
        if of_weights and not weights:
            what = "the rules gather no weights in the layers, again for the backward"
            problems.add("fsdp.overlap", what, "rules.zero=3" if stores else "fsdp.overlap=none, or the preset fsdp")
        if of_sequence and of_weights and sequence and weights:
            what = "tensor.overlap is on, too: a product goes by the chunks of one operand"
            problems.add("fsdp.overlap", what, "tensor.overlap=none, or fsdp.overlap=none")
        if (of_sequence or of_weights) and not is_manual:
            problems.add("lowering", "auto: GSPMD chooses how it communicates, and overlaps nothing", "lowering=manual")
