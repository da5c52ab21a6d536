"""Plots the loss and the learning rate of runs from their records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshpar.errors import ConfigError, Problems
from meshpar.records.file import FILE, read, series
from meshpar.records.further_plots import by_client, draw_clients, draw_loads, loads

if TYPE_CHECKING:
    from meshpar.records.loggers import Record

SIZE = (8.0, 6.0)
DOTS_PER_INCH = 120
# Okabe and Ito's colours, which can be distinguished with every colour vision; without yellow, which is pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", ":", "-.")
FURTHER: dict[str, tuple[Callable[..., Any], Callable[..., None], tuple[float, float]]] = {
    "experts": (loads, draw_loads, SIZE),
    "clients": (by_client, draw_clients, (8.0, 3.6)),
}
"""Further pictures: what of its records a run needs for one, what draws it, and its size in inches."""


def draw(run_dirs: Sequence[Path], out: Path) -> list[Path]:
    """Plots training and held-out loss, and below them the learning rate, over the steps of one or more runs.

    For each run with experts a further picture shows their load, for each federated run one its clients. Returns the
    paths of all pictures.

    Args:
      run_dirs: directories that contain `metrics.jsonl`; the legend names the runs after them.
      out: a file; its ending is one of matplotlib's formats, such as `.png`.

    Raises:
      ConfigError: lists every directory without records; or matplotlib is not installed; or `out` cannot be written.
    """
    runs = dict(zip(_names(run_dirs), _all_records(run_dirs), strict=True))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot: matplotlib is not installed; pip install 'meshpar[plot]'") from None
    figure: Any = Figure(figsize=SIZE, dpi=DOTS_PER_INCH, layout="constrained")
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for i, (name, records) in enumerate(runs.items()):
        _curves(losses, rates, name, records, COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)])
    configs = [record["config"] for record in chain(*runs.values()) if record["kind"] == "run"]
    is_other = any((config.get("loss") or {}).get("target") or "clients" in config for config in configs)
    losses.set_ylabel("loss" if is_other else "loss (nats per token)")
    rates.set(ylabel="learning rate", xlabel="step")
    rates.set_ylim(bottom=0)
    rates.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    for axes in (losses, rates):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)  # below both, where it hides no curve
    try:
        figure.savefig(out)
        further = [path for what in FURTHER for path in _further(what, runs, out)]
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    except ValueError as error:  # matplotlib does not know the ending
        raise ConfigError(f"--out {out}: {error}") from None
    return [out, *further]


def _further(what: str, runs: Mapping[str, list[Record]], out: Path) -> Iterator[Path]:
    """Draws a picture of each run that has one. Yields the paths."""
    from matplotlib.figure import Figure

    found_in, drawn, size = FURTHER[what]
    having = [(name, records, found) for name, records in runs.items() if (found := found_in(records))]
    for i, (name, records, found) in enumerate(having):
        figure: Any = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
        drawn(found, records, name, figure)
        path = out.with_stem(f"{out.stem}-{what}{i or ''}")
        figure.savefig(path)
        yield path


def _curves(losses: Any, rates: Any, name: str, records: Sequence[Record], colour: str, style: str) -> None:
    steps, held_out = series(records, "evaluation", "loss")
    losses.plot(*series(records, "train", "loss"), color=colour, linestyle=style, label=f"{name}, training")
    losses.plot(steps, held_out, color=colour, marker="o", linestyle="none", label=f"{name}, held out")
    rates.plot(*series(records, "train", "lr"), color=colour, linestyle=style)


def _all_records(run_dirs: Sequence[Path]) -> list[list[Record]]:
    problems = Problems()
    found = []
    for run_dir in run_dirs:
        file = run_dir / FILE
        try:
            before = len(problems)
            found.append(read(file, problems))
            if len(problems) == before and not series(found[-1], "train", "loss")[0]:
                problems.add(str(file), "has no record of a training step", "the run_dir of a run that trained")
        except OSError as error:
            problems.add(str(file), f"cannot be read: {error.strerror}", "the run_dir of a run that trained")
    problems.raise_any(ConfigError, "there is nothing to plot:")
    return found


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many parts as make the names differ."""
    for length in range(1, max(len(path.absolute().parts) for path in run_dirs)):
        names = ["/".join(path.absolute().parts[-length:]) for path in run_dirs]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({i})" for i, path in enumerate(run_dirs, start=1)]
