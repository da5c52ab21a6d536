"""Draws the results by client of federated learning, from the records of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from meshpar.records.loggers import Record

SIZE = (8.0, 3.6)
DOTS_PER_INCH = 120


def by_client(records: Sequence[Record]) -> Record | None:
    """The last record of the clients; None if the run is not federated."""
    return next((record for record in reversed(records) if record["kind"] == "clients"), None)


def draw_clients(records: Sequence[Record], name: str, out: Path) -> None:
    """Draws the accuracy of the last model for each client: sorted, and by the number of the client's examples.

    Args:
      records: of a federated run.
      name: of the run.
      out: the file; matplotlib knows its ending.
    """
    from matplotlib.figure import Figure

    clients = by_client(records)
    assert clients is not None
    accuracy = np.array(clients["accuracy"])
    figure: Any = Figure(figsize=SIZE, dpi=DOTS_PER_INCH, layout="constrained")
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
    figure.savefig(out)
