"""Trains any Flax model, or any pytree of parameters, on a mesh, without changes to the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from inspect import signature
from typing import Any, Literal, ParamSpec

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from meshpar.errors import ConfigError, Problem, Problems, suggestion
from meshpar.interop.assembled import assembled
from meshpar.interop.inferred import INFER, OF_SHARDS
from meshpar.interop.losses import takes
from meshpar.interop.module import Functions, functions, is_module
from meshpar.interop.options import Frozen, Options, Rounding, checked, options
from meshpar.interop.specs import Dims, Init, check_axes, check_names, specs_of
from meshpar.mesh.layout import MeshLayout
from meshpar.nn.lora import LoRA
from meshpar.optim.base import Descent
from meshpar.optim.pruning import Prune
from meshpar.parallel.checks import (
    check_float64,
    check_partitioned,
    check_recognized,
    check_stages,
    check_strategies,
)
from meshpar.parallel.context import Format, ParallelContext
from meshpar.parallel.strategies import Parallel
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.train.batches import batch_specs, check_arrays
from meshpar.train.training import Training, step_key

OF_A_LOSS = ("chunk", "label_smoothing", "z_loss")

Parameters = ParamSpec("Parameters")


def _explains_wrong(function: Callable[Parameters, Training]) -> Callable[Parameters, Training]:
    """Wraps a function so that an argument that it does not have, or a value that it does not take, is an error."""
    known = [name for name, one in signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY]

    @wraps(function)
    def called(*args: Parameters.args, **arguments: Parameters.kwargs) -> Training:
        problems = Problems()
        for name in (name for name in arguments if name not in signature(function).parameters):
            fix = suggestion(name, signature(function).parameters, f"there are {', '.join(known)}")
            if name in OF_A_LOSS:
                fix = f"the loss may return meshpar.cross_entropy(hidden, head, labels, {name}=...)"
            problems.add(name, "training has no such argument", fix)
        problems.raise_any(ConfigError, "these arguments of training are wrong:")
        return function(*args, **checked(arguments))

    return called


@_explains_wrong
def training(
    init: Init | Any,
    loss: Callable[..., Any],
    tx: optax.GradientTransformation | Descent,
    batch: Mapping[str, Any],
    *,
    mesh: MeshLayout | AnyMesh | dict[str, Any] | str,
    rules: AxisRules | Sequence[str] | dict[str, Any] | str,
    dims: Dims | Literal["infer"] | None = None,
    batch_dims: Dims | None = None,
    activation_dims: Sequence[str] = (),
    axes: Mapping[str, str] | None = None,
    carried: Init | None = None,
    evaluation: Callable[..., Any] | None = None,
    draws: bool = False,
    seed: int = 0,
    lowering: Literal["manual", "auto"] = "manual",
    strict: bool = False,
    manual: bool = False,
    parallel: Parallel = Parallel(),  # noqa: B008 - a frozen value
    compute_dtype: Any = jnp.float32,
    accum_dtype: Any = None,
    num_microbatches: int = 1,
    number_format: Format | None = None,
    num_steps: int | None = None,
    lora: LoRA | dict[str, Any] | None = None,
    freeze: Frozen | Sequence[Frozen] = (),
    prune: Prune | dict[str, Any] | None = None,
    clip_norm: float | None = None,
    ema: float | None = None,
    params_dtype: Any = None,
    master_dtype: Any = None,
    rounding: Rounding = "nearest",
    offload_optimizer: bool = False,
) -> Training:
    """Shards a model of your own on a mesh: any pytree of parameters, a loss and an Optax optimizer.

    A Flax model can declare the names of its dims itself: with Linen's `with_partitioning` or
    `with_logical_partitioning`, or with NNX's `with_partitioning` (its `out_sharding`), also where `scan` or `vmap`
    stacks layers. Flax's `with_logical_constraint` follows the same rules.

    Args:
      init: a Flax module: of Linen, or of NNX, or a class or function with an argument `rngs` that returns one of NNX.
        Or key -> the initial parameters: `model.init(key, x)["params"]`, `nnx.state(Model(nnx.Rngs(key)), nnx.Param)`,
        or any tree of arrays.
      loss: of a module: (model, batch) or (model, batch, key), where the model is called as on one device. Else
        (params, batch, key). It returns the mean over the rows, a scalar; or (mean, metrics), with a dict of other
        means; or a `LossSums` of sums, if rows have different weights.
      tx: any Optax transformation. Its update also gets `value`, `grad`, `value_fn`, `grad_fn` and `step`, if it has
        such arguments. Or an optimizer of `meshpar.optim`, which needs `num_steps`.
      batch: an example batch: name -> array or struct. The first dim of each array is its rows.
      mesh: the mesh; a `MeshLayout`, or its sizes as in `"data=2 tensor=4"`, is built on the available devices.
      rules: dim -> mesh axes, or the names of presets. The rule `largest=[axes]` shards the largest dim of each
        parameter without names that the axes divide, as PyTorch's FSDP does; `unnamed=[]` replicates such parameters.
      dims: path glob -> a name for each dim of the arrays that it matches. The first match applies, and overrides the
        model's declaration. A dim without a name is called `unnamed`. Or `infer`: parameters for which the model
        declares no names get those that `infer_dims` returns.
      batch_dims: array of the batch -> a name for each of its dims; by default only the first dim is sharded, as
        `batch`.
      activation_dims: names of dims that only activations have, in `with_logical_constraint`. Rules use them.
      axes: the model's own name of a mesh axis -> meshpar's, `{"tp": "tensor"}`, for a model that names mesh axes
        instead of dims. meshpar's own names work as well.
      carried: key -> the initial state that the forward changes, such as batch statistics and random keys. The loss is
        then (params, batch, key, carried), and returns (mean, metrics, carried) or a `LossSums`.
      evaluation: the loss of an evaluation, if it differs, for example because of batch statistics.
      draws: whether the loss draws random numbers. If so, its key is new at each step, else None.
      seed: for the initial parameters, for the keys of `draws`, and for stochastic rounding.
      lowering: `manual`: the trace of the loss is partitioned, so that communication is explicit and every strategy is
        available; `auto`: XLA's GSPMD partitions the step, and chooses what it sends.
      strict: whether an activation may be moved only where a rule or a constraint declares it, in the manual lowering.
      manual: whether the loss is written for local shards. It then gets a device's rows of the batch, and its shards of
        the parameters and of the carried state; it returns a `LossSums` of its rows, or their mean.
      parallel: the strategies of the lowering `manual`, as in a config. A strategy without effect is an error.
      compute_dtype: the dtype in which the loss gets the floating parameters.
      accum_dtype: the dtype in which gradients are summed over microbatches and devices. Default: at least float32.
      num_microbatches: equal parts of a batch that are computed one after another.
      number_format: `int8` or `fp8`: products of an activation and a parameter are computed in 8 bits, as
        `precision.matmul` of a config says. Weights with a dim `vocab`, `positions`, `experts` or `router` are not.
      num_steps: the steps of the whole training, on which local updates, pruning and schedules depend.
      lora: adds low-rank matrices to the kernels that its `paths` match, and freezes all other parameters.
      freeze: globs of parameters that are not trained; or `Freeze(paths=..., until=100)`, or `Freeze(layers="0:8")`.
      prune: sets weights to zero by a schedule, `{"kind": "n_of_m", "paths": ["**.kernel"]}`.
      clip_norm: the largest global norm of the gradients; None for no limit.
      ema: the decay of an average of the parameters, which evaluations use; see `averaged`.
      params_dtype: the dtype of the stored parameters. Default: that of `init`.
      master_dtype: the dtype of the optimizer's own copy of the parameters. Default: no copy.
      rounding: `stochastic`: how updated bfloat16 parameters are rounded without such a copy.
      offload_optimizer: whether the optimizer's state is stored in the host's memory between steps.

    Returns:
      A `Training`. Nothing is compiled or allocated yet.

    Raises:
      ConfigError: an argument is unknown or has no effect, a glob matches nothing, or a loss has the wrong parameters.
      DataError: the arrays of the batch differ in their number of rows, or the rows cannot be split equally.
      ShardingError: the rules do not fit the arrays or the mesh.

    Examples:
      >>> rows = {"x": jnp.ones((8, 4)), "y": jnp.ones(8)}
      >>> linear = training(
      ...     lambda key: {"w": jax.random.normal(key, (4,))},
      ...     lambda params, batch, key: jnp.square(batch["x"] @ params["w"] - batch["y"]).mean(),
      ...     optax.sgd(0.1), rows, mesh=MeshLayout(data=-1), rules="replicated",
      ... )
      >>> step, state = linear.compile_step(), linear.compile_init()()
      >>> state, metrics = step(state, linear.put(rows))
      >>> int(state.step)
      1
    """
    if not isinstance(mesh, (MeshLayout, dict, str, Mesh, AbstractMesh)):
        raise ConfigError(f"mesh is {mesh!r}, and no mesh; pass its sizes, such as 'data=2 tensor=4'")
    layout = MeshLayout.of(mesh) if isinstance(mesh, (MeshLayout, dict, str)) else None
    dcn = layout.dcn.sizes if layout and layout.dcn else {}
    on: Any = layout.build() if layout else mesh  # before JAX is used: build() may simulate devices
    rules = AxisRules.model_validate(rules)
    check_axes(axes or {})
    _check_activation_dims(activation_dims, rules)
    infers = isinstance(dims, str) and dims == INFER
    given_dims: Any = None if infers else dims
    dims, batch_dims = check_names(dims=given_dims, batch_dims=batch_dims)
    ctx = ParallelContext(
        mesh=on,
        rules=rules,
        manual=lowering == "manual",
        strict=strict,
        parallel=parallel,
        compute_dtype=compute_dtype,
        accum_dtype=accum_dtype,
        num_microbatches=num_microbatches,
        number_format=number_format,
        dcn_axes=tuple(axis for axis, size in dcn.items() if size > 1),
        activation_dims=tuple(activation_dims),
        reads_positions=False,
    )
    check_arrays(batch)
    if is_module(init):
        _check_module_arguments(carried, draws)
        user = functions(init, loss, evaluation, batch)
    else:
        user = Functions(init, loss, evaluation, carried, draws)
    given = options(
        tx, num_steps, lora, freeze, prune, clip_norm=clip_norm, ema=ema, params_dtype=params_dtype,
        master_dtype=master_dtype, rounding=rounding, compute_dtype=compute_dtype, seed=seed,
    )  # fmt: skip
    check_partitioned(ctx, manual)
    _check_arguments(ctx, user, manual, given, infers)
    found = specs_of(user.init, user.carried, seed, dims, axes)
    of_all = jax.tree.leaves((found.specs, found.carried))
    if shared := {*activation_dims} & {dim for spec in of_all for dim in spec.dims}:
        raise ConfigError(f"activation_dims: {', '.join(sorted(shared))}: parameters have this dim too; remove it")
    key = partial(step_key, seed) if user.draws else None
    arrays = batch_specs(batch, batch_dims, ctx)
    made, kinds = assembled(
        user, found, arrays, rules, axes=axes or {}, key=key and jax.eval_shape(key, 0), mesh=on, infers=infers,
        lora=given.lora, needs_kinds=given.needs_kinds, params_dtype=params_dtype,
    )  # fmt: skip
    ctx = replace(ctx, rules=made.rules)
    given.check_complex(made.specs, ctx)
    frozen, rows = given.frozen(made.specs), given.frozen_rows(made.specs, ctx)
    whole = Training(
        specs=made.specs,
        init=made.init,
        carried=made.carried,
        init_carried=made.init_carried,
        loss=made.loss,
        evaluation=made.evaluation if user.evaluation else None,
        update=given.update(made.specs, frozen, rows, kinds),
        batch_specs=arrays,
        ctx=ctx,
        key=key,
        seed=seed,
        frozen=frozen,
        frozen_rows=rows,
        is_offloaded=offload_optimizer,
        rounds=given.rounds(ctx),
        is_local=manual,
    ).in_stages()
    _ = whole.placement
    whole.check_strategies()
    return whole


def _check_activation_dims(dims: Sequence[str], rules: AxisRules) -> None:
    problems = Problems()
    for dim in (dim for dim in dims if dim not in rules.table):
        problems.add(f"activation_dims: {dim}", "no rule has this name, so it has no effect", f"a rule {dim}=[axes]")
    problems.raise_any(ConfigError, "these arguments of training are wrong:")


def _check_module_arguments(carried: Any, draws: bool) -> None:
    problems = Problems()
    if carried is not None:
        problems.add("carried", "a Flax module carries its own state from step to step", "no carried")
    if draws:
        what = "the loss of a Flax module gets a key if it has a third parameter"
        problems.add("draws", what, "def loss(model, batch, key), without draws")
    problems.raise_any(ConfigError, "these arguments of training are wrong:")


def _check_arguments(ctx: ParallelContext, user: Functions, is_local: bool, given: Options, infers: bool) -> None:
    problems = Problems()
    if infers and is_local:
        problems.add("dims='infer'", OF_SHARDS, "manual=False, or names, dims={'up.kernel': ('embed', 'mlp')}")
    arguments = ("params", "batch", "key", *(["carried"] if user.carried else []))
    for name, loss in (("loss", user.loss), ("evaluation", user.evaluation)):
        if loss and not takes(loss, len(arguments)):
            problems.add(name, f"is called with {len(arguments)} arguments", f"def {name}({', '.join(arguments)})")
    for name in ("compute_dtype", "accum_dtype"):
        check_float64(name, getattr(ctx, name), problems)
    check_recognized(ctx, "your loss", is_local, problems)
    check_stages(ctx, is_local, problems)
    given.check(ctx, is_local, problems)
    check_strategies(ctx, is_local, problems)
    problems.found = [in_python(problem) for problem in problems.found]
    problems.raise_any(ConfigError, "these arguments of training are wrong:")


def in_python(problem: Problem) -> Problem:
    """A problem of a config in the words of `training`'s arguments."""

    def said(text: str) -> str:
        for key, argument in _ARGUMENTS.items():
            text = text.replace(key, argument)
        return text

    return Problem(said(problem.where), said(problem.what), said(problem.fix))


_ARGUMENTS = {
    "model.manual=false": "manual=False",
    "lowering=manual": "lowering='manual'",
    "under lowering: auto": "under lowering='auto'",
    "=null": "=None",
    "rules.zero=": "AxisRules zero=",
    "precision.matmul": "number_format",
    "precision.master": "master_dtype",
    "precision.params": "params_dtype",
    "optim.ema": "ema",
}
"""A key of a config, in an error -> the argument of `training` in its place."""
