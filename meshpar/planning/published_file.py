"""The file of what others measured and published: `docs/published.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from meshpar.config import Config, load
from meshpar.config.loading import build
from meshpar.experiment.config import Run

FILE = Path(__file__).parent / "published.yaml"
_Real = Annotated[float, pydantic.Field(gt=0, strict=False)]


class Row(Config):
    """A published measurement."""

    name: str
    """What it is called here."""
    model: str
    """One of the file's models."""
    on: str
    """Hosts x devices on each."""
    keys: tuple[str, ...]
    """The layout, as `key=value` of a config."""
    held_out: bool = False
    """Whether the factors are fitted without it, as it was found after they had been."""
    overlaps: bool = False
    """Whether the source communicated beside products over `tensor` where meshpar does not, in a pipeline."""
    tokens_per_s: _Real | None = None
    """Tokens a second and device."""
    step_s: _Real | None = None
    """Seconds of a step."""
    teraflops: _Real | None = None
    """10^12 operations a second and device, counted as `counted` says."""
    counted: Literal["megatron", "needed"] = "needed"
    """`megatron`: equation 3 of arXiv:2104.04473, with recomputation. `needed`: 6 for each parameter and token, and
    causal attention's half of the scores; the source does not say."""
    memory_gib: _Real | None = None
    """Largest memory that the source's allocator reserved on a device."""


class Source(Config):
    """Measurements of one stack on one kind of machine."""

    name: str
    """Who, and when."""
    url: str
    """Where it is published."""
    chip: str
    """The chip, as a target names it."""
    attention: _Real | None = None
    """The share of the chip's peak that its attention kernels reach, where it is known. Default: the planner's."""
    gathers_8_bits: bool = False
    """Whether activations that are multiplied in 8 bits are rounded before they are gathered over `tensor`."""
    ring: bool = False
    """Whether attention over `context` goes around PyTorch's ring, see `planning.torch_ring`."""
    logit_bytes: dict[Literal["whole", "sharded"], int] | None = None
    """Bytes that its allocator reserves for a logit in the loss, where a device has all logits of a token, and where
    `tensor` shards them. Default: as many as meshpar's loss holds."""
    took: tuple[float, ...] = ()
    """The least and the largest of its steps over their estimates without factors: `plan --published` prints them."""
    base: Annotated[dict[str, Any], pydantic.Field(default_factory=dict)]
    """Keys of all rows."""
    rows: tuple[Row, ...]
    """The measurements."""


class Ratio(Config):
    """Two rows that differ in one thing."""

    name: str
    """What differs."""
    rows: tuple[str, str]
    """The row whose tokens a second are over those of the other."""


class Published(Config):
    """All published measurements."""

    models: dict[str, dict[str, Any]]
    """Name -> keys of the model."""
    sources: tuple[Source, ...]
    """Who measured."""
    ratios: tuple[Ratio, ...]
    """What is compared beside rows."""

    def run(self, source: Source, row: Row) -> Run:
        """The run of a row."""
        model = {"kind": "llama", "rope_theta": 500000.0, **self.models[row.model]}
        if model["kind"] != "llama":
            del model["rope_theta"]
        data = {
            "model": model,
            "data": {"kind": "synthetic", "vocab_size": model["vocab_size"], "batch_size": 1, "seq_len": 8192},
            "optim": {"kind": "adamw", "lr": 1e-4},
            "num_steps": 1,
            "run_dir": "unused",
            **source.base,
        }
        return build(Run, data, f"published: {row.name}", list(row.keys))


def read(path: Path = FILE) -> Published:
    """Reads the file of published measurements."""
    return load(Published, path)
