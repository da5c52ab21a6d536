"""The bench of a server: its workload, its arrivals, its text, its JSON and its plot; and the verb, with a model."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from flax import nnx

from meshpar.interop.export import export
from meshpar.models import Llama
from meshpar.serve import bench
from meshpar.serve.bench import Load, ServeBench
from meshpar.serve.plot import plot_serve
from meshpar.serve.scheduler import Capacity
from meshpar.tree import flatten_with_paths
from tests.serve.test_scheduler import Guesses, RememberedCache

CAPACITY = Capacity(slots=4, pages=99, page_size=4, max_len=64, chunk=16)
LOADS = (
    Load("server", 2.0, 100.0, (0.01, 0.03), (0.002, 0.004)),
    Load("server", 8.0, 400.0, (0.02, 0.05), (0.003, 0.006)),
    Load("server", math.inf, 900.0, (0.5, 1.0), (0.004, 0.008)),
    Load("batches", math.inf, 300.0, (0.02, 0.02), (0.003, 0.003)),
    Load("one by one", math.inf, 60.0, (0.01, 0.01), (0.002, 0.002)),
)


def engine(drafter: Guesses | None = None) -> Any:
    """One that needs no device."""
    computed = RememberedCache(CAPACITY, drafter)
    computed.decoding = SimpleNamespace(capacity=CAPACITY, vocab_size=5)  # pyright: ignore
    return computed


def test_a_workload_is_mixed_and_always_the_same():
    workload = bench.draw(200, 50, longest_prompt=16, longest_answer=40)
    assert workload == bench.draw(200, 50, 16, 40)
    assert {len(prompt) for prompt, _ in workload} == set(range(1, 17))
    assert max(length for _, length in workload) == 40
    assert 6 < bench.num_tokens(workload) / 200 < 10  # an exponential distribution of mean 8, cut at 40 and rounded up
    assert {token for prompt, _ in workload for token in prompt} == set(range(50))


def test_requests_arrive_at_the_rate_and_every_token_is_timed(monkeypatch):
    timed = []
    monkeypatch.setattr(bench, "_percentiles", lambda seconds: timed.append(len(seconds)) or (0.0, 0.0))
    workload = bench.draw(30, 5, 16, 40)
    at_once = asyncio.run(bench.serve(engine(), workload, math.inf))
    assert timed == [30, bench.num_tokens(workload) - 30]
    slowly = asyncio.run(bench.serve(engine(), workload, 60.0))
    mean_s = bench.num_tokens(workload) / slowly.tokens_per_s / 30
    assert 0.5 / 60 < mean_s < 2.5 / 60
    assert at_once.tokens_per_s > slowly.tokens_per_s
    assert at_once.acceptance is None


def test_drafts_are_counted():
    workload = bench.draw(30, 5, 16, 40)
    load = asyncio.run(bench.serve(engine(Guesses(0)), workload, math.inf))
    assert load.acceptance is not None
    assert 0.3 < load.acceptance < 0.7
    assert "of drafts accepted" in str(ServeBench("30 requests", (load, *LOADS[3:])))


def test_the_text_and_the_json_have_the_figures():
    measured = ServeBench("64 requests", LOADS)
    assert str(measured).splitlines()[-1] == "server over batches: 3.00 times the tokens/s"
    rows = [line.split() for line in str(measured).splitlines()]
    assert ["server", "8", "400", "20.0", "50.0", "3.0", "6.0"] in rows
    plain = json.loads(json.dumps(measured.as_json(), allow_nan=False))
    assert plain["continuous_over_static"] == 3.0
    assert [load["rate"] for load in plain["loads"]] == [2.0, 8.0, None, None, None]


def test_the_plot_shows_every_rate(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    plot_serve(ServeBench("64 requests", LOADS), tmp_path / "bench.svg")
    first, between, tokens = drawn[0].axes
    assert [line.get_ydata().tolist() for line in first.lines] == [[10.0, 20.0], [30.0, 50.0]]
    assert [line.get_ydata().tolist() for line in between.lines] == [[2.0, 3.0], [4.0, 6.0]]
    assert tokens.lines[0].get_xdata().tolist() == [2.0, 8.0]
    assert [line.get_ydata()[0] for line in tokens.lines[1:]] == [900.0, 300.0, 60.0]


@pytest.mark.slow
def test_the_verb_measures_a_model(command, tmp_path):
    """Random weights in a Hugging Face folder, on a mesh, with drafts."""
    model = Llama(num_layers=1, hidden_size=8, num_heads=4, intermediate_size=8, vocab_size=16)
    params = nnx.to_pure_dict(nnx.state(model.build(nnx.Rngs(0)), nnx.Param))
    export(tmp_path / "llama", model, flatten_with_paths(params))
    mesh = ["rules=[megatron]", "mesh.data=2", "mesh.tensor=4"]
    sizes = ["--requests=8", "--prompt=8", "--answer=12", "--slots=2", "--chunk=4", "--page-size=4", "--ngrams=1"]
    options = [*mesh, *sizes, "--rate=400", "--rate=200", "--json", "--no-cache"]
    plot = tmp_path / "rates.svg"
    said = command("bench", "serve", tmp_path / "llama", *options, "--plot", plot)
    assert said.code == 0, said.err
    measured = json.loads(said.out)
    assert measured["what"].startswith("8 requests, ")
    assert "data=2, tensor=4: 2 slots, 10 pages of 4 tokens" in measured["what"]
    loads = measured["loads"]
    names = [("server", 200.0), ("server", 400.0), ("server", None), ("batches", None), ("one by one", None)]
    assert [(load["name"], load["rate"]) for load in loads] == names
    for load in loads:
        assert load["tokens_per_s"] > 0
        assert 0 < load["first_s"][0] <= load["first_s"][1]
    assert all(load["acceptance"] is not None for load in loads[:3])
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize("words", [["--rate", "0"], ["--plot", "bench.txt"]])
def test_bad_options_are_refused_before_anything_is_read(command, words):
    said = command("bench", "serve", "nothing", *words)
    assert said.code == 2
    assert words[0] in said.err
