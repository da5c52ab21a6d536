"""Checks that the keys of a config fit each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from meshpar.data import NoData, Preferences, Prompts
from meshpar.data.rows.config import RowData
from meshpar.errors import ConfigError, Problems, ScheduleError
from meshpar.experiment.config import Run
from meshpar.interop.flax_model import Import
from meshpar.interop.options import Options
from meshpar.models.contract import LayerStack, Task
from meshpar.models.decoder import DecoderModel
from meshpar.optim.wrapped import Wrapping
from meshpar.parallel.checks import (
    check_float64,
    check_stages,
    check_strategies,
)
from meshpar.parallel.combinations import check_combinations
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.local_updates import KEY
from meshpar.parallel.pipeline.partition import cut_layers
from meshpar.parallel.pipeline.schedule import Schedule
from meshpar.sharding.resolve import AnyMesh, check_array
from meshpar.sharding.rules import AxisRules
from meshpar.train.grpo import GRPO
from meshpar.train.loss import LossConfig
from meshpar.train.preferences import OfAnswers, Preference
from meshpar.train.tasks import Contrastive, NamedLoss
from meshpar.tree import flatten_with_paths

OF_MODEL: Mapping[str, Callable[[Run], bool]] = {
    "loss": lambda run: (
        not isinstance(run.loss, LossConfig) or run.loss.model_copy(update={"chunk": "auto"}) != LossConfig()
    ),
    "distill": lambda run: run.distill is not None,
    "model.remat.offload": lambda run: isinstance(run.model, DecoderModel) and bool(run.model.remat.offload),
}
"""Key -> whether a run uses this feature, which `Options` does not know."""


def features(run: Run, ctx: ParallelContext) -> list[str]:
    """The keys of the features in use. Some of them cannot be combined, see `parallel.combinations`."""
    return [key for key, uses in OF_MODEL.items() if uses(run)] + options_of(run).features(ctx)


def check(run: Run, mesh: AnyMesh) -> None:
    """Checks the parts of a config against each other and against the mesh.

    Raises:
      ConfigError: lists every problem.
    """
    ctx = run.context(mesh)
    problems = Problems()
    _check_batch(run, ctx, problems)
    _check_task(run, ctx.num_passes, problems)
    _check_precision(run, problems)
    if run.strict and (not ctx.manual or run.model.is_local):
        what = "only a model of whole arrays in the manual lowering is partitioned, and moves activations by itself"
        problems.add("strict", what, "strict=false")
    run.model.check(task_of(run), ctx, problems)
    _check_pipeline(run, ctx, problems)
    check_strategies(ctx, run.model.is_local, problems)
    _check_cache(run, problems)
    _check_local(run, ctx, problems)
    _check_keep_best(run, problems)
    if run.prune:
        run.prune.check(run.num_steps, run.optim.ema, problems)
    check_combinations(features(run, ctx), problems)
    run.optim.schedule.check(run.num_steps, problems)
    if problems.found and run.rules.table and (specs := run.model.array_specs()):
        _check_arrays(run, specs, mesh, problems)
    problems.raise_any(ConfigError, "the parts of this config do not fit each other:")


def task_of(run: Run) -> Task:
    """The task of the run's model: the loss, the data and the adapters."""
    named = run.loss if isinstance(run.loss, NamedLoss) else None
    loss = run.loss if isinstance(run.loss, LossConfig) else LossConfig()
    answers = run.loss if isinstance(run.loss, OfAnswers) else None
    return Task(
        loss=loss, named=named, answers=answers, rules=run.rules, seed=run.seed, adapter=run.lora,
        seq_len=run.data.seq_len, vocab_size=run.data.vocab_size, distill=run.distill,
        has_documents=run.data.documents_in_row == "separate", arrays=run.data.array_specs(),
    )  # fmt: skip


def options_of(run: Run) -> Options:
    """What the run sets besides its model, as the arguments of `meshpar.training` do."""
    precision = run.precision
    wrapping = Wrapping(
        prune=run.prune, ema=run.optim.ema, master_dtype=precision.master, rounding=precision.rounding,
        compute_dtype=precision.compute, seed=run.seed,
    )  # fmt: skip
    return Options(
        tx=run.optim, num_steps=run.num_steps, lora=run.lora, freeze=run.freeze, clip_norm=run.optim.clip_norm,
        params_dtype=precision.params, wrapping=wrapping,
    )  # fmt: skip


def _check_arrays(run: Run, specs: Any, mesh: AnyMesh, problems: Problems) -> None:
    """Adds each array that does not fit the mesh even without the rules with known problems."""
    refused = [problem.where.removeprefix("rules.") for problem in problems.found if problem.where.startswith("rules.")]
    whole: dict[str, Any] = dict.fromkeys([*refused, "layers"], ())  # `_check_layers` reports layers
    rules = AxisRules(preset=run.rules.preset, zero=run.rules.zero, **run.rules.explicit | whole)
    for path, spec in flatten_with_paths(specs).items():
        check_array(path, spec.stored_in(np.dtype(run.precision.params)), rules, mesh, problems)


def _check_batch(run: Run, ctx: ParallelContext, problems: Problems) -> None:
    rows = ctx.shards("batch") * ctx.num_passes
    if run.data.batch_size % rows:
        what = f"{run.data.batch_size} rows cannot be cut into {rows} equal parts"
        parts = f"({ctx.shards('batch')} devices x {ctx.num_passes} microbatches)"
        problems.add("data.batch_size", f"{what} {parts}", f"a multiple of {rows}")
    if isinstance(run.data, RowData):
        return
    chunks = ctx.sequence.chunks.shape[1]
    parts = math.prod(ctx.mesh.shape[axis] for axis in ctx.residual_axes)
    if run.data.seq_len % (parts * chunks):
        of = " of two chunks each" if chunks > 1 else ""
        what = f"{run.data.seq_len} is not divisible by the {parts} shards of the sequence{of}"
        multiple = parts * chunks
        near = max(multiple, round(run.data.seq_len / multiple) * multiple)
        problems.add("data.seq_len", what, f"data.seq_len={near}, a multiple of {multiple}")


def _check_task(run: Run, num_passes: int, problems: Problems) -> None:
    """Checks that model, data and loss are of one task."""
    is_imported = isinstance(run.model, Import)
    if isinstance(run.data, RowData) and not is_imported:
        what = f"a model of kind {run.model.kind} trains on packed tokens, and these are rows of arrays"
        problems.add(
            f"data.kind = {run.data.kind}", what, "data.kind=text, or another kind of tokens; or model.kind=import"
        )
    if isinstance(run.loss, NamedLoss) and not is_imported:
        what = f"a model of kind {run.model.kind} minimizes the loss of the next token"
        problems.add(f"loss.kind = {run.loss.kind}", what, "loss.kind=next_token, or model.kind=import")
    elif isinstance(run.loss, NamedLoss) and not isinstance(run.data, (RowData, NoData)):
        what = "a loss by name reads rows of arrays, and these are packed tokens"
        problems.add(f"loss.kind = {run.loss.kind}", what, "data.kind=import")
    if isinstance(run.loss, Contrastive) and (num_passes > 1 or run.parallel.local):
        what = "each row is compared with all rows of the batch, which this run computes in parts"
        problems.add("loss.kind = contrastive", what, "num_microbatches=1, no parallel.pipeline and no parallel.local")
    _check_answers(run, problems)


def _check_answers(run: Run, problems: Problems) -> None:
    """Checks what a loss of whole answers needs, and what it cannot be combined with."""
    if isinstance(run.data, (Preferences, Prompts)) and run.data.documents_in_row != "separate":
        one_row = "the rejected answer would attend to the chosen one, which is in the same row"
        what = one_row if isinstance(run.data, Preferences) else "a row is one answer, and no document is beside it"
        problems.add("data.documents_in_row", what, "data.documents_in_row=separate")
    if isinstance(run.data, Preferences) and not isinstance(run.loss, Preference):
        what = "these are pairs of answers, and this loss would learn the rejected ones too"
        problems.add(f"data.kind = {run.data.kind}", what, "loss.kind=dpo or orpo, or data.kind=chat")
    if isinstance(run.data, Prompts) and not isinstance(run.loss, GRPO):
        what = "these are prompts without answers, of which this loss learns nothing"
        problems.add(f"data.kind = {run.data.kind}", what, "loss.kind=grpo, or data.kind=chat")
    if not isinstance(run.loss, OfAnswers):
        return
    where = f"loss.kind = {run.loss.kind}"
    if isinstance(run.loss, Preference) and not isinstance(run.data, Preferences):
        problems.add(where, "it compares pairs of answers, and these data have none", "data.kind=preferences")
    if isinstance(run.loss, GRPO):
        _check_grpo(run, run.loss, problems)
    if not isinstance(run.model, DecoderModel):
        what = "it reads the logits of meshpar's own decoders, and this model has a loss of its own"
        problems.add(where, what, "model.kind=llama or gpt")
    if run.parallel.pipeline:
        problems.add(where, "stages sum the loss of tokens, and this one is of whole answers", "no parallel.pipeline")
    if run.distill:
        problems.add(where, "a teacher is for the loss of the next token", "no distill, or loss.kind=next_token")
    if run.loss.has_reference and run.parallel.local and not run.lora:
        what = "slices do not carry the second copy of the parameters that is the reference"
        problems.add(where, what, "lora, whose reference is the model without it, or no parallel.local")
    if run.rules.table.get("seq"):
        what = "an answer's log-probability is a sum over its row, whose tokens these rules divide"
        problems.add(where, what, "rules.seq=[]")


def _check_grpo(run: Run, loss: GRPO, problems: Problems) -> None:
    where = "loss.kind = grpo"
    if not isinstance(run.data, Prompts):
        problems.add(where, "the model answers prompts, and these data have answers", "data.kind=prompts")
    if run.data.batch_size % loss.group:
        what = f"{run.data.batch_size} answers are not groups of loss.group = {loss.group}"
        problems.add("data.batch_size", what, f"a multiple of {loss.group}")
    if loss.max_tokens >= run.data.seq_len:
        what = f"answers of {loss.max_tokens} tokens leave no room for a prompt in data.seq_len = {run.data.seq_len}"
        problems.add("loss.max_tokens", what, f"data.seq_len={2 * loss.max_tokens}")
    if run.parallel.local:
        problems.add(where, "answers are sampled from one model, and slices have several", "no parallel.local")


def _check_precision(run: Run, problems: Problems) -> None:
    """Adds each dtype that JAX would silently replace by float32."""
    for name in ("params", "compute", "gradients", "master"):
        check_float64(f"precision.{name}", getattr(run.precision, name), problems)


def _check_cache(run: Run, problems: Problems) -> None:
    if run.precision.cache and not isinstance(run.model, DecoderModel):
        what = "only meshpar's own decoders can cache the keys and values of tokens"
        problems.add("precision.cache", what, "precision.cache=null")


def _check_pipeline(run: Run, ctx: ParallelContext, problems: Problems) -> None:
    if ctx.schedule and (layers := run.model.layer_stack()):
        _check_layers(layers, ctx.schedule, ctx, problems)
    rows = run.data.batch_size // (ctx.shards("batch") * run.num_microbatches)
    check_stages(ctx, run.model.is_local, problems, math.gcd(rows, 8))


def _check_local(run: Run, ctx: ParallelContext, problems: Problems) -> None:
    """Checks that slices can train alone, and that no steps are left after the last round."""
    local = run.parallel.local
    if local is None:
        return
    local.check_steps(run.num_steps, problems)
    is_resized = run.elastic and run.elastic.resized(run.mesh).sizes[local.axis] != run.mesh.sizes[local.axis]
    if is_resized and local.resize == "refuse":
        what = "it changes the number of slices, each of which has its own parameters in a checkpoint"
        problems.add(f"elastic.mesh.{local.axis}", what, f"{KEY}.resize=average, or elastic.mesh with another axis")
    local.check_state(run.optim.ema, run.precision.master, run.precision.params, problems)
    if run.parallel.pipeline and run.parallel.pipeline.is_stale:
        what = "it computes gradients at the parameters before the last update, which a new round does not have"
        problems.add("parallel.pipeline", what, f"another kind, or {KEY}=null")


def _check_layers(layers: LayerStack, schedule: Schedule, ctx: ParallelContext, problems: Problems) -> None:
    """Checks that the layers can be divided among the stages. Only fixes that work are proposed."""
    num_stages = ctx.shards("stage")
    num_shards = ctx.shards("layers")
    why = _why_not_cut(layers, schedule, num_stages)
    if why and schedule.cut:
        even = schedule.model_copy(update={"cut": None})
        fix = "parallel.pipeline.cut=null to divide the layers as evenly as possible"
        problems.add("parallel.pipeline.cut", why, "" if _why_not_cut(layers, even, num_stages) else fix)
        return
    over = layers.lacking(num_shards)
    if not why and not over:
        return
    fixes: list[str] = []
    padded = layers._replace(multiple=num_shards)
    if over and not _why_not_cut(padded, schedule, num_stages):
        fixes.append(f"model.pad_layers_to_multiple={num_shards} to add {over} of zeros")
    if not why:
        fixes.append("rules.layers=[] to store all on each stage")
    if not fixes:
        least = num_stages * schedule.chunks_per_stage
        step = math.lcm(layers.multiple, num_shards)
        fixes.append(f"model.num_layers={math.ceil(least / step) * step}")
    what = f"{' and '.join(map(str, layers.stacked))} layers cannot be divided equally among {num_stages} stages"
    problems.add("model.num_layers", why or what, ", or ".join(fixes))


def _why_not_cut(layers: LayerStack, schedule: Schedule, num_stages: int) -> str:
    """Why the layers cannot be cut into the parts of the schedule; empty if they can."""
    try:
        cut_layers(schedule, num_stages, layers.num_layers, stacked_layers=layers.stacked_layers)
    except ScheduleError as error:
        return str(error)
    return ""


def _check_keep_best(run: Run, problems: Problems) -> None:
    retention = run.checkpoints
    if retention.keep_best and retention.every and retention.every % (run.eval_every or run.num_steps):
        when = f"every {run.eval_every} steps" if run.eval_every else "at the end"
        what = f"a checkpoint is saved every {retention.every} steps, and the evaluation that ranks it runs only {when}"
        problems.add("checkpoints.keep_best", what, f"eval_every={retention.every}")
