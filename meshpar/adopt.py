"""Any Flax model, or any pytree of parameters, with a loss of the user's own: put on a mesh as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.mesh.layout import MeshLayout
from meshpar.nn.declared import declared_dims, flax_rules, lazily, unboxed
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.loss import Batch, Loss, Tally
from meshpar.train.step import Update
from meshpar.train.training import Training, step_key
from meshpar.tree import map_with_path, matching

UNNAMED = "unnamed"
"""The name of each dim of a parameter that has none. `AxisRules(..., unnamed=())` leaves it whole."""


def training(
    init: Callable[[jax.Array], Any],
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    batch: Mapping[str, Any],
    *,
    mesh: MeshLayout | AnyMesh,
    rules: AxisRules,
    dims: Mapping[str, tuple[str, ...]] | None = None,
    batch_dims: Mapping[str, tuple[str, ...]] | None = None,
    carried: Callable[[jax.Array], Any] | None = None,
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
      carried: key -> the first of what a step hands to the next beside the parameters, such as batch statistics:
        the loss is (params, batch, key, carried) then, and returns (mean, metrics, carried), or a `Tally`.
      evaluation: the loss where nothing is learned, if it is another: of a model with batch statistics, for instance.
      draws: whether the loss draws random numbers; it gets a key of its own for each step then, else None.
      more: as of `Training`: manual, dtype, seed, num_microbatches.

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
    batch_names, seed = batch_dims or {}, more.get("seed", 0)

    def of_batch(name: str, x: Any) -> ArraySpec:
        return ArraySpec(x.shape, np.dtype(x.dtype), batch_names.get(name, ("batch", *[""] * (x.ndim - 1))))

    make, make_carried = unboxing(init), unboxing(carried or (lambda key: {}))
    return Training(
        specs=specs_of(init, seed, dims or {}),
        init=make,
        carried=specs_of(carried, seed, dims or {}) if carried else {},
        init_carried=make_carried,
        loss=tallied(loss, set(batch), carried is not None),
        evaluation=evaluation and tallied(evaluation, set(batch), carried is not None),
        update=Update(tx),
        batch_specs={name: of_batch(name, x) for name, x in batch.items()},
        mesh=mesh.build() if isinstance(mesh, MeshLayout) else mesh,
        rules=rules,
        key=partial(step_key, seed) if draws else None,
        **more,
    )


def specs_of(init: Callable[[jax.Array], Any], seed: int, dims: Mapping[str, tuple[str, ...]]) -> Any:
    """Tree of `ArraySpec`, of what an init makes; see `training`."""
    boxed = jax.eval_shape(lazily(init), jax.random.key(seed))
    declared = declared_dims(boxed)

    def spec(path: str, struct: jax.ShapeDtypeStruct) -> ArraySpec:
        path = path.removesuffix(".value")  # of an NNX variable
        given = next((names for glob, names in dims.items() if matching([path], glob)), declared.get(path))
        names = tuple(name or UNNAMED for name in given or (None,) * struct.ndim)
        return ArraySpec(struct.shape, np.dtype(struct.dtype), names)

    return map_with_path(spec, unboxed(boxed))


def unboxing(init: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """`init`, without Linen's boxes."""
    return lambda key: unboxed(lazily(init)(key))


def tallied(loss: Callable[..., Any], arrays: set[str], carries: bool) -> Loss:
    """A loss that may give means, as sums; it sees the arrays that the user gave."""

    def tallied(params: Any, batch: Batch, key: jax.Array | None, carried: Any) -> Tally:
        given = params, {name: x for name, x in batch.items() if name in arrays}, key
        with flax_rules():
            found = loss(*given, carried) if carries else loss(*given)
        return found if isinstance(found, Tally) else _of_means(found, batch["rows"], carried)

    return tallied


def _of_means(found: Any, rows: jax.Array, carried: Any) -> Tally:
    mean, *aside = found if isinstance(found, tuple) else (found,)
    metrics, carried = (*aside, carried) if len(aside) == 1 else aside or ({}, carried)
    num_rows = jnp.ones_like(rows).sum(dtype=jnp.int32)
    total = lambda x: x * num_rows.astype(x.dtype)
    return Tally(total(mean), num_rows, jax.tree.map(total, metrics), carried)
