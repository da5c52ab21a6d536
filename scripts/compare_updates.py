"""Compares ways to update one model on slices with slow links: held-out loss over steps, bytes and simulated seconds.

    python scripts/compare_updates.py docs/guides/compare-updates.png

A byte-level llama is trained on four simulated devices, each a slice. The stale and the asynchronous method keep all
parameters in a table of `meshpar.tables`, whose rows every device pulls in each step. All methods get the same batches
and use Adam with the same settings. Seconds are those of the planner's cost function on the declared machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from meshpar import load, prepare, simulate, tables
from meshpar.cost.traced import traced_collectives
from meshpar.experiment.prepare import Prepared
from meshpar.mesh.hardware import Link, Links
from meshpar.planning.estimate import Work, work_of
from meshpar.planning.machine import StatedMachine
from meshpar.train.program import with_rows

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
NUM_SLICES, EVERY, OVERLAP = 4, 16, 4
WIDTH = 32
"""The hidden size, of which the sizes of all parameters are multiples."""
ADAM = {"lr": 3e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8}
KEYS = [
    f"mesh={{replica: {NUM_SLICES}}}", "rules=replicated", "data.batch_size=16", "data.seq_len=64",
    "model.num_layers=2", f"model.hidden_size={WIDTH}", "model.num_heads=4", "model.num_kv_heads=4",
    "model.intermediate_size=64", "optim={kind: adamw, lr: 3e-3, weight_decay: 0, clip_norm: null}",
]  # fmt: skip
LOCAL = {
    "synchronous": None,
    "local SGD": {"every": EVERY},
    "DiLoCo": {"every": EVERY, "outer": "nesterov"},
    "DiLoCo, overlapped": {"every": EVERY, "outer": "nesterov", "overlap_steps": OVERLAP},
}
LATE: dict[str, Any] = {
    "stale, 4 steps": tables.Stale(steps=4),
    "asynchronous, up to 4": tables.Async(limit=4, seed=0),
}
METHODS = ("synchronous", "local SGD", "DiLoCo", *LATE, "DiLoCo, overlapped")
SLOW = Link(bytes_per_s=12.5e6, latency_s=0.5e-3)
MACHINE = StatedMachine("four slices", NUM_SLICES, 1, 10e9, 16e9, Links(inside=SLOW, across=SLOW))
WITHOUT_LATENCY = replace(MACHINE, links=Links(*[replace(SLOW, latency_s=0.0)] * 2))
"""For late gradients: the messages of several steps are under way at once, so no step waits for the first byte."""
EVALUATED_EVERY, NUM_HELD_OUT = 16, 8
AT_S = 1.5
COLOURS = ("#000000", "#0072B2", "#D55E00", "#CC79A7", "#009E73", "#E69F00")


@dataclass(frozen=True)
class Curve:
    """Held-out losses, and the bytes and seconds of a step."""

    steps: list[int]
    losses: list[float]
    sent_bytes: float
    seconds: float


def prepared(local: dict[str, Any] | None, num_steps: int) -> Prepared:
    late = (local or {}).get("overlap_steps", 0)
    run = load(CONFIG, [*KEYS, f"num_steps={num_steps + late}"])
    parallel = run.parallel.model_copy(update={"local": None})
    run = run.model_copy(update={"parallel": type(parallel)(local=local)})
    return prepare(run)


class Evaluation:
    """Computes the mean held-out loss of parameters."""

    def __init__(self, net: Prepared):
        self.compute = net.compile_evaluation()
        self.sharding = jax.tree.map(lambda x: x.sharding, net.placement.structs.params)
        _, held_out = net.run.data.datasets(net.run.seed)
        self.batches = [net.put(held_out[i]) for i in range(NUM_HELD_OUT)]

    def __call__(self, params: Any) -> float:
        placed = jax.device_put(params, self.sharding)
        sums = [jax.device_get(self.compute(placed, batch, {})) for batch in self.batches]
        return float(sum(one["loss"] for one in sums) / sum(one["tokens"] for one in sums))


def curve(evaluate: Evaluation, params: Iterator[Any], num_steps: int, sent_bytes: float, seconds: float) -> Curve:
    """The curve of a training; `params` yields the parameters after each step."""
    found = [(i, evaluate(at)) for i, at in zip(range(num_steps + 1), params, strict=False) if i % EVALUATED_EVERY == 0]
    return Curve([i for i, _ in found], [loss for _, loss in found], sent_bytes, seconds)


def sliced(net: Prepared) -> Iterator[Any]:
    """The shared parameters after each step of the trainer."""
    step = net.compile_step()
    state = net.compile_init()()
    train, _ = net.run.data.datasets(net.run.seed)
    for index in range(net.run.num_steps + 1):
        yield state.params
        state, _ = step.at(index + 1)(state, net.put(train[index]))


class Server:
    """A model whose parameters are the rows of a table: a parameter server on the devices themselves."""

    def __init__(self, net: Prepared, consistency: Any):
        self.net = net
        self.first = jax.device_get(net.compile_init()().params)
        leaves, self.tree = jax.tree.flatten(self.first)
        self.shapes = [x.shape for x in leaves]
        self.num_rows = sum(x.size for x in leaves) // WIDTH
        self.table = tables.Table(
            num_rows=self.num_rows, width=WIDTH, axes=("replica",), capacity=-(-self.num_rows // NUM_SLICES),
            optim={"kind": "lazy_adam"} | ADAM, consistency=consistency,
        )  # fmt: skip
        batch = net.run.data.datasets(net.run.seed)[0][0]
        self.training = tables.training(
            lambda key: {}, self.loss, lambda batch: {"all": jnp.arange(self.num_rows, dtype=jnp.int32)},
            optax.identity(), batch, tables={"all": self.table}, mesh=net.mesh,
        )  # fmt: skip

    def params(self, rows: Any) -> Any:
        """The parameters from the rows of the table."""
        ends = np.cumsum([np.prod(shape) for shape in self.shapes])
        flat = rows.reshape(-1)[: ends[-1]]
        parts = [flat[end - np.prod(shape) : end].reshape(shape) for shape, end in zip(self.shapes, ends, strict=True)]
        return self.tree.unflatten(parts)

    def loss(self, _: Any, rows: dict[str, jax.Array], batch: Any) -> jax.Array:
        sums = self.net.loss(self.params(rows["all"]), with_rows(batch), None, {})
        return sums.loss / sums.count.astype(sums.loss.dtype)

    def trained(self) -> Iterator[Any]:
        """The parameters after each step."""
        state = self.training.compile_init()(jax.random.key(0))
        rows = np.concatenate([x.reshape(-1) for x in jax.tree.leaves(self.first)]).reshape(self.num_rows, -1)
        own = state.tables["all"]
        padded = np.zeros(own.rows.shape, rows.dtype)
        padded.reshape(-1)[: rows.size] = rows.reshape(-1)
        own = own._replace(rows=jax.device_put(padded, own.rows.sharding))
        state = state._replace(tables={"all": own})
        step = self.training.compile_step()
        train, _ = self.net.run.data.datasets(self.net.run.seed)
        for index in range(self.net.run.num_steps + 1):
            yield self.params(np.asarray(state.tables["all"].rows))
            state, metrics = step(state, self.training.put(train[index]))
            self.training.check(metrics)

    @property
    def work(self) -> Work:
        """The work of a synchronous step, with the table's messages beside it: no step waits for late gradients."""
        synchronous = work_of(self.net)
        assert synchronous is not None
        traced = jax.make_jaxpr(self.training.step)(self.training.state, self.training.batch)
        return replace(synchronous, beside=traced_collectives(traced), waits=())


def compared(name: str, num_steps: int, plain: Prepared, evaluate: Evaluation) -> Curve:
    """The curve of a method; `plain` is the synchronous training."""
    if name in LATE:
        server = Server(plain, LATE[name])
        seconds = server.work.on(WITHOUT_LATENCY).total_s
        return curve(evaluate, server.trained(), num_steps, server.work.sent_bytes, seconds)
    net = prepared(LOCAL[name], num_steps)
    work = work_of(net)
    assert work is not None
    return curve(evaluate, sliced(net), num_steps, work.sent_bytes, work.on(MACHINE).total_s)


def draw(curves: dict[str, Curve], out: Path) -> None:
    """Draws losses over steps, bytes and seconds."""
    figure: Any = Figure(figsize=(10.0, 3.6), dpi=120, layout="constrained", facecolor="white")
    panels = figure.subplots(1, 3, sharey=True)
    for (name, one), colour in zip(curves.items(), COLOURS, strict=False):
        steps = np.array(one.steps)
        for axes, x in zip(panels, (steps, steps * one.sent_bytes / 1e6, steps * one.seconds), strict=True):
            axes.plot(x[x > 0], np.array(one.losses)[x > 0], color=colour, label=name)
    panels[0].set(xlabel="steps", ylabel="held-out loss (nats per token)")
    panels[1].set(xlabel="MB sent by a device", xscale="log")
    panels[2].set(xlabel="simulated seconds", xscale="log")
    for axes in panels:
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="curves in the .json file beside it are not computed again")
    parser.add_argument("--steps", type=int, default=192)
    arguments = parser.parse_args()
    simulate(NUM_SLICES)
    kept = arguments.picture.with_suffix(".json")
    curves = {name: Curve(**one) for name, one in json.loads(kept.read_text()).items()} if kept.exists() else {}
    print(f"| method | held-out loss | bytes a step | seconds a step | loss after {AT_S} s |\n|---|---|---|---|---|")
    plain = prepared(None, arguments.steps)
    evaluate = Evaluation(plain)
    for name in METHODS:
        if name not in curves:
            curves[name] = compared(name, arguments.steps, plain, evaluate)
            kept.write_text(json.dumps({name: asdict(one) for name, one in curves.items()}))
        draw({name: curves[name] for name in METHODS if name in curves}, arguments.picture)
        one = curves[name]
        at = np.interp(AT_S, np.array(one.steps) * one.seconds, one.losses)
        print(f"| {name} | {one.losses[-1]:.3f} | {one.sent_bytes:,.0f} | {one.seconds:.4f} | {at:.3f} |", flush=True)
    print(f"{time.process_time():.0f} CPU s")


if __name__ == "__main__":
    main()
