"""The layouts that a plan considers: every way to divide the devices among the axes, with its rules and settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

from jax.sharding import AbstractMesh

from meshpar.experiment.config import Run
from meshpar.mesh.layout import AXES
from meshpar.models.contract import LayerStack
from meshpar.models.decoder import DecoderModel
from meshpar.parallel.strategies import Overlap
from meshpar.planning.machine import Machine, Sizes, hosts

SHARDING = ("zero1", "zero2", "fsdp")
SCHEDULES = ("1f1b", "interleaved", "zb_h1", "zbv")
TWO_CHUNKS = ("interleaved", "zbv")
"""Schedules with two chunks of layers on each stage."""
PER_STAGE = (1, 2, 4, 8)
"""Microbatches of a pipeline over its stages."""
ROWS = (1, 2, 4)
"""Rows of a microbatch of a pipeline, beside those that PER_STAGE gives."""
PASSES = (1, 2, 4, 8, 16)
"""Microbatches without a pipeline, whose gradients are summed."""
REMAT = ("none", "full")
OVERLAPS: tuple[Overlap, ...] = ("none", "bidirectional")
"""How activations travel over `tensor`."""


@dataclass(frozen=True)
class Layout:
    """One layout, a point of the space that a plan searches.

    Args:
      sizes: (axis, size) of the axes larger than 1.
      sharding: the preset of parameters and optimizer state over `fsdp`; empty without that axis.
      schedule: kind of the pipeline; empty without one.
      num_microbatches: of the pipeline, or of the sum of gradients.
      remat: what blocks recompute; None for the run's own setting.
      padded_to: the number of stages that do not divide the stored layers, which are padded; 0 if they divide them.
      cut: the number of layers of each virtual stage; empty for the schedule's default.
      dcn: (axis, size) of the part of `sizes` that is across hosts; empty where hosts follow the axes' order.
      overlap: whether activations travel over `tensor` in chunks, beside products.
      shares_tokens: whether devices along `tensor` share the tokens of a row between products.
    """

    sizes: tuple[tuple[str, int], ...]
    sharding: str = ""
    schedule: str = ""
    num_microbatches: int = 1
    remat: str | None = None
    padded_to: int = 0
    cut: tuple[int, ...] = ()
    dcn: Sizes = ()
    overlap: Overlap = "none"
    shares_tokens: bool = True

    @cached_property
    def mesh(self) -> dict[str, int]:
        return dict(self.sizes)

    def size(self, axis: str) -> int:
        return self.mesh.get(axis, 1)

    @property
    def batch_shards(self) -> int:
        return math.prod(self.size(axis) for axis in ("replica", "data", "fsdp", "expert"))

    @property
    def abstract_mesh(self) -> AbstractMesh:
        return _abstract(self.sizes)

    @property
    def gathers_rows(self) -> bool:
        """Whether devices that share rows gather them: beside a pipeline they would exchange keys in pairs."""
        return self.size("pipe") > 1 and self.size("context") > 1

    @property
    def can_overlap(self) -> bool:
        """Whether activations may travel in chunks: beside a pipeline that is refused."""
        return self.size("tensor") > 1 and self.shares_tokens and not self.schedule

    @property
    def presets(self) -> list[str]:
        """The rules' presets, one for each axis that needs one."""
        tensor = "megatron_sp" if self.shares_tokens else "megatron"
        of_axis = {"tensor": tensor, "context": "context", "expert": "experts", "pipe": "pipeline"}
        found = [self.sharding] if self.sharding else []
        return found + [preset for axis, preset in of_axis.items() if axis in self.mesh] or ["replicated"]

    @property
    def changes(self) -> dict[str, Any]:
        """Section or key -> its value in the config."""
        pipeline: dict[str, Any] | None = None
        if self.schedule:
            pipeline = {"kind": self.schedule, "num_microbatches": self.num_microbatches}
            pipeline |= {"cut": list(self.cut)} if self.cut else {}
        across = dict(self.dcn)
        inside = {axis: size // across.get(axis, 1) for axis, size in self.sizes if size > across.get(axis, 1)}
        changes = {
            "mesh": inside | ({"dcn": across} if across else {}),
            "rules": self.presets,
            "parallel.tensor": {"overlap": self.overlap},
            "parallel.pipeline": pipeline,
            "num_microbatches": 1 if self.schedule else self.num_microbatches,
        }
        if self.gathers_rows:
            changes["parallel.context"] = {"kind": "all_gather"}
        if self.padded_to:
            changes["model.pad_layers_to_multiple"] = self.padded_to
        return changes | ({} if self.remat is None else {"model.remat": self.remat})

    def applied(self, run: Run) -> Run:
        """The run in this layout.

        Raises:
          ConfigError: the layout does not fit the run.
        """
        data = run.model_dump(mode="json")
        own = {dim: axes for dim, axes in data["rules"].items() if dim not in ("preset", "zero")}
        for key, value in (self.changes | {"rules": {"preset": self.presets, **own}}).items():
            *sections, last = key.split(".")
            section = data
            for name in sections:
                section = section[name]
            section[last] = value
        return Run.model_validate(data)

    def __str__(self) -> str:
        """As overrides of a command line."""
        changes = self.changes
        words = [f"'mesh={_flow(changes['mesh'])}'", f"rules=[{','.join(self.presets)}]"]
        if self.schedule:
            words.append(f"'parallel.pipeline={_flow(changes['parallel.pipeline'])}'")
        elif self.num_microbatches > 1:
            words.append(f"num_microbatches={self.num_microbatches}")
        if self.overlap != "none":
            words.append(f"parallel.tensor.overlap={self.overlap}")
        if self.gathers_rows:
            words.append("parallel.context=all_gather")
        if self.padded_to:
            words.append(f"model.pad_layers_to_multiple={self.padded_to}")
        return " ".join(words if self.remat is None else [*words, f"model.remat={self.remat}"])


def _flow(section: dict[str, Any]) -> str:
    """A section in YAML, on one line."""
    parts = [f"{key}: {_flow(value) if isinstance(value, dict) else value}" for key, value in section.items()]
    return f"{{{', '.join(parts)}}}"


def remats(run: Run) -> tuple[str | None, ...]:
    """The settings of remat to try: the run's own, nothing and everything. Only the first for a model without remat."""
    if not isinstance(run.model, DecoderModel):
        return (None,)
    own = run.model.remat
    first = None if own.save or own.offload else own.policy
    return (first, *(policy for policy in REMAT if policy != first))


@cache
def _abstract(sizes: tuple[tuple[str, int], ...]) -> AbstractMesh:
    mesh = dict(sizes)
    return AbstractMesh(tuple(mesh.get(axis, 1) for axis in AXES), AXES)


def layouts(
    run: Run, num_devices: int, per_host: int, stack: LayerStack | None = None, has_experts: bool = False,
    shares_tokens: bool = True,
) -> Iterator[Layout]:  # fmt: skip
    """Every layout whose sizes divide the batch, the rows and the layers; `prepare` refuses those that do not fit.

    A tensor axis stays inside a host, where its activations travel fast.

    Args:
      per_host: devices that the fast network joins.
      stack: the layers that a pipeline divides. Default: those that the model states.
      has_experts: whether the axis `expert` has experts to divide.
      shares_tokens: see `Layout`.
    """
    stack = stack or run.model.layer_stack()
    for sizes in _divided(num_devices, ("data", "fsdp", "pipe", "expert", "context", "tensor")):
        large = tuple((axis, size) for axis, size in sizes.items() if size > 1)
        batch_shards = sizes["data"] * sizes["fsdp"] * sizes["expert"]
        rows, is_uneven = divmod(run.data.batch_size, batch_shards)
        if is_uneven or sizes["tensor"] > per_host or (sizes["expert"] > 1 and not has_experts):
            continue
        if run.data.seq_len % (sizes["context"] * (sizes["tensor"] if shares_tokens else 1)):
            continue
        padded_to = 0
        if sizes["pipe"] > 1:
            if not stack or stack.num_layers < sizes["pipe"]:
                continue
            padded_to = sizes["pipe"] if stack.can_pad and stack.lacking(sizes["pipe"]) else 0
        shardings = SHARDING if sizes["fsdp"] > 1 else ("",)
        for sharding, remat, (schedule, count) in product(shardings, remats(run), _passes(sizes["pipe"], rows)):
            if schedule in TWO_CHUNKS and stack and stack.num_layers < 2 * sizes["pipe"]:
                continue
            yield Layout(large, sharding, schedule, count, remat, padded_to, shares_tokens=shares_tokens)


def _stages_across(sizes: Sizes, num_hosts: int) -> Sizes:
    """The part of the sizes that is across hosts, stages first; empty without stages, or if hosts cannot be divided."""
    mesh = dict(sizes)
    across: dict[str, int] = {}
    left = num_hosts if "pipe" in mesh else 1
    for axis in ("pipe", "data", "fsdp", "expert", "context"):
        across[axis] = math.gcd(left, mesh.get(axis, 1))
        left //= across[axis]
    return tuple((axis, size) for axis, size in across.items() if size > 1) if left == 1 else ()


def variants(layout: Layout, machine: Machine, overlaps: Sequence[Overlap]) -> Iterator[Layout]:
    """The layout with its stages across hosts, if they can be, and with each overlap that a plan may choose."""
    *_, dcn = placements(layout.sizes, machine.per_host)
    for overlap in overlaps if machine.overlaps and layout.can_overlap else (layout.overlap,):
        yield replace(layout, dcn=dcn, overlap=overlap) if (dcn, overlap) != (layout.dcn, layout.overlap) else layout


@cache
def placements(sizes: Sizes, per_host: int) -> list[Sizes]:
    """The parts of the sizes that may be across hosts: none, and stages first if that numbers hosts in another way."""
    across = _stages_across(sizes, math.prod(size for _, size in sizes) // per_host)
    whole = _abstract(sizes).shape_tuple
    alike = not across or (hosts(whole, (), per_host) == hosts(whole, across, per_host)).all()
    return [()] if alike else [(), across]


def _divided(count: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Every way to write a number as a product of one size for each axis."""
    if len(axes) == 1:
        yield {axes[0]: count}
        return
    for size in range(1, count + 1):
        if count % size == 0:
            for rest in _divided(count // size, axes[1:]):
                yield {axes[0]: size, **rest}


def _passes(num_stages: int, rows: int) -> list[tuple[str, int]]:
    """(schedule, number of microbatches) for a device with so many rows."""
    if num_stages == 1:
        return [("", count) for count in PASSES if rows % count == 0]
    counts = {count * num_stages for count in PER_STAGE} | {rows // size for size in ROWS}
    fitting = sorted(count for count in counts if count >= num_stages and rows % count == 0)
    both = product(SCHEDULES, fitting)
    return [(schedule, count) for schedule, count in both if schedule != "interleaved" or count % num_stages == 0]
