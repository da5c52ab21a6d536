"""Compares methods of federated learning on scikit-learn's digits: accuracy on held-out digits over rounds.

    python scripts/compare_federated.py docs/guides/federated-methods.png

It simulates 100 clients, of which ten take part in a round, on four devices. Then it times ten rounds of 1000 clients.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from meshpar import simulate
from meshpar.federated import Federated, federation

NUM_ROUNDS, AIM, NUM_LAST = 60, 0.9, 5
FEW_CLASSES = {"num": 100, "split": {"kind": "dirichlet", "alpha": 0.1}}
FEDAVG: dict[str, dict[str, Any]] = {
    f"{split}, {epochs} epoch{'s' if epochs > 1 else ''}": {"clients": clients, "epochs": epochs}
    for split, clients in {"iid": 100, "alpha 0.1": FEW_CLASSES}.items()
    for epochs in (1, 5)
}
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"method": "fedavg"},
    "FedProx": {"method": {"kind": "fedprox", "mu": 0.1}},
    "FedAdam": {"method": {"kind": "fedadam", "server_lr": 0.03}},
    "SCAFFOLD": {"method": "scaffold"},
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def config_of(epochs: int = 5, **settings: Any) -> Federated:
    """The setting of the guide, with changes."""
    local = {"lr": 0.1, "epochs": epochs, "batch_size": 10}
    fixed = {"data": "digits", "clients": FEW_CLASSES, "model": [32], "local": local, "mesh": {"data": 4}}
    return Federated(**{**fixed, "num_rounds": NUM_ROUNDS, "run_dir": "unused", **settings})


def accuracies(config: Federated) -> list[float]:
    """The accuracy on held-out examples after each round."""
    trained, held_out = federation(config)
    return [float(trained.evaluate(p.server.params, held_out)[1].mean()) for p in trained.play(trained.init())]


def row(name: str, found: list[float]) -> str:
    first = next((number for number, accuracy in enumerate(found, 1) if accuracy >= AIM), None)
    return f"| {name} | {found[9]:.3f} | {found[39]:.3f} | {np.mean(found[-NUM_LAST:]):.3f} | {first or ''} |"


def draw(panels_of: dict[str, dict[str, list[float]]], out: Path) -> None:
    """Draws a panel for each table."""
    figure: Any = Figure(figsize=(9.0, 3.8), dpi=120, layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, curves) in zip(panels, panels_of.items(), strict=True):
        for (name, found), colour in zip(curves.items(), COLOURS, strict=True):
            axes.plot(range(1, len(found) + 1), found, color=colour, label=name)
        axes.set(title=title, xlabel="rounds", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("accuracy on held-out digits")
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    simulate(4)
    tables = {"FedAvg": FEDAVG, "methods at alpha 0.1, 5 epochs": METHODS}
    found: dict[str, dict[str, list[float]]] = {}
    for title, cases in tables.items():
        print(f"| {title} | round 10 | round 40 | last {NUM_LAST} | first with {AIM:.2f} |\n|---|---|---|---|---|")
        found[title] = {}
        for name, settings in cases.items():
            found[title][name] = accuracies(config_of(**settings))
            print(row(name, found[title][name]), flush=True)
    draw(found, arguments.picture)
    data = {"kind": "clusters", "num_examples": 20_000, "num_features": 64, "held_out": 1000}
    everybody = {"clients": 1000, "clients_per_round": 1000, "num_rounds": 10, "epochs": 1}
    begun = time.perf_counter()
    last = accuracies(config_of(data=data, **everybody))[-1]
    print(f"1000 clients, 10 rounds: {time.perf_counter() - begun:.1f} s, accuracy {last:.3f}")


if __name__ == "__main__":
    main()
