"""What in a config does not fit what else stands in it."""

from __future__ import annotations

import math

from meshpar.errors import ConfigError, Problems, ScheduleError
from meshpar.models.contract import LayerStack, Task
from meshpar.parallel.pipeline.cut import cut_layers
from meshpar.parallel.pipeline.schedule import Schedule
from meshpar.parallel.pipeline.simulate import simulate as simulate_schedule
from meshpar.run import Run
from meshpar.sharding.constrain import Lowering
from meshpar.sharding.overlap import Overlap
from meshpar.sharding.resolve import AnyMesh
from meshpar.train.loss import Criterion


def check(run: Run, mesh: AnyMesh) -> None:
    """Checks what no part of a config knows of another.

    Raises:
      ConfigError: with all of it.
    """
    overlap, problems = Overlap(run.tensor.overlap, run.fsdp.overlap), Problems()
    how = Lowering(mesh, run.rules, run.lowering == "manual", overlap=overlap)
    num_microbatches = run.num_microbatches * (run.pipeline.num_microbatches if run.pipeline else 1)
    rows = how.shards("batch") * num_microbatches
    if run.data.batch_size % rows:
        what = f"{run.data.batch_size} rows cannot be cut into {rows} equal parts"
        parts = f"({rows // num_microbatches} devices x {num_microbatches} microbatches)"
        problems.add("data.batch_size", f"{what} {parts}", f"a multiple of {rows}")
    for dim in ("seq", "norm_seq"):
        shards = how.shards(dim)
        if run.data.seq_len % shards:
            problems.add(
                "data.seq_len",
                f"{run.data.seq_len} is not divisible by the {shards} shards of {dim}",
                f"a multiple of {shards}",
            )
    is_manual = run.model.manual_lowering()
    if how.manual and not is_manual:
        problems.add("lowering", is_manual.because, "lowering=auto")
    run.model.check(task_of(run), how, problems)
    overlap.check(run.rules, how.manual, problems)
    _check_pipeline(run, how, problems)
    _check_kept(run, problems)
    if run.reduce and run.lowering == "auto":
        problems.add(
            "reduce", "under lowering: auto, XLA reduces gradients as it chooses", "lowering=manual, or reduce=null"
        )
    if (run.adapt or run.freeze) and (run.tensor.overlap, run.fsdp.overlap) != ("none", "none"):
        key = "adapt" if run.adapt else "freeze"
        overlaps = {"tensor.overlap": run.tensor.overlap, "fsdp.overlap": run.fsdp.overlap}
        fix = f"no {key}, or " + " and ".join(f"{name}=none" for name, way in overlaps.items() if way != "none")
        problems.add(key, "is not proven beside a collective matmul, and so not allowed", fix)
    if run.reduce and run.fsdp.overlap != "none":
        what = "a kernel that is gathered in chunks has its gradient scattered in chunks, by no declared reduction"
        problems.add("reduce", what, "fsdp.overlap=none, or no reduce")
    run.optim.schedule.check(run.num_steps, problems)
    problems.raise_any(ConfigError, "the parts of this config do not fit each other:")


def task_of(run: Run) -> Task:
    """What the run asks its model to learn."""
    return Task(
        loss=run.loss, rules=run.rules, seq_len=run.data.seq_len, vocab_size=run.data.vocab_size, seed=run.seed,
        adapter=run.adapt, distill=run.distill,
    )  # fmt: skip


def _check_pipeline(run: Run, how: Lowering, problems: Problems) -> None:
    num_stages = how.shards("stage")
    if run.pipeline is None:
        if how.manual and num_stages > 1:
            what = f"the rules cut the model into {num_stages} stages, and nothing says in which order they work"
            rows = run.data.batch_size // (how.shards("batch") * run.num_microbatches)
            fix = f"pipeline={{kind: 1f1b, num_microbatches: {math.gcd(rows, 8)}}}, or no preset pipeline"
            problems.add("pipeline", what, fix)
        return
    if not how.manual:
        problems.add("pipeline", "GSPMD knows no pipeline", "lowering=manual, or pipeline=null")
    elif not (layers := run.model.layer_stack()):
        problems.add("pipeline", layers.because, "pipeline=null")
    else:
        before = len(problems)
        _check_layers(layers, run.pipeline, how, problems)
        run.pipeline.check(num_stages, problems)
        if len(problems) == before:
            try:
                simulate_schedule(run.pipeline, num_stages)
            except ScheduleError as error:
                problems.add("pipeline", str(error))
    beside = {
        "loss": run.loss != Criterion(),
        "distill": run.distill is not None,
        "freeze": bool(run.freeze),
        "adapt": run.adapt is not None,
        "reduce": run.reduce is not None,
        "tensor.overlap": run.tensor.overlap != "none",
        "fsdp.overlap": run.fsdp.overlap != "none",
    }
    for key in (key for key, is_set in beside.items() if is_set):
        problems.add(key, "is not proven beside a pipeline, and so not allowed", f"no {key}, or pipeline=null")


def _check_layers(layers: LayerStack, schedule: Schedule, how: Lowering, problems: Problems) -> None:
    """Every fix that is proposed has been tried."""
    num_stages, num_shards = how.shards("stage"), how.shards("layers")
    why = _why_not_cut(layers, schedule, num_stages)
    if why and schedule.cut:
        even = schedule.model_copy(update={"cut": None})
        fix = "pipeline.cut=null to cut as evenly as possible"
        problems.add("pipeline.cut", why, "" if _why_not_cut(layers, even, num_stages) else fix)
        return
    over = -layers.stacked_layers % num_shards
    if not why and not over:
        return
    fixes: list[str] = []
    padded = layers._replace(multiple=num_shards)
    if over and not _why_not_cut(padded, schedule, num_stages):
        fixes.append(f"model.layers_multiple={num_shards} to store {over} more, of zeros")
    if not why:
        fixes.append("rules.layers=[] to store all on each")
    if not fixes:
        least = num_stages * schedule.chunks_per_stage
        step = math.lcm(layers.multiple, num_shards)
        fixes.append(f"model.num_layers={math.ceil(least / step) * step}")
    what = f"{layers.stacked_layers} layers cannot lie in equal parts on {num_stages} stages"
    problems.add("model.num_layers", why or what, ", or ".join(fixes))


def _why_not_cut(layers: LayerStack, schedule: Schedule, num_stages: int) -> str:
    """What speaks against cutting the layers into the parts of the schedule; empty if nothing does."""
    try:
        cut_layers(schedule, num_stages, layers.num_layers, stacked_layers=layers.stacked_layers)
    except ScheduleError as error:
        return str(error)
    return ""


def _check_kept(run: Run, problems: Problems) -> None:
    kept = run.checkpoints
    if kept.keep_best and kept.every and kept.every % (run.eval_every or run.num_steps):
        when = f"every {run.eval_every} steps" if run.eval_every else "at the end"
        what = f"a checkpoint every {kept.every} steps needs an evaluation to be judged by, and there is one {when}"
        problems.add("checkpoints.keep_best", what, f"eval_every={kept.every}")
