"""Draws what only some runs record: the load of experts over the steps, and the results by client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from meshpar.records.loggers import Record

LOAD = "experts_load"
MOST_LABELS = 24


def loads(records: Sequence[Record]) -> tuple[list[int], np.ndarray] | None:
    """The recorded steps, and the loads [steps, layers, experts] as multiples of the mean; None without experts."""
    found = [record for record in records if record["kind"] == "train" and record.get(LOAD)]
    if not found:
        return None
    parts = np.array([record[LOAD] for record in found], float)
    return [record["step"] for record in found], parts * parts.shape[-1]


def draw_loads(found: tuple[list[int], np.ndarray], records: Sequence[Record], name: str, figure: Any) -> None:
    """Draws the loads, with a row of pixels for each expert, layer below layer, and a column for each recorded step."""
    from meshpar.nn.experts.config import Experts  # with JAX, which no other plot needs

    steps, load = found
    _, num_layers, num = load.shape
    model = next(record["config"]["model"] for record in records if record["kind"] == "run")
    experts = Experts.model_validate(model["experts"])
    layers = [layer for layer in range(model["num_layers"]) if experts.are_in(layer)]
    axes = figure.subplots()
    edges = [*steps, steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else 1)]
    # A diverging scale around 1, the mean: an expert without tokens is as far from it as one with twice the mean.
    picture = axes.pcolormesh(
        edges, np.arange(num_layers * num + 1), load.reshape(len(steps), -1).T, cmap="PuOr_r", vmin=0, vmax=2,
        rasterized=True,
    )  # fmt: skip
    every = -(-num_layers // MOST_LABELS)
    labels = layers[::every]
    axes.set_yticks([num * every * i + num / 2 for i in range(len(labels))], labels)
    axes.hlines(np.arange(1, num_layers) * num, edges[0], edges[-1], color="white", linewidth=0.5)
    axes.invert_yaxis()
    axes.set(xlabel="step", ylabel=f"layer, with {num} experts each", title=name)
    figure.colorbar(picture, extend="max", label="tokens of an expert, as a multiple of the mean")


def by_client(records: Sequence[Record]) -> Record | None:
    """The last record of the clients; None if the run is not federated."""
    return next((record for record in reversed(records) if record["kind"] == "clients"), None)


def draw_clients(clients: Record, records: Sequence[Record], name: str, figure: Any) -> None:
    """Draws the accuracy of the last model for each client: sorted, and by the number of the client's examples."""
    accuracy = np.array(clients["accuracy"])
    left, right = figure.subplots(1, 2, sharey=True)
    part = np.arange(1, len(accuracy) + 1) / len(accuracy)
    left.step(part, np.sort(accuracy), where="pre", color="#0072B2")
    left.set(xlabel="part of the clients", ylabel="accuracy on own examples", xlim=(0, 1), ylim=(0, 1.03))
    rounds = np.array(clients["rounds"])
    dots = right.scatter(clients["examples"], accuracy, c=rounds, s=14, cmap="viridis", vmin=0)
    right.set(xlabel="examples of the client", xlim=(0, None))
    figure.colorbar(dots, label="rounds that it took part in")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(name)
