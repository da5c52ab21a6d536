"""Plots a benchmark of a server."""

from __future__ import annotations

import math
from pathlib import Path

from meshpar.serve.bench import ServeBench


def plot_serve(bench: ServeBench, path: Path) -> None:
    """Plots times and tokens a second against the rate of requests, beside batches and one prompt at a time."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    served = [load for load in bench.loads if math.isfinite(load.rate)]
    rates = [load.rate for load in served]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    first, between, tokens = figure.subplots(1, 3)
    for panel, name in ((first, "first_s"), (between, "between_s")):
        for i, label in enumerate(("median", "90 %")):
            panel.plot(rates, [1000 * getattr(load, name)[i] for load in served], "o-", label=label)
        panel.set(yscale="log", ylabel="ms")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("")
    first.set_title("time to the first token")
    between.set_title("time between tokens")
    tokens.set(title="tokens/s", ylim=(0, 1.05 * max(load.tokens_per_s for load in bench.loads)))
    tokens.plot(rates, [load.tokens_per_s for load in served], "o-", label="server")
    others = {"server, all at once": bench.load("server")}
    others |= {name: bench.load(name) for name in ("batches", "one by one")}
    for i, (label, load) in enumerate(others.items()):
        tokens.axhline(load.tokens_per_s, linestyle="--", color=f"C{i}", label=label)
    for panel in (first, between, tokens):
        panel.set(xscale="log", xlabel="requests/s")
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
        panel.set_xticks([], minor=True)
        panel.legend(fontsize=8)
    figure.savefig(path)
