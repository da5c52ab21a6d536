"""Draws the metric of a sweep over each of its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshpar.sweep.grid import text
from meshpar.sweep.outcome import Swept

SIZE = 3.6
DOTS_PER_INCH = 120
LOGARITHMIC = 50
"""The ratio of the largest to the smallest value from which on an axis is logarithmic."""


def draw(swept: Swept, out: Path) -> bool:
    """Draws a dot for each run that ended, over the values of each key. Returns False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    done = [one for one in swept.outcomes if not one.why and one.metrics.get(swept.metric) is not None]
    keys = list(swept.outcomes[0].point.values)
    figure: Any = Figure(figsize=(SIZE * max(len(keys), 1.5), SIZE), dpi=DOTS_PER_INCH, layout="constrained")
    panels = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
    for axes, key in zip(panels, keys, strict=True):
        values = [one.point.values[key] for one in swept.outcomes]
        is_number = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
        of = (lambda value: value) if is_number else text
        if is_number and min(values) > 0 and max(values) >= LOGARITHMIC * min(values):
            axes.set_xscale("log")
        found = [one.metrics[swept.metric] for one in done]
        axes.plot([of(one.point.values[key]) for one in done], found, "o", color="#0072B2")
        axes.set(xlabel=key)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(swept.metric)
    figure.savefig(out)
    return True
