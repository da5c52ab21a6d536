"""Draws how the load of experts changes over the steps of a run, from its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from meshpar.records.loggers import Record

LOAD = "experts_load"
SIZE = (8.0, 6.0)
DOTS_PER_INCH = 120
MOST_LABELS = 24


def loads(records: Sequence[Record]) -> tuple[list[int], np.ndarray] | None:
    """The recorded steps, and the loads [steps, layers, experts] as multiples of the mean; None without experts."""
    found = [record for record in records if record["kind"] == "train" and record.get(LOAD)]
    if not found:
        return None
    parts = np.array([record[LOAD] for record in found], float)
    return [record["step"] for record in found], parts * parts.shape[-1]


def layers_with_experts(records: Sequence[Record]) -> list[int]:
    """The indices of the layers with experts, from the recorded config."""
    from meshpar.nn.experts.config import Experts  # with JAX, which no other plot needs

    model = next(record["config"]["model"] for record in records if record["kind"] == "run")
    experts = Experts.model_validate(model["experts"])
    return [layer for layer in range(model["num_layers"]) if experts.are_in(layer)]


def draw_loads(records: Sequence[Record], name: str, out: Path) -> None:
    """Draws the loads, with a row of pixels for each expert, layer below layer, and a column for each recorded step.

    Args:
      records: of a run with experts.
      name: of the run.
      out: the file; matplotlib knows its ending.
    """
    from matplotlib.figure import Figure

    found = loads(records)
    assert found is not None
    steps, load = found
    _, num_layers, num = load.shape
    figure: Any = Figure(figsize=SIZE, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    edges = [*steps, steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else 1)]
    # A diverging scale around 1, the mean: an expert without tokens is as far from it as one with twice the mean.
    picture = axes.pcolormesh(
        edges, np.arange(num_layers * num + 1), load.reshape(len(steps), -1).T, cmap="PuOr_r", vmin=0, vmax=2,
        rasterized=True,
    )  # fmt: skip
    every = -(-num_layers // MOST_LABELS)
    labels = layers_with_experts(records)[::every]
    axes.set_yticks([num * every * i + num / 2 for i in range(len(labels))], labels)
    axes.hlines(np.arange(1, num_layers) * num, edges[0], edges[-1], color="white", linewidth=0.5)
    axes.invert_yaxis()
    axes.set(xlabel="step", ylabel=f"layer, with {num} experts each", title=name)
    figure.colorbar(picture, extend="max", label="tokens of an expert, as a multiple of the mean")
    figure.savefig(out)
