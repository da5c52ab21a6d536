"""A plot has the recorded numbers; how it looks is judged by eye, in docs/guides/curves.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from meshpar.records.curves import draw


def write(run_dir: Path, *records: dict) -> Path:
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run_dir


def trained(run_dir: Path, first: float, **config) -> Path:
    steps = [{"kind": "train", "step": i, "loss": first / i, "lr": 1e-3 * i} for i in (1, 2, 4)]
    return write(
        run_dir, {"kind": "run", "step": 0, "config": config}, *steps,
        {"kind": "train", "step": 5, "loss": None, "lr": 1e-3}, {"kind": "evaluation", "step": 4, "loss": first},
    )  # fmt: skip


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a: (figures.append(self), save(self, *a))[1])
    return figures


def test_every_run_has_its_curves_and_its_name(tmp_path, drawn):
    runs = [trained(tmp_path / "a" / "run", 8.0), trained(tmp_path / "b" / "run", 4.0)]
    draw(runs, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    losses, rates = drawn[0].axes
    found = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in losses.lines}
    assert found == {
        "a/run, training": ([1, 2, 4], [8.0, 4.0, 2.0]),
        "a/run, held out": ([4], [8.0]),
        "b/run, training": ([1, 2, 4], [4.0, 2.0, 1.0]),
        "b/run, held out": ([4], [4.0]),
    }
    assert [text.get_text() for text in drawn[0].legends[0].texts] == list(found)
    assert list(rates.lines[0].get_ydata()) == [1e-3, 2e-3, 4e-3, 1e-3]
    assert (losses.get_ylabel(), rates.get_ylabel(), rates.get_xlabel()) == (
        "loss (nats per token)", "learning rate", "step",
    )  # fmt: skip


def test_a_run_with_experts_has_a_picture_of_their_load(tmp_path, drawn):
    load = [[[0.5, 0.5], [0.0, 1.0]], [[0.25, 0.75], [0.5, 0.5]]]
    experts = {"num": 2, "per_token": 1, "intermediate_size": 4, "first_dense": 1}
    steps = [{"kind": "train", "step": i, "loss": 1.0, "experts_load": load[i - 1]} for i in (1, 2)]
    config = {"model": {"num_layers": 3, "experts": experts}}
    run = write(tmp_path / "run", {"kind": "run", "step": 0, "config": config}, *steps)
    dense = trained(tmp_path / "dense", 4.0)
    assert draw([dense, run], tmp_path / "out.png") == [tmp_path / "out.png", tmp_path / "out-experts.png"]
    assert (tmp_path / "out-experts.png").read_bytes().startswith(b"\x89PNG")
    axes = drawn[1].axes[0]
    assert axes.collections[0].get_array().tolist() == [[1.0, 0.5], [1.0, 1.5], [0.0, 1.0], [2.0, 1.0]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2"]
    assert (axes.get_title(), axes.get_xlabel()) == ("run", "step")


def test_a_loss_of_the_users_own_has_no_unit(tmp_path, drawn):
    draw([trained(tmp_path / "run", 8.0, loss={"target": "own:loss"})], tmp_path / "out.png")
    assert drawn[0].axes[0].get_ylabel() == "loss"


def test_nothing_overlaps_however_many_runs_there_are(tmp_path, drawn):
    draw([trained(tmp_path / f"a-run-with-a-name-{i}", 8.0 + i) for i in range(9)], tmp_path / "out.png")
    figure = drawn[0]
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [part.get_tightbbox(renderer) for part in (*figure.axes, *figure.legends)]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
    assert all(figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1) for box in boxes)
    styles = {(line.get_color(), line.get_linestyle()) for line in figure.axes[1].lines}
    assert len(styles) == 9


def test_all_runs_that_cannot_be_plotted_are_reported_at_once(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    write(Path("begun"), {"kind": "run", "step": 0, "config": {}})
    write(Path("other"))
    Path("other/metrics.jsonl").write_text("loss 3\n")
    message = """\
meshpar: there is nothing to plot:
  begun/metrics.jsonl
    has no record of a training step
    the run_dir of a run that trained
  other/metrics.jsonl:1
    is no record of a run
    remove this line: no other line depends on it
  nowhere/metrics.jsonl
    cannot be read: No such file or directory
    the run_dir of a run that trained
"""
    assert command("plot", "begun", "other", "nowhere", "--out", "a.png") == (2, "", message)
    assert not Path("a.png").exists()


def test_the_plot_is_written_to_the_run_or_to_out(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    trained(Path("run"), 8.0)
    assert command("plot", "run") == (0, "run/curves.png\n", "")
    message = "meshpar: --out nowhere/a.png: cannot be written: No such file or directory\n"
    assert command("plot", "run", "--out", "nowhere/a.png") == (2, "", message)
    assert command("plot", "run", "--out", "a.doc")[0] == 2


def test_without_matplotlib_its_extra_is_named(tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = "meshpar: plot: matplotlib is not installed; pip install 'meshpar[plot]'\n"
    assert command("plot", trained(tmp_path / "run", 8.0)) == (2, "", message)
