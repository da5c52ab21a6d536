"""Compares the step time of each pipeline schedule with the time that its simulation predicts from measured F, B and W.

    python scripts/bench_pipeline.py [--stages 4] [--microbatches 16]

F, B + W and the optimizer are measured with a single stage on one device; B and W are assumed to take equal time.
Simulated devices share the cores of one machine, so a step takes at least its total CPU time divided by the number of
cores, however well its stages overlap. Both predictions are printed, and the ratio of the step time to the larger
one. This shows the cost of ticks, permutes and slots, but not that of bubbles, because another stage uses a core that
one stage leaves idle.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import jax

from meshpar import AdamW, AxisRules, Llama, MeshLayout, Run, Synthetic, prepare
from meshpar.experiment.prepare import Prepared
from meshpar.parallel.pipeline.get_schedule import get_schedule
from meshpar.parallel.pipeline.schedule_table import in_ticks
from meshpar.parallel.pipeline.simulate import OpTimes

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv")


def prepared(kind: str, stages: int, microbatches: int, layers: int) -> Prepared:
    run = Run(
        model=Llama(num_layers=layers, hidden_size=128, num_heads=4, intermediate_size=384, vocab_size=64),
        data=Synthetic(batch_size=2 * microbatches, seq_len=128, vocab_size=64),
        optim=AdamW(lr=1e-3),
        mesh=MeshLayout(pipe=stages),
        rules=AxisRules(preset=("pipeline",)),
        parallel={"pipeline": get_schedule(kind, stages, microbatches)},
        num_steps=1,
        run_dir="unused",
    )
    return prepare(run, run.mesh.build(jax.devices()[:stages]))


def timed(calls: dict[str, object], rounds: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Medians of interleaved runs, in seconds of a clock."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            began = clock()
            jax.block_until_ready(call())  # pyright: ignore
            took[name].append(clock() - began)
    return {name: statistics.median(times[1:]) for name, times in took.items()}


def stepping(run: Prepared) -> object:
    """A function whose calls run successive steps."""
    step = run.compile_step()
    state = [step.prepare(run.compile_init()())]
    batch = next(iter(run.run.data.train(0).batches(0)))
    put = {name: jax.device_put(x, run.batch[name].sharding) for name, x in batch.items()}

    def call() -> object:
        state[0], metrics = step(state[0], put)
        return metrics

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", given.stages)
    p = given.stages
    m = given.microbatches
    layers = 2
    one = prepared("1f1b", 1, m, layers)
    params = one.compile_init()().params
    evaluate = one.compile_evaluation()
    batch = jax.device_put(next(iter(one.run.data.train(0).batches(0))))
    alone: dict[str, object] = {"F": lambda: evaluate(params, batch, {}), "all": stepping(one)}
    took = timed(alone | {kind: stepping(prepared(kind, p, m, p * layers)) for kind in SCHEDULES}, given.rounds)
    busy = timed(alone, given.rounds, time.process_time)
    forward = took["F"] / m
    backward = (took["all"] - took["F"]) / m / 2
    cores = min(p, len(os.sched_getaffinity(0)))
    work = p * busy["all"] / cores
    print(f"F {forward * 1e3:.2f} ms, B = W {backward * 1e3:.2f} ms, {p} stages on {cores} cores, {m} microbatches")
    print(f"a stage uses {busy['all'] / took['all']:.2f} cores when it runs alone")
    print(f"{'schedule':<12} {'step':>9} {'simulated':>10} {'work/cores':>11} {'over the larger':>16}")
    for kind in SCHEDULES:
        schedule = get_schedule(kind, p, m)
        makespan = in_ticks(schedule.orders(p), schedule, OpTimes(forward, backward, backward)).makespan
        ratio = took[kind] / max(makespan, work)
        print(f"{kind:<12} {took[kind]:>7.3f} s {makespan:>8.3f} s {work:>9.3f} s {ratio:>16.2f}")


if __name__ == "__main__":
    main()
