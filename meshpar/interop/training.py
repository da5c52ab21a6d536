"""Any Flax model, or any pytree of parameters, with a loss of the user's own: put on a mesh as it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.errors import ConfigError, Problems, nearest
from meshpar.interop.declared import changing, declared_dims, flax_rules, lazily, unboxed
from meshpar.interop.keys import KEY_DATA, as_data, as_keys, key_implementations
from meshpar.mesh.layout import AXES, MeshLayout
from meshpar.sharding.constrain import Lowering, current
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.batches import batch_specs
from meshpar.train.loss import Batch, Loss, Tally, as_tally, warn_of_masks
from meshpar.train.step import Update
from meshpar.train.training import Training, step_key
from meshpar.tree import flatten_with_paths, map_with_path, matching

UNNAMED = "unnamed"
"""The name of each dim of a parameter that has none. `AxisRules(..., unnamed=())` leaves it whole."""
AXIS_NAME = "batch"
"""The name by which a loss may take means over the batch, `BatchNorm(axis_name="batch")`: it has all rows already."""

CARRY = (
    "give it as carried=lambda key: nnx.state(Model(nnx.Rngs(key)), nnx.Not(nnx.Param)), merge it in the loss, "
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
    mesh: MeshLayout | AnyMesh,
    rules: AxisRules,
    dims: Dims | None = None,
    batch_dims: Dims | None = None,
    activation_dims: Sequence[str] = (),
    axes: Mapping[str, str] | None = None,
    carried: Init | None = None,
    evaluation: Callable[..., Any] | None = None,
    draws: bool = False,
    **more: Any,
) -> Training:
    """The training of a model that knows nothing of meshpar: any pytree of parameters, and a loss.

    Names of dims are those that a Flax model declares: Linen's `with_partitioning` and `with_logical_partitioning`,
    NNX's `with_partitioning` (its `out_sharding`), also where `scan` and `vmap` stack layers. Its
    `with_logical_constraint` follows the same rules.

    Args:
      init: key -> the first parameters: `model.init(key, x)["params"]`, `nnx.state(Model(nnx.Rngs(key)), nnx.Param)`,
        or any tree of arrays.
      loss: (params, batch, key) -> the mean over the rows, a scalar; or (mean, metrics), with a dict of other means;
        or a `Tally` of sums, where rows count differently.
      batch: an example: name -> array, or struct, the same rows first in each.
      mesh: where; a `MeshLayout` is laid on the devices that are here.
      dims: path glob -> a name for each dim of the arrays that it matches, the first that does; goes before what
        the model declares. A dim of which neither says anything is called `unnamed`.
      batch_dims: name -> a name for each dim of an array of the batch; default: `batch`, and the others whole.
      activation_dims: names that only activations have, in `with_logical_constraint`: the rules may name them too.
      axes: the model's own name of a mesh axis -> meshpar's, `{"tp": "tensor"}`, for a model that names axes of a mesh
        and not dims. The axes of meshpar keep their names.
      carried: key -> the first of what a step hands to the next beside the parameters, such as batch statistics and
        random keys: the loss is (params, batch, key, carried) then, and returns (mean, metrics, carried), or a
        `Tally`.
      evaluation: the loss where nothing is learned, if it is another: of a model with batch statistics, for instance.
      draws: whether the loss draws random numbers; it gets a key of its own for each step then, else None.
      more: as of `Training`: manual, dtype, seed, num_microbatches.

    Raises:
      ConfigError: an argument is not known, a glob matches nothing, or a loss has other arguments.
      DataError: the batch has an array that is not like the others, or rows that cannot be cut into equal parts.

    Example:
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
    mesh = mesh.build() if isinstance(mesh, MeshLayout) else mesh  # first: it may have devices to simulate
    check_axes(axes or {})
    _check_arguments(more, {"loss": loss, "evaluation": evaluation}, carried is not None)
    seed = more.get("seed", 0)
    passes = more.get("num_microbatches", 1)
    how = Lowering(mesh, rules, False, num_microbatches=passes, activation_dims=tuple(activation_dims))
    specs, carried_specs = specs_of(init, carried, seed, dims or {})
    if shared := {*activation_dims} & {dim for spec in jax.tree.leaves((specs, carried_specs)) for dim in spec.dims}:
        raise ConfigError(f"activation_dims: {', '.join(sorted(shared))}: parameters have such a dim too; leave it out")
    keys = key_implementations(jax.eval_shape(lazily(carried), jax.random.key(seed))) if carried else {}
    names = set(batch)
    return Training(
        specs=specs,
        init=arrays_of(init),
        carried=carried_specs,
        init_carried=arrays_of(carried) if carried else lambda key: {},
        loss=tallied(loss, names, carried is not None, keys, axes),
        evaluation=evaluation and tallied(evaluation, names, carried is not None, keys, axes, hands_on=False),
        update=Update(tx),
        batch_specs=batch_specs(batch, batch_dims or {}, how),
        mesh=mesh,
        rules=with_axes(rules, axes or {}, (specs, carried_specs)),
        activation_dims=tuple(activation_dims),
        key=partial(step_key, seed) if draws else None,
        **more,
    )


def specs_of(init: Init, carried: Init | None, seed: int, dims: Dims) -> tuple[Any, Any]:
    """Trees of `ArraySpec`, of what an init makes and of what it carries; see `training`.

    Raises:
      ConfigError: a glob matches nothing, or the init makes what no optimizer changes.
    """
    problems, first = Problems(), jax.random.key(seed)
    made = jax.eval_shape(lazily(init), first)
    _check_trainable(made, problems)
    problems.raise_any(ConfigError, "an optimizer cannot change these:")
    specs = _specs(made, dims, problems)
    carried_specs = _specs(jax.eval_shape(lazily(carried), first), dims, problems) if carried else {}
    paths = [path.removesuffix(".value") for path in (*flatten_with_paths(specs), *flatten_with_paths(carried_specs))]
    for glob in dims:
        if not matching(paths, glob):
            near = nearest(glob, paths)
            fix = f"did you mean {near}?" if near else f"the arrays are {', '.join(paths[:8])}"
            problems.add(f"dims[{glob!r}]", "matches no array", fix)
    problems.raise_any(ConfigError, "the names of dims do not fit the model:")
    return specs, carried_specs


def _specs(made: Any, dims: Dims, problems: Problems) -> Any:
    keys = key_implementations(made)
    boxed = jax.eval_shape(as_data, made)
    declared = declared_dims(boxed)

    def spec(path: str, struct: jax.ShapeDtypeStruct) -> ArraySpec:
        words = (KEY_DATA,) if path in keys else ()
        path = path.removesuffix(".value")  # of an NNX variable
        given = next((names for glob, names in dims.items() if matching([path], glob)), declared.get(path))
        names = tuple(name or UNNAMED for name in given or (None,) * (struct.ndim - len(words)))
        if len(names) + len(words) != struct.ndim:
            shape = f"{struct.dtype}{list(struct.shape)}"
            problems.add(f"{path}  {shape}", f"has {len(names)} names: {', '.join(names)}", "a name for each dim")
            names = (UNNAMED,) * (struct.ndim - len(words))
        return ArraySpec(struct.shape, np.dtype(struct.dtype), names + words)

    return map_with_path(spec, unboxed(boxed))


def _check_trainable(made: Any, problems: Problems) -> None:
    """Adds which of the parameters are none."""
    fix = "init: nnx.state(model, nnx.Param); carried: nnx.state(model, nnx.Not(nnx.Param))"
    kinds = changing(made)
    for path, kind in kinds.items():
        problems.add(path, f"is {kind} of NNX, which the forward changes", fix)
    for path, struct in flatten_with_paths(made).items():
        of_nnx = path.removesuffix(".value") in kinds
        if not of_nnx and not jnp.issubdtype(struct.dtype, jnp.inexact):
            what = f"is {struct.dtype}{list(struct.shape)}, which has no gradient"
            problems.add(path, what, "let the loss close over it, or give it as `carried`")
        elif path.startswith("batch_stats."):
            what = "is a batch statistic, which the forward changes"
            problems.add(path, what, 'init: model.init(...)["params"]; carried: {"batch_stats": ...}')


def arrays_of(make: Init) -> Init:
    """`make`, without Linen's boxes, and random keys as integers."""
    return lambda key: as_data(unboxed(lazily(make)(key)))


def with_axes(rules: AxisRules, axes: Mapping[str, str], trees: Any) -> AxisRules:
    """The rules, and one for each dim that a model calls by the axes over which it is sharded."""
    meant = {axis: (axis,) for axis in AXES} | {name: (axis,) for name, axis in axes.items()}
    found = {dim for spec in jax.tree.leaves(trees) for dim in spec.dims if axes and dim not in rules.table}
    parts = {dim: dim.split("+") for dim in found}
    over = {dim: sum((meant[part] for part in of), ()) for dim, of in parts.items() if {*of} <= {*meant}}
    return rules | AxisRules(**over) if over else rules  # pyright: ignore


def check_axes(axes: Mapping[str, str]) -> None:
    """Checks a model's own names of axes, see `training`."""
    problems = Problems()
    for name, axis in axes.items():
        if axis not in AXES or list(axes.values()).count(axis) > 1:
            what = "has two names" if axis in AXES else "is no axis of a mesh"
            problems.add(f"axes: {name}", f"{axis} {what}", f"each of {', '.join(AXES)} at most once")
    problems.raise_any(ConfigError, "the model's names of axes are wrong:")


def tallied(
    loss: Callable[..., Any],
    arrays: set[str],
    carries: bool,
    keys: Mapping[str, Any],
    axes: Mapping[str, str] | None = None,
    hands_on: bool = True,
) -> Loss:
    """A user's loss, as one that gives sums.

    Args:
      arrays: the names of those that the user gave, of which alone the loss is told.
      carries: whether it is given what it carries, as a fourth argument.
      keys: as of `key_implementations`.
      hands_on: whether it has to return what it carries: an evaluation need not.
    """

    def tallied(params: Any, batch: Batch, key: jax.Array | None, carried: Any) -> Tally:
        given = {name: x for name, x in batch.items() if name in arrays}

        def of_batch(params: Any, carried: Any) -> Any:
            with flax_rules(axes), _explained():
                more = (as_keys(carried, keys),) if carries else ()
                found = loss(params, given, key, *more)
            passes = getattr(current(), "num_microbatches", 1)
            if hands_on and passes > 1 and not isinstance(found, Tally):
                warn_of_masks(arrays, passes)
            return as_tally(as_data(found), batch["rows"], carried, hands_on)

        if getattr(current(), "manual", False):
            return of_batch(params, carried)
        bound = jax.vmap(of_batch, in_axes=None, out_axes=None, axis_size=1, axis_name=AXIS_NAME)
        return bound(params, carried)

    return tallied


@contextmanager
def _explained() -> Iterator[None]:
    """Turns the errors of JAX and Flax that a model written for another way of training meets here into plain ones."""
    try:
        yield
    except Exception as error:
        said = str(error)
        if unbound := re.search(r"unbound axis name: (\w+)", said):
            what = f"the loss communicates over {unbound[1]!r}, which only pmap, vmap or shard_map would bind"
            fix = f'the rows of all devices are one batch here: leave axis_name out, or say axis_name="{AXIS_NAME}"'
        elif missing := re.search(r"Resource axis: (\w+) of .* is not found in mesh", said):
            what = f"the model is sharded over an axis {missing[1]!r}, and the mesh has {', '.join(AXES)}"
            fix = f'say which it is, axes={{"{missing[1]}": "tensor"}}; in a config, model.axes'
        elif "of type Auto or Manual" in said:
            what = "the model gives out_sharding to a JAX function, which asks for a mesh of explicit axes"
            fix = "leave out_sharding out of the forward; or say jax.lax.with_sharding_constraint(x, spec) instead"
        elif "different trace level" in said:
            what = "the loss changes NNX state that was made outside of it, and the change would be lost"
            fix = CARRY
        elif "Incorrect number of leaves" in said:
            what = "the NNX model has state beside its parameters, and the loss merges the parameters alone"
            fix = CARRY
        else:
            raise
        raise ConfigError(f"{what}; {fix}") from error


def _check_arguments(more: Mapping[str, Any], losses: Mapping[str, Callable[..., Any] | None], carries: bool) -> None:
    problems = Problems()
    known = [field.name for field in fields(Training) if field.name not in signature(training).parameters]
    known = [name for name in known if name not in ("specs", "init_carried", "update", "batch_specs", "key")]
    for name in (name for name in more if name not in known):
        near = nearest(name, [*known, *signature(training).parameters])
        fix = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
        problems.add(name, "training has no such argument", fix)
    arguments = ("params", "batch", "key", *(["carried"] if carries else []))
    for name, loss in losses.items():
        if loss and not takes(loss, len(arguments)):
            problems.add(name, f"is called with {len(arguments)} arguments", f"def {name}({', '.join(arguments)})")
    problems.raise_any(ConfigError, "these arguments of training are wrong:")


def takes(loss: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments."""
    try:
        signature(loss).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # of a function that does not tell
        return True
    return True
