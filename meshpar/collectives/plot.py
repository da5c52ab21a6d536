"""Plots a benchmark of the collectives."""

from __future__ import annotations

from pathlib import Path

from meshpar.collectives.bench import Bench


def plot_bench(bench: Bench, path: Path) -> None:
    """Plots time against size, one panel per operation: points are measured, dashed lines are modelled."""
    from matplotlib.figure import Figure

    operations = list(dict.fromkeys(timing.operation for timing in bench.timings))
    figure = Figure(figsize=(5.5 * len(operations), 4.2), layout="constrained")
    for panel, operation in zip(figure.subplots(1, len(operations), squeeze=False)[0], operations, strict=True):
        for name in dict.fromkeys(timing.algorithm for timing in bench.timings if timing.operation == operation):
            timings = [t for t in bench.timings if (t.operation, t.algorithm) == (operation, name)]
            sizes = [timing.num_bytes for timing in timings]
            [line] = panel.loglog(sizes, [timing.measured_s for timing in timings], "o-", label=name)
            if timings[0].modelled_s is not None:
                panel.loglog(sizes, [t.modelled_s for t in timings], "--", color=line.get_color(), alpha=0.6)
        panel.set(title=f"{operation}, {bench.num_devices} x {bench.device}", xlabel="bytes", ylabel="seconds")
        panel.legend()
    figure.supxlabel(f"points: measured; dashed: predicted from the table of the algorithm\n{bench.about}", size=9)
    figure.savefig(path)
