"""A training: a loss, an optimizer and a mesh, worked out as far as it goes without a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.mesh.layout import MeshLayout
from meshpar.sharding.constrain import Lowering
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.evaluate import Evaluation, compile_evaluation
from meshpar.train.gradients import Gradients, Objective, auto, manual
from meshpar.train.loss import Batch, Loss
from meshpar.train.state import StatePlacement, TrainState, compile_init, place
from meshpar.train.step import Metrics, Step, Update, batch_structs, compile_step, step_function
from meshpar.tree import map_with_path, matching


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a step computes, and where: the same declaration on another mesh is `replace(training, mesh=...)`.

    Args:
      specs: tree of `ArraySpec`, of the parameters as they are stored.
      init: key -> the first parameters, of any dtype.
      loss: (params, batch, key) -> (sum, count) over the rows at hand.
      update: the optimizer.
      batch_specs: name -> `ArraySpec` of an array of a batch; its first dim is `batch`.
      mesh: real or abstract.
      rules: dim -> axes.
      manual: whether the step is one `shard_map`, for a loss that is written for local shards; else GSPMD's.
      key: step -> the step's random key; None where the loss draws nothing.
      dtype: in which the loss is computed.
      sums: in which gradients are summed over microbatches and devices; None for float32 at least.
      seed: of the first parameters.
      num_microbatches: how many parts a batch is computed in, one after the other.
    """

    specs: Any
    init: Callable[[jax.Array], Any]
    loss: Loss
    update: Update
    batch_specs: dict[str, ArraySpec]
    mesh: AnyMesh
    rules: AxisRules
    manual: bool = False
    key: Callable[[jax.Array], jax.Array] | None = None
    dtype: Any = jnp.float32
    sums: Any = None
    seed: int = 0
    num_microbatches: int = 1

    @cached_property
    def placement(self) -> StatePlacement:
        return place(self.specs, self.rules, self.mesh, self.update.tx)

    @cached_property
    def how(self) -> Lowering:
        return Lowering(self.mesh, self.rules, self.manual, self.dtype, self.sums, self.num_microbatches)

    @cached_property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch, as structs with shardings."""
        return batch_structs(self.how, self.batch_specs)

    @property
    def objective(self) -> Objective:
        return Objective(self.loss, self.key or (lambda step: None), self.num_microbatches, self.dtype, self.sums)

    @property
    def gradients(self) -> Callable[..., Gradients]:
        if self.manual:
            return manual(self.objective, self.how, self.placement, self.batch)
        return auto(self.objective, self.how)

    @property
    def step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The step, not yet compiled."""
        return step_function(self.gradients, self.update, self.placement)

    def compile_step(self) -> Step:
        return compile_step(self.step, self.placement, self.batch)

    def compile_evaluation(self) -> Evaluation:
        return compile_evaluation(self.objective, self.how, self.placement, self.batch)

    def compile_init(self, options: Any = None) -> Callable[[], TrainState]:
        return compile_init(self.init, self.update.tx, self.placement, self.seed, options)


UNNAMED = "unnamed"
"""The name of each dim of a parameter that has none. `AxisRules(..., unnamed=())` leaves it whole."""


def training(
    init: Callable[[jax.Array], Any],
    loss: Callable[[Any, Batch, jax.Array | None], Any],
    tx: optax.GradientTransformation,
    batch: Mapping[str, Any],
    *,
    mesh: MeshLayout | AnyMesh,
    rules: AxisRules,
    dims: Mapping[str, tuple[str, ...]] | None = None,
    batch_dims: Mapping[str, tuple[str, ...]] | None = None,
    draws: bool = False,
    **more: Any,
) -> Training:
    """The training of a model that knows nothing of meshpar: any pytree of parameters, and a loss.

    Args:
      init: key -> the first parameters.
      loss: (params, batch, key) -> their mean over the rows, a scalar; or (sum, count), where rows count differently.
      batch: an example: name -> array, or struct, the same rows first in each.
      mesh: where; a `MeshLayout` is laid on the devices that are here.
      dims: path glob -> a name for each dim of the parameters that it matches, the first that does. What none matches
        has dims called `unnamed`.
      batch_dims: name -> a name for each dim of an array of the batch; default: `batch`, and the others whole.
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
      >>> state, metrics = step(state, jax.device_put(rows, {name: s.sharding for name, s in linear.batch.items()}))
      >>> int(state.step)
      1
    """
    names, batch_names = dims or {}, batch_dims or {}
    seed = more.get("seed", 0)

    def spec(path: str, struct: jax.ShapeDtypeStruct) -> ArraySpec:
        given = next((dims for glob, dims in names.items() if matching([path], glob)), (UNNAMED,) * struct.ndim)
        return ArraySpec(struct.shape, np.dtype(struct.dtype), given)

    def of_batch(name: str, x: Any) -> ArraySpec:
        return ArraySpec(x.shape, np.dtype(x.dtype), batch_names.get(name, ("batch", *[""] * (x.ndim - 1))))

    return Training(
        specs=map_with_path(spec, jax.eval_shape(init, jax.random.key(seed))),
        init=init,
        loss=_summed(loss, set(batch)),
        update=Update(tx),
        batch_specs={name: of_batch(name, x) for name, x in batch.items()},
        mesh=mesh.build() if isinstance(mesh, MeshLayout) else mesh,
        rules=rules,
        key=partial(step_key, seed) if draws else None,
        **more,
    )


def step_key(seed: int, step: jax.Array) -> jax.Array:
    """The random key of a step, the same on all devices."""
    return jax.random.fold_in(jax.random.key(seed), step)


def _summed(loss: Callable[[Any, Batch, jax.Array | None], Any], arrays: set[str]) -> Loss:
    """A loss that may be a mean as a sum and a count; it sees the arrays that the user gave."""

    def summed(params: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        found = loss(params, {name: x for name, x in batch.items() if name in arrays}, key)
        if isinstance(found, tuple):
            return found
        num_rows = jnp.ones_like(batch["rows"]).sum(dtype=jnp.int32)
        return found * num_rows.astype(found.dtype), num_rows

    return summed
