"""Trains any Flax model, or any pytree of parameters, on a mesh, without changes to the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.errors import ConfigError, Problems, suggestion
from meshpar.interop.declared import changing, declared_dims, flax_rules, lazily, unboxed
from meshpar.interop.keys import KEY_DATA, as_data, as_keys, key_implementations
from meshpar.mesh.layout import AXES, MeshLayout
from meshpar.parallel.context import ParallelContext, current
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.batches import batch_specs
from meshpar.train.loss import Batch, Loss, LossSums, as_loss_sums, warn_of_masks
from meshpar.train.step import Update
from meshpar.train.training import Training, step_key
from meshpar.tree import flatten_with_paths, map_with_path, matching

UNNAMED = "unnamed"
"""The name of dims that neither the model nor the user names. `AxisRules(..., unnamed=())` replicates them."""
AXIS_NAME = "batch"
"""An axis name of size 1 for losses that need one, as in `BatchNorm(axis_name="batch")`. The batch has all rows."""

CARRY = (
    "pass carried=lambda key: nnx.state(Model(nnx.Rngs(key)), nnx.Not(nnx.Param)), merge it in the loss, "
    "nnx.merge(graph, params, carried), and return (mean, metrics, nnx.state(model, nnx.Not(nnx.Param)))"
)

Dims = Mapping[str, tuple[str, ...]]
Init = Callable[[jax.Array], Any]


def training(
    init: Init,
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    batch: Mapping[str, Any],
    *,
    mesh: MeshLayout | AnyMesh | dict[str, Any] | str,
    rules: AxisRules | Sequence[str] | dict[str, Any] | str,
    dims: Dims | None = None,
    batch_dims: Dims | None = None,
    activation_dims: Sequence[str] = (),
    axes: Mapping[str, str] | None = None,
    carried: Init | None = None,
    evaluation: Callable[..., Any] | None = None,
    draws: bool = False,
    **more: Any,
) -> Training:
    """Shards a model of your own on a mesh: any pytree of parameters, a loss and an Optax optimizer.

    A Flax model can declare the names of its dims itself: with Linen's `with_partitioning` or
    `with_logical_partitioning`, or with NNX's `with_partitioning` (its `out_sharding`), also where `scan` or `vmap`
    stacks layers. Flax's `with_logical_constraint` follows the same rules.

    Args:
      init: key -> the initial parameters: `model.init(key, x)["params"]`, `nnx.state(Model(nnx.Rngs(key)), nnx.Param)`,
        or any tree of arrays.
      loss: (params, batch, key) -> the mean over the rows, a scalar; or (mean, metrics), with a dict of other means;
        or a `LossSums` of sums, if rows have different weights.
      tx: any Optax transformation. Its update also gets `value`, `grad`, `value_fn`, `grad_fn` and `step`, if it has
        such arguments.
      batch: an example batch: name -> array or struct. The first dim of each array is its rows.
      mesh: the mesh; a `MeshLayout`, or its sizes as in `"data=2 tensor=4"`, is built on the available devices.
      rules: dim -> mesh axes, or the names of presets.
      dims: path glob -> a name for each dim of the arrays that it matches. The first match applies, and overrides the
        model's declaration. A dim without a name is called `unnamed`.
      batch_dims: array of the batch -> a name for each of its dims; by default only the first dim is sharded, as
        `batch`.
      activation_dims: names of dims that only activations have, in `with_logical_constraint`. Rules may use them.
      axes: the model's own name of a mesh axis -> meshpar's, `{"tp": "tensor"}`, for a model that names mesh axes
        instead of dims. meshpar's own names work as well.
      carried: key -> the initial state that the forward changes, such as batch statistics and random keys. The loss is
        then (params, batch, key, carried), and returns (mean, metrics, carried) or a `LossSums`.
      evaluation: the loss of an evaluation, if it differs, for example because of batch statistics.
      draws: whether the loss draws random numbers. If so, its key is new at each step, else None.
      more: `seed`, and fields of `ParallelContext`: manual, parallel, compute_dtype (float32 by default), accum_dtype,
        num_microbatches.

    Returns:
      A `Training`. Nothing is compiled or allocated yet.

    Raises:
      ConfigError: an argument is unknown, a glob matches nothing, or a loss has the wrong parameters.
      DataError: the arrays of the batch differ in their number of rows, or the rows cannot be split equally.

    Examples:
      >>> rows = {"x": jnp.ones((8, 4)), "y": jnp.ones(8)}
      >>> linear = training(
      ...     lambda key: {"w": jax.random.normal(key, (4,))},
      ...     lambda params, batch, key: jnp.square(batch["x"] @ params["w"] - batch["y"]).mean(),
      ...     optax.sgd(0.1), rows, mesh=MeshLayout(data=-1), rules=AxisRules(preset="replicated", unnamed=()),
      ... )
      >>> step, state = linear.compile_step(), linear.compile_init()()
      >>> state, metrics = step(state, linear.put(rows))
      >>> int(state.step)
      1
    """
    if isinstance(mesh, (MeshLayout, dict, str)):
        mesh = MeshLayout.of(mesh).build()  # before JAX is used: build() may simulate devices
    rules = AxisRules.model_validate(rules)
    check_axes(axes or {})
    _check_arguments(more, {"loss": loss, "evaluation": evaluation}, carried is not None)
    seed = more.pop("seed", 0)
    ctx = ParallelContext(
        mesh=mesh, rules=rules, activation_dims=tuple(activation_dims), **{"compute_dtype": jnp.float32} | more
    )
    specs, carried_specs, keys = specs_of(init, carried, seed, dims or {})
    if shared := {*activation_dims} & {dim for spec in jax.tree.leaves((specs, carried_specs)) for dim in spec.dims}:
        raise ConfigError(f"activation_dims: {', '.join(sorted(shared))}: parameters have this dim too; remove it")
    names = set(batch)
    return Training(
        specs=specs,
        init=arrays_of(init),
        carried=carried_specs,
        init_carried=arrays_of(carried) if carried else lambda key: {},
        loss=with_loss_sums(loss, names, carried is not None, keys, axes),
        evaluation=evaluation and with_loss_sums(evaluation, names, carried is not None, keys, axes, False),
        update=Update(tx),
        batch_specs=batch_specs(batch, batch_dims or {}, ctx),
        ctx=replace(ctx, rules=with_axes(rules, axes or {}, (specs, carried_specs))),
        key=partial(step_key, seed) if draws else None,
        seed=seed,
    )


def specs_of(init: Init, carried: Init | None, seed: int, dims: Dims) -> tuple[Any, Any, dict[str, Any]]:
    """Returns trees of `ArraySpec` of the parameters and of the carried state, see `training`.

    The third result is the generators of the carried state's random keys, see `key_implementations`.

    Raises:
      ConfigError: a glob matches nothing, or `init` returns arrays that no optimizer can train.
    """
    problems = Problems()
    first = jax.random.key(seed)
    params = jax.eval_shape(lazily(init), first)
    _check_trainable(params, problems)
    problems.raise_any(ConfigError, "an optimizer cannot train these arrays:")
    specs = _specs(params, dims, problems)
    state = jax.eval_shape(lazily(carried), first) if carried else {}
    carried_specs = _specs(state, dims, problems)
    paths = [path.removesuffix(".value") for path in (*flatten_with_paths(specs), *flatten_with_paths(carried_specs))]
    for glob in dims:
        if not matching(paths, glob):
            fix = suggestion(glob, paths, f"the arrays are {', '.join(paths[:8])}")
            problems.add(f"dims[{glob!r}]", "matches no array", fix)
    problems.raise_any(ConfigError, "the names of dims do not fit the model:")
    return specs, carried_specs, key_implementations(state)


def _specs(tree: Any, dims: Dims, problems: Problems) -> Any:
    keys = key_implementations(tree)
    boxed = jax.eval_shape(as_data, tree)
    declared = declared_dims(boxed)

    def spec(path: str, struct: jax.ShapeDtypeStruct) -> ArraySpec:
        key_dims = (KEY_DATA,) if path in keys else ()
        num_dims = struct.ndim - len(key_dims)
        path = path.removesuffix(".value")  # of an NNX variable
        given = next((names for glob, names in dims.items() if matching([path], glob)), declared.get(path))
        names = tuple(name or UNNAMED for name in given or (None,) * num_dims)
        if len(names) != num_dims:
            shape = f"{struct.dtype}{list(struct.shape)}"
            problems.add(f"{path}  {shape}", f"has {len(names)} names: {', '.join(names)}", "a name for each dim")
            names = (UNNAMED,) * num_dims
        return ArraySpec(struct.shape, np.dtype(struct.dtype), names + key_dims)

    return map_with_path(spec, unboxed(boxed))


def _check_trainable(params: Any, problems: Problems) -> None:
    """Reports arrays that an optimizer cannot train: NNX state, integers, batch statistics."""
    fix = "init: nnx.state(model, nnx.Param); carried: nnx.state(model, nnx.Not(nnx.Param))"
    kinds = changing(params)
    for path, kind in kinds.items():
        problems.add(path, f"is {kind} of NNX, which the forward changes", fix)
    for path, struct in flatten_with_paths(params).items():
        of_nnx = path.removesuffix(".value") in kinds
        if not of_nnx and not jnp.issubdtype(struct.dtype, jnp.inexact):
            what = f"is {struct.dtype}{list(struct.shape)}, which has no gradient"
            problems.add(path, what, "let the loss close over it, or pass it as `carried`")
        elif path.startswith("batch_stats."):
            what = "is a batch statistic, which the forward changes"
            problems.add(path, what, 'init: model.init(...)["params"]; carried: {"batch_stats": ...}')


def arrays_of(init: Init) -> Init:
    """Wraps `init` so that its result has no Linen boxes, and random keys are integers."""
    return lambda key: as_data(unboxed(lazily(init)(key)))


def with_axes(rules: AxisRules, axes: Mapping[str, str], trees: Any) -> AxisRules:
    """Adds a rule for each dim that is named by the mesh axes that shard it, as in `PartitionSpec("fsdp", "tp")`."""
    known = {axis: axis for axis in AXES} | {**axes}
    dims = {dim for spec in jax.tree.leaves(trees) for dim in spec.dims if axes and dim not in rules.table}
    parts = {dim: dim.split("+") for dim in dims}
    extra = {dim: tuple(known[name] for name in names) for dim, names in parts.items() if {*names} <= {*known}}
    return rules | AxisRules(**extra) if extra else rules  # pyright: ignore


def check_axes(axes: Mapping[str, str]) -> None:
    """Checks the argument `axes` of `training`."""
    problems = Problems()
    for name, axis in axes.items():
        if axis not in AXES or list(axes.values()).count(axis) > 1:
            what = "has two names" if axis in AXES else "is not an axis of a mesh"
            problems.add(f"axes: {name}", f"{axis} {what}", f"use each of {', '.join(AXES)} at most once")
    problems.raise_any(ConfigError, "the model's names of axes are wrong:")


def with_loss_sums(
    loss: Callable[..., Any],
    arrays: set[str],
    carries: bool,
    keys: Mapping[str, Any],
    axes: Mapping[str, str] | None = None,
    returns_carried: bool = True,
) -> Loss:
    """Wraps a user's loss as one that returns a `LossSums`.

    Args:
      arrays: names of the batch's arrays that the loss gets.
      carries: whether the loss gets the carried state as a fourth argument.
      keys: the result of `key_implementations`.
      axes: the model's own name of a mesh axis -> meshpar's.
      returns_carried: whether the loss must return the next carried state; an evaluation need not.
    """

    def wrapped(params: Any, batch: Batch, key: jax.Array | None, carried: Any) -> LossSums:
        inputs = {name: x for name, x in batch.items() if name in arrays}

        def of_batch(params: Any, carried: Any) -> Any:
            with flax_rules(axes), _explained():
                more = (as_keys(carried, keys),) if carries else ()
                result = loss(params, inputs, key, *more)
            num_microbatches = getattr(current(), "num_microbatches", 1)
            if returns_carried and num_microbatches > 1 and not isinstance(result, LossSums):
                warn_of_masks(arrays, num_microbatches)
            return as_loss_sums(as_data(result), batch["rows"], carried, returns_carried)

        if getattr(current(), "manual", False):
            return of_batch(params, carried)
        bound = jax.vmap(of_batch, in_axes=None, out_axes=None, axis_size=1, axis_name=AXIS_NAME)
        return bound(params, carried)

    return wrapped


@contextmanager
def _explained() -> Iterator[None]:
    """Explains errors of JAX and Flax that are caused by a loss written for pmap or for another mesh."""
    try:
        yield
    except Exception as error:
        message = str(error)
        if unbound := re.search(r"unbound axis name: (\w+)", message):
            what = f"the loss communicates over {unbound[1]!r}, an axis name that only pmap, vmap or shard_map binds"
            fix = f'the batch has the rows of all devices: leave axis_name out, or use axis_name="{AXIS_NAME}"'
        elif missing := re.search(r"Resource axis: (\w+) of .* is not found in mesh", message):
            what = f"the model is sharded over an axis {missing[1]!r}, but the mesh has {', '.join(AXES)}"
            fix = f'map it to one of these, axes={{"{missing[1]}": "tensor"}}; in a config, model.axes'
        elif "of type Auto or Manual" in message:
            what = "the model passes out_sharding to a JAX function, which needs a mesh of explicit axes"
            fix = "remove out_sharding from the forward, or use jax.lax.with_sharding_constraint(x, spec) instead"
        elif "different trace level" in message:
            what = "the loss changes NNX state that was created outside of it, so the change would be lost"
            fix = CARRY
        elif "Incorrect number of leaves" in message:
            what = "the NNX model has state besides its parameters, but the loss merges only the parameters"
            fix = CARRY
        else:
            raise
        raise ConfigError(f"{what}; {fix}") from error


def _check_arguments(more: Mapping[str, Any], losses: Mapping[str, Callable[..., Any] | None], carries: bool) -> None:
    problems = Problems()
    known = [field.name for field in fields(ParallelContext) if field.name not in signature(training).parameters]
    known.append("seed")
    for name in (name for name in more if name not in known):
        fix = suggestion(name, [*known, *signature(training).parameters], f"there are {', '.join(known)}")
        problems.add(name, "training has no such argument", fix)
    arguments = ("params", "batch", "key", *(["carried"] if carries else []))
    for name, loss in losses.items():
        if loss and not takes(loss, len(arguments)):
            problems.add(name, f"is called with {len(arguments)} arguments", f"def {name}({', '.join(arguments)})")
    problems.raise_any(ConfigError, "these arguments of training are wrong:")


def takes(loss: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with `count` positional arguments."""
    try:
        signature(loss).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True
