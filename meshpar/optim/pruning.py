"""Pruning during training: weights of small magnitude become zero, and stay zero.

After `begin` steps, a part of the weights is pruned every `every` steps, `times` times. After the i-th time

    1 - (1 - i / times)^3

of the weights that are to be pruned are zero: most are pruned early, while the others can still adapt. Masks are a part
of the optimizer's state: sharded like their weights, and saved in checkpoints.

Source: Zhu and Gupta 2017, arXiv:1710.01878 (schedule); Mishra et al. 2021, arXiv:2104.08378 (N:M).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pydantic
from jax import lax

from meshpar.config import Config, Count, Positive, Strings, default
from meshpar.errors import ConfigError, Problems, suggestion
from meshpar.optim.base import Matrix
from meshpar.parallel.precision import wide
from meshpar.sharding.spec import ArraySpec
from meshpar.tree import flatten_with_paths, map_with_path, matching


class Prune(Config):
    """The schedule of a pruning, and its weights."""

    paths: Strings = default(("blocks.**.kernel",))
    """Path globs of the weights that are pruned."""
    begin: Count = 0
    """Steps before the schedule."""
    every: Positive = 100
    """Steps between two prunings."""
    times: Annotated[Positive, pydantic.Field(le=1000)] = 10
    """How often weights are pruned."""

    @property
    def end(self) -> int:
        """The step after which masks do not change."""
        return self.begin + self.every * self.times

    def fraction(self, i: int) -> float:
        """The fraction of the weights that are to be pruned that are zero after the i-th time."""
        return 1 - (1 - i / self.times) ** 3

    def check(self, num_steps: int, ema: float | None, problems: Problems) -> None:
        """Adds a problem if the schedule is longer than the run, or if the parameters are averaged too."""
        if self.end > num_steps:
            what = f"the last pruning is after step {self.end}, and num_steps = {num_steps}"
            every = max(1, (num_steps - self.begin) // self.times)
            fits = self.begin + every * self.times <= num_steps
            problems.add("prune", what, f"prune.every={every}" if fits else f"num_steps={self.end}")
        if ema:
            what = "the average of a pruned weight includes its values before pruning, and so is not zero"
            problems.add("optim.ema", what, "optim.ema=null, or prune=null")

    @abstractmethod
    def fits(self, spec: ArraySpec, matrix: Matrix) -> str:
        """Why these weights cannot be pruned; empty if they can."""

    @abstractmethod
    def mask(self, weights: jax.Array, matrix: Matrix, i: jax.Array) -> jax.Array:
        """bool like the weights: False where they are pruned at the i-th time, int32[] from 1 on."""


class Magnitude(Prune):
    """Prunes the smallest weights of each matrix: `round(sparsity * elements)` of them in the end.

    Of equal magnitudes the first in the order of rows are pruned, so the number is exact.

    Communication: for sharded weights, at each pruning, 64 all-reduces of an int32 for each matrix, 96 in float64. No
      weight is sent.
    """

    kind: Literal["magnitude"] = "magnitude"
    sparsity: Annotated[float, pydantic.Field(gt=0, lt=1)]
    """The fraction of the weights of each matrix that is zero in the end."""

    def fits(self, spec: ArraySpec, matrix: Matrix) -> str:
        return ""

    def mask(self, weights: jax.Array, matrix: Matrix, i: jax.Array) -> jax.Array:
        start = min(matrix.inputs + matrix.outputs)
        size = math.prod(weights.shape[start:])
        num_pruned = [round(self.sparsity * self.fraction(time) * size) for time in range(self.times + 1)]
        return ~smallest(jnp.abs(wide(weights)), start, jnp.asarray(num_pruned, jnp.int32)[i])


class NOfM(Prune):
    """Keeps the n largest of every m consecutive inputs of an output, as sparse tensor cores need: 2 of 4.

    The schedule keeps fewer and fewer of m. Of equal magnitudes the first are kept.

    Communication: none, if shards hold whole groups.
    """

    kind: Literal["n_of_m"] = "n_of_m"
    n: Positive = 2
    """Weights of a group that are kept in the end."""
    m: Annotated[Positive, pydantic.Field(le=64)] = 4
    """Consecutive inputs of a group."""

    @pydantic.model_validator(mode="after")
    def _keeps_some(self) -> NOfM:
        if self.n >= self.m:
            raise ValueError(f"n = {self.n} is not below m = {self.m}: nothing would be pruned")
        return self

    def fits(self, spec: ArraySpec, matrix: Matrix) -> str:
        size = spec.shape[matrix.inputs[-1]]
        return f"its {size} inputs cannot be divided into groups of {self.m}" if size % self.m else ""

    def mask(self, weights: jax.Array, matrix: Matrix, i: jax.Array) -> jax.Array:
        dim = matrix.inputs[-1]
        shape = weights.shape
        groups = jnp.abs(wide(weights)).reshape(*shape[:dim], shape[dim] // self.m, self.m, *shape[dim + 1 :])
        groups = jnp.moveaxis(groups, dim + 1, -1)
        this = groups[..., :, None]
        other = groups[..., None, :]
        index = jnp.arange(self.m, dtype=jnp.int32)
        is_before = (other > this) | ((other == this) & (index[None, :] < index[:, None]))
        num_kept = [self.m - round((self.m - self.n) * self.fraction(time)) for time in range(self.times + 1)]
        kept = is_before.sum(-1, dtype=jnp.int32) < jnp.asarray(num_kept, jnp.int32)[i]
        return jnp.moveaxis(kept, -1, dim + 1).reshape(shape)


Pruning = Annotated[Magnitude | NOfM, pydantic.Field(discriminator="kind")]


class PruneState(NamedTuple):
    """The masks of pruned weights by path, how often they were pruned, and the state of the wrapped optimizer."""

    masks: dict[str, Any]
    times: jax.Array
    inner: Any


def with_pruning(
    tx: optax.GradientTransformation, prune: Prune, specs: Any, kinds: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its updates set pruned weights to zero.

    A pruning uses the weights after the update of its step. If that step is skipped because it is not finite, the next
    one prunes. Gradients of pruned weights are zero for the optimizer.

    Args:
      specs: tree of `ArraySpec`, of the trained parameters.
      kinds: the same of `Matrix`; default: by the names of the dims.

    Raises:
      ConfigError: lists globs that match no trained parameter, and weights that cannot be pruned.

    Memory: a byte for each of these weights.
    """
    inner = optax.with_extra_args_support(tx)
    matrix = flatten_with_paths(kinds or jax.tree.map(lambda spec: Matrix.of(spec.dims), specs))
    _check(prune, specs, matrix)
    pruned = {path: matrix[path] for glob in prune.paths for path in matching(matrix, glob)}

    def init(params: Any) -> PruneState:
        weights = flatten_with_paths(params)
        masks = {path: jnp.ones_like(weights[path], bool) for path in pruned}
        return PruneState(masks, jnp.int32(0), tx.init(params))

    def update(
        grads: Any, state: PruneState, params: Any = None, *, step: jax.Array, **extra: Any
    ) -> tuple[Any, PruneState]:
        grads = _where(state.masks, grads, jax.tree.map(jnp.zeros_like, grads))
        updates, inner_state = inner.update(grads, state.inner, params, step=step, **extra)
        times = jnp.clip((step + 1 - prune.begin) // prune.every, 0, prune.times).astype(jnp.int32)
        after = flatten_with_paths(jax.tree.map(jnp.add, params, updates))

        def choose() -> dict[str, jax.Array]:
            return {path: prune.mask(after[path], one, times) for path, one in pruned.items()}

        masks = lax.cond(times > state.times, choose, lambda: state.masks)
        updates = _where(masks, updates, jax.tree.map(jnp.negative, params))
        return updates, PruneState(masks, times, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


def _where(masks: Mapping[str, jax.Array], tree: Any, otherwise: Any) -> Any:
    """Replaces elements whose mask is False; masks are by path."""
    return map_with_path(lambda path, x, y: jnp.where(masks[path], x, y) if path in masks else x, tree, otherwise)


def _check(prune: Prune, specs: Any, matrices: Mapping[str, Matrix]) -> None:
    problems = Problems()
    trained = flatten_with_paths(specs)
    for glob in prune.paths:
        found = matching(trained, glob)
        if not found:
            fix = suggestion(glob, trained, "`meshpar explain` lists the parameters")
            problems.add("prune.paths", f"no trained parameter matches {glob!r}", fix)
        for path in found:
            if why := prune.fits(trained[path], matrices[path]):
                problems.add(f"prune.paths: {path}", why, "leave it out of prune.paths")
    problems.raise_any(ConfigError, "prune does not fit the model:")


def smallest(magnitudes: jax.Array, start: int, num: jax.Array) -> jax.Array:
    """bool: the `num` smallest elements of each array of a stack; of equal ones, the first in row-major order.

    Args:
      magnitudes: float32 or float64, not negative; dims before `start` stack arrays.
      num: int32[].

    Communication: that of `_kth`, twice.

    >>> smallest(jnp.asarray([[3.0, 1.0, 2.0, 1.0], [5.0, 5.0, 5.0, 4.0]]), 1, jnp.int32(2)).astype(jnp.int32)
    Array([[0, 1, 0, 1],
           [1, 0, 0, 1]], dtype=int32)
    """
    bits = jnp.uint64 if magnitudes.dtype == jnp.float64 else jnp.uint32
    keys = lax.bitcast_convert_type(magnitudes, bits)  # floats that are not negative are ordered like their bits
    last = _kth(keys, start, num)
    is_smaller = keys < last
    inner = tuple(range(start, keys.ndim))
    index = jnp.zeros(keys.shape, jnp.uint32)
    for dim in inner:
        index = index * jnp.uint32(keys.shape[dim]) + lax.broadcasted_iota(jnp.uint32, keys.shape, dim)
    is_tied = keys == last
    among = jnp.where(is_tied, index, jnp.uint32(2**32 - 1))
    rest = num - is_smaller.sum(inner, keepdims=True, dtype=jnp.int32)
    return (is_smaller | (is_tied & (among <= _kth(among, start, rest)))) & (num > 0)


def _kth(keys: jax.Array, start: int, k: jax.Array) -> jax.Array:
    """The k-th smallest key of each array of a stack, found bit by bit: the largest t with fewer than k keys below it.

    Sorting would gather sharded arrays. Here devices sum the number of their keys below t.

    Communication: for sharded keys, an all-reduce of an int32 for each array, for each bit of a key.
    """
    inner = tuple(range(start, keys.ndim))
    bits = jnp.iinfo(keys.dtype).bits

    def decide(i: jax.Array, low: jax.Array) -> jax.Array:
        candidate = low | (jnp.ones_like(low) << (bits - 1 - i).astype(low.dtype))
        num_below = (keys < candidate).sum(inner, keepdims=True, dtype=jnp.int32)
        return jnp.where(num_below < k, candidate, low)

    return lax.fori_loop(0, bits, decide, jnp.zeros_like(keys, shape=(*keys.shape[:start], *(1 for _ in inner))))
