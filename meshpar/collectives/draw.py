"""A bench as a picture."""

from __future__ import annotations

from pathlib import Path

from meshpar.collectives.bench import Bench


def draw(told: Bench, path: Path) -> None:
    """Time against size, a panel for each operation: points are measured, dashed lines the model's."""
    from matplotlib.figure import Figure

    operations = list(dict.fromkeys(one.operation for one in told.timings))
    figure = Figure(figsize=(5.5 * len(operations), 4.2), layout="constrained")
    for panel, operation in zip(figure.subplots(1, len(operations), squeeze=False)[0], operations, strict=True):
        for name in dict.fromkeys(one.algorithm for one in told.timings if one.operation == operation):
            rows = [one for one in told.timings if (one.operation, one.algorithm) == (operation, name)]
            sizes = [one.num_bytes for one in rows]
            [line] = panel.loglog(sizes, [one.measured_s for one in rows], "o-", label=name)
            if rows[0].modelled_s is not None:
                panel.loglog(sizes, [one.modelled_s for one in rows], "--", color=line.get_color(), alpha=0.6)
        panel.set(title=f"{operation}, {told.num_devices} x {told.device}", xlabel="bytes", ylabel="seconds")
        panel.legend()
    figure.savefig(path)
