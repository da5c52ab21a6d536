"""The bench of a server: its workload, its arrivals, its text, its JSON and its plot."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from meshpar.serve import bench
from meshpar.serve.bench import Load, ServeBench
from meshpar.serve.plot import plot_serve
from meshpar.serve.scheduler import Capacity
from tests.serve.test_scheduler import RememberedCache

CAPACITY = Capacity(slots=4, pages=99, page_size=4, max_len=64, chunk=16)
LOADS = (
    Load("server", 2.0, 100.0, (0.01, 0.03), (0.002, 0.004)),
    Load("server", 8.0, 400.0, (0.02, 0.05), (0.003, 0.006)),
    Load("server", math.inf, 900.0, (0.5, 1.0), (0.004, 0.008)),
    Load("batches", math.inf, 300.0, (0.02, 0.02), (0.003, 0.003)),
    Load("one by one", math.inf, 60.0, (0.01, 0.01), (0.002, 0.002)),
)


def engine() -> Any:
    """One that needs no device."""
    computed = RememberedCache(CAPACITY)
    computed.decoding = SimpleNamespace(capacity=CAPACITY, model=SimpleNamespace(vocab_size=5))  # pyright: ignore
    return computed


def test_a_workload_is_mixed_and_always_the_same():
    workload = bench.draw(200, 50, longest_prompt=16, longest_answer=40)
    assert workload == bench.draw(200, 50, 16, 40)
    assert {len(prompt) for prompt in workload.prompts} == set(range(1, 17))
    assert max(workload.lengths) == 40
    assert 6 < workload.num_tokens / 200 < 10  # an exponential distribution of mean 8, cut at 40 and rounded up
    assert {token for prompt in workload.prompts for token in prompt} == set(range(50))


def test_requests_arrive_at_the_rate_and_every_token_is_timed(monkeypatch):
    timed = []
    monkeypatch.setattr(bench, "_percentiles", lambda seconds: timed.append(len(seconds)) or (0.0, 0.0))
    workload = bench.draw(30, 5, 16, 40)
    at_once = asyncio.run(bench.serve(engine(), workload, math.inf))
    assert timed == [30, workload.num_tokens - 30]
    slowly = asyncio.run(bench.serve(engine(), workload, 60.0))
    mean_s = workload.num_tokens / slowly.tokens_per_s / 30
    assert 0.5 / 60 < mean_s < 2.5 / 60
    assert at_once.tokens_per_s > slowly.tokens_per_s


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


@pytest.mark.parametrize("words", [["--rate", "0"], ["--plot", "bench.txt"]])
def test_bad_options_are_refused_before_anything_is_read(command, words):
    said = command("bench", "serve", "nothing", *words)
    assert said.code == 2
    assert words[0] in said.err
