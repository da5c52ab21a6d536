"""The `parallel:` section of a config: the strategies of the manual lowering and their settings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic

from meshpar.collectives.reduction import Reduce
from meshpar.config import Coerced, Config, Section, default
from meshpar.errors import Problems
from meshpar.parallel.local_updates import LocalUpdates
from meshpar.parallel.pipeline.schedule import Pipeline as Schedule
from meshpar.parallel.sequence import SequenceLayout
from meshpar.sharding.rules import AxisRules

Overlap = Literal["none", "ring", "bidirectional"]


class TensorParallel(Config):
    """How layers with sequence parallelism communicate their activations."""

    overlap: Overlap = "none"
    """`ring`, `bidirectional`: chunks travel along a ring, in one or both directions, while others are multiplied."""


class FullySharded(Config):
    """How layers communicate the weights that ZeRO-3 shards."""

    overlap: Literal[Overlap, "prefetch"] = "none"
    """`ring`, `bidirectional`: as for `tensor`. `prefetch`: on GPUs and TPUs the compiler gathers the next layer's
    weights while a layer computes."""

    @property
    def in_chunks(self) -> bool:
        """Whether a product gathers its weights itself."""
        return self.overlap in ("ring", "bidirectional")


class ContextParallel(Config):
    """How devices that hold different parts of a row attend to each other's tokens.

    - `ring`: keys and values travel from device to device, while each attends to those that it has.
    - `all_gather`: each device gathers the keys and values of whole rows.
    - `ulysses`: devices exchange tokens for heads: in attention, each has whole rows of some heads.
    - `hybrid`: `ulysses` within groups of devices, and a ring across the groups.

    Source: Liu et al. 2023, arXiv:2310.01889 (ring); Grattafiori et al. 2024, arXiv:2407.21783 (all-gather); Jacobs et
    al. 2023, arXiv:2309.14509 (Ulysses); Fang and Zhao 2024, arXiv:2405.07719 (both).
    """

    shorthand: ClassVar = "kind"
    kind: Literal["ring", "all_gather", "ulysses", "hybrid"] = "ring"
    """How keys and values reach the queries of other devices."""
    layout: Literal["auto", "zigzag", "contiguous"] = "auto"
    """Which tokens a device holds. `zigzag`: a part from the front and one from the back, which balances the work.
    `auto`: contiguous under ulysses, else zigzag."""
    group: Annotated[int, pydantic.Field(ge=2)] | None = None
    """Number of neighbours on the axis that exchange heads under `hybrid`, such as the devices of a host."""

    @pydantic.model_validator(mode="after")
    def _fits_kind(self) -> ContextParallel:
        if self.kind == "ulysses" and self.layout == "zigzag":
            raise ValueError("layout=zigzag: ulysses gives all devices the same work anyway; leave layout=auto")
        if (self.kind == "hybrid") != (self.group is not None):
            what = "needs group, the devices that exchange heads" if self.group is None else "has no groups"
            raise ValueError(f"kind={self.kind} {what}; set kind=hybrid and group, or neither")
        return self

    def exchange(self, num_shards: int) -> int:
        """The number of devices that exchange heads with each other, if `num_shards` devices share a row."""
        return {"ulysses": num_shards, "hybrid": self.group or 1}.get(self.kind, 1)

    def arranged(self, num_shards: int) -> SequenceLayout:
        """The layout of the tokens of a row. Devices that exchange heads share a shard of the layout."""
        rings = num_shards // self.exchange(num_shards)
        return SequenceLayout(rings, is_zigzag=rings > 1 and self.layout != "contiguous")


class ExpertParallel(Config):
    """How tokens reach the devices of their experts, under `dispatch: dropless`.

    - `ragged`: each token travels to the devices of its experts, and the results travel back.
    - `gather`: each device gathers the tokens of all devices, applies its own experts, and scatters the sums. With n
      devices it sends n / per_token times as much as `ragged`.
    - `hierarchical`: `ragged` in two steps. A token travels once to each group of devices that has any of its experts,
      and inside the group to the devices of these experts. It sends less across groups than `ragged` if tokens use
      more experts than there are groups.
    - `auto`: `ragged` on GPUs and TPUs; `gather` on CPUs, whose compiler has no ragged all-to-all.
    """

    shorthand: ClassVar = "kind"
    kind: Literal["auto", "ragged", "gather", "hierarchical"] = "auto"
    """How tokens travel."""
    group: Annotated[int, pydantic.Field(ge=2)] | None = None
    """Number of neighbours on the axis in a group under `hierarchical`, such as the devices of a host."""

    @pydantic.model_validator(mode="after")
    def _fits_kind(self) -> ExpertParallel:
        if (self.kind == "hierarchical") != (self.group is not None):
            what = "needs group, the devices of a host" if self.group is None else "has no groups"
            raise ValueError(f"kind={self.kind} {what}; set kind=hierarchical and group, or neither")
        return self

    def check(self, dispatch: str, num_shards: int, problems: Problems) -> None:
        """Adds a problem for an exchange that would have no effect, or groups that do not divide the devices."""
        if self.kind != "auto" and dispatch != "dropless":
            what = f"{self.kind} is for dispatch=dropless: dispatch=capacity uses a dense all-to-all"
            problems.add("parallel.expert", what, "model.experts.dispatch=dropless, or no parallel.expert")
        if self.group and num_shards % self.group:
            what = f"{num_shards} devices hold the experts, which cannot be divided into groups of {self.group}"
            fits = [str(size) for size in range(2, num_shards + 1) if num_shards % size == 0]
            problems.add(
                "parallel.expert.group", what, f"group={' or '.join(fits)}" if fits else "parallel.expert=auto"
            )


class Parallel(Config):
    """The strategies of the manual lowering, one in each field."""

    tensor: Section[TensorParallel] = default(TensorParallel())
    """How tensor parallelism communicates activations."""
    fsdp: Section[FullySharded] = default(FullySharded())
    """How ZeRO-3 gathers weights."""
    context: Coerced[ContextParallel | None, str | dict[str, Any]] = default(None)
    """How devices that share a row attend to each other's tokens. Default: `ring`."""
    expert: Coerced[ExpertParallel | None, str | dict[str, Any]] = default(None)
    """How tokens reach the devices of their experts. Default: `auto`."""
    pipeline: Section[Schedule | None] = default(None)
    """The schedule of the stages on axis pipe. Default: no pipeline."""
    gradient_reduction: Section[Reduce | None] = default(None)
    """How gradients are summed over devices. Default: XLA's own collectives."""
    local: Section[LocalUpdates | None] = default(None)
    """Slices that train alone for some steps. Default: none."""

    @property
    def attention(self) -> ContextParallel:
        """How devices that share a row attend to each other's tokens: `context`, or its default."""
        return self.context or ContextParallel()

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches into which the pipeline cuts each part of a batch; 1 without a pipeline."""
        return self.pipeline.num_microbatches if self.pipeline else 1

    @property
    def overlaps(self) -> dict[str, str]:
        """Config key -> value of each overlap that is on."""
        ways = {"parallel.tensor.overlap": self.tensor.overlap, "parallel.fsdp.overlap": self.fsdp.overlap}
        return {key: way for key, way in ways.items() if way != "none"}

    @property
    def features(self) -> list[str]:
        """The keys of the strategies in use, as `parallel.combinations` names them: sections, and overlaps."""
        by_default = Parallel()
        sections = [name for name in type(self).model_fields if getattr(by_default, name) is None]
        overlaps = [("tensor.overlap", self.tensor.overlap != "none"), ("fsdp.overlap", self.fsdp.in_chunks)]
        used = [name for name in sections if getattr(self, name)] + [key for key, is_on in overlaps if is_on]
        return [f"parallel.{name}" for name in used]

    def check(self, rules: AxisRules, is_manual: bool, is_local: bool, problems: Problems) -> None:
        """Adds a problem for each strategy that would have no effect under these rules or this lowering.

        Args:
          is_local: whether the loss is written for local shards.
        """
        if is_local:
            self._check_local(problems)
        else:
            self._check_overlaps(rules, problems)
        if self.context is not None and not rules["seq"]:
            what = "nothing to share: the rules do not shard seq, so each device has whole rows"
            problems.add("parallel.context", what, "the preset context, or no parallel.context")
        if self._exchanges and not rules.dispatch_axes("experts"):
            what = "no tokens travel: the rules do not shard experts over an axis of the batch"
            problems.add("parallel.expert", what, "the preset experts, or no parallel.expert")
        if not is_manual:
            self._check_lowering(problems)

    @property
    def _exchanges(self) -> bool:
        """Whether another exchange of tokens is selected than the default."""
        return self.expert not in (None, ExpertParallel())

    def _check_local(self, problems: Problems) -> None:
        """Adds what a loss for local shards decides itself."""
        off = {**dict.fromkeys(self.overlaps, "none"), **({"parallel.expert": "null"} if self._exchanges else {})}
        for key, value in off.items():
            what = "a loss for local shards communicates by itself"
            problems.add(key, what, f"model.manual=false, or {key}={value}")

    def _check_overlaps(self, rules: AxisRules, problems: Problems) -> None:
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
        if tensor in self.overlaps and self.fsdp.in_chunks and has_sequence and gathers_weights:
            what = f"{tensor} is on too, but only one operand of a product can travel in chunks"
            problems.add(fsdp, what, f"{tensor}=none, or {fsdp}=none")

    def _check_lowering(self, problems: Problems) -> None:
        """Adds what GSPMD decides itself."""
        if self._exchanges:
            what = "under lowering: auto, GSPMD chooses how tokens reach their experts"
            problems.add("parallel.expert", what, "lowering=manual, or no parallel.expert")
        if self.context is not None:
            what = "under lowering: auto, GSPMD chooses how devices that share a row attend"
            problems.add("parallel.context", what, "lowering=manual, or no parallel.context")
        if self.overlaps:
            what = f"auto: GSPMD chooses the communication, so {' and '.join(self.overlaps)} would have no effect"
            problems.add("lowering", what, "lowering=manual")
        if self.pipeline:
            problems.add("parallel.pipeline", "GSPMD has no pipeline", "lowering=manual, or parallel.pipeline=null")
        if self.gradient_reduction:
            key = "parallel.gradient_reduction"
            what = "under lowering: auto, XLA reduces gradients as it chooses"
            problems.add(key, what, f"lowering=manual, or {key}=null")
