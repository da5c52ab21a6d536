"""The loss of a user's model as one that meshpar trains: it returns a `LossSums`, and its errors say what to change."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import jax
from flax import nnx

from meshpar.errors import ConfigError, Problems
from meshpar.interop import explicit
from meshpar.interop.declared import changing, flax_rules
from meshpar.interop.keys import as_data, as_keys
from meshpar.mesh.varying import varies_over
from meshpar.parallel.context import ParallelContext, current
from meshpar.parallel.context import manual as manual_context
from meshpar.sharding.spec import ArraySpec
from meshpar.train.loss import Batch, Loss, LossSums, as_loss_sums, warn_of_masks
from meshpar.tree import flatten_with_paths

AXIS_NAME = "batch"
"""An axis name of size 1 for losses that need one, as in `BatchNorm(axis_name="batch")`. The batch has all rows."""

_SHARDS = re.compile(r"For parameter .* has shape .*?\)|dot_general requires contracting .*|incompatible shapes .*")
"""Matches the errors of Flax and JAX for a parameter whose shape is not the one that the model computes with."""

CARRY = (
    "pass carried=lambda key: nnx.state(Model(nnx.Rngs(key)), nnx.Not(nnx.Param)), merge it in the loss, "
    "nnx.merge(graph, params, carried), and return (mean, metrics, nnx.state(model, nnx.Not(nnx.Param)))"
)


def on_batch(
    function: Callable[..., Any],
    specs: tuple[Any, Mapping[str, ArraySpec], Any],
    carries: bool,
    keys: Mapping[str, Any],
    axes: Mapping[str, str] | None = None,
) -> Callable[[Any, Batch, jax.Array | None, Any], Any]:
    """Wraps a user's function so that it gets the arrays of the batch alone, and Flax follows the rules of the mesh.

    Args: see `with_loss_sums`.
    """
    arrays = set(specs[1])

    def called(params: Any, batch: Batch, key: jax.Array | None, carried: Any) -> Any:
        inputs = {name: x for name, x in batch.items() if name in arrays}
        with flax_rules(axes), explained():
            more = (as_keys(carried, keys),) if carries else ()
            arguments = (params, inputs, key, *more)
            return explicit.call(function, arguments, lambda: explicit.shardings(arguments, specs, axes or {}))

    return called


def with_loss_sums(
    loss: Callable[..., Any],
    specs: tuple[Any, Mapping[str, ArraySpec], Any],
    carries: bool,
    keys: Mapping[str, Any],
    axes: Mapping[str, str] | None = None,
    returns_carried: bool = True,
) -> Loss:
    """Wraps a user's loss as one that returns a `LossSums`.

    Args:
      specs: of the parameters, of the batch's arrays that the loss gets, and of the carried state.
      carries: whether the loss gets the carried state as a fourth argument.
      keys: the result of `key_implementations`.
      axes: the model's own name of a mesh axis -> meshpar's.
      returns_carried: whether the loss must return the next carried state; an evaluation need not.
    """

    arrays = set(specs[1])
    called = on_batch(loss, specs, carries, keys, axes)

    def wrapped(params: Any, batch: Batch, key: jax.Array | None, carried: Any) -> LossSums:
        def of_batch(params: Any, carried: Any) -> Any:
            result = called(params, batch, key, carried)
            ctx = current()
            if ctx and returns_carried:
                if ctx.num_microbatches > 1:
                    _warn_of_statistics(carried, ctx.num_microbatches)
                if ctx.num_passes > 1 and not isinstance(result, LossSums):
                    warn_of_masks(arrays, ctx.num_passes)
            return as_loss_sums(as_data(result), batch["rows"], carried, returns_carried)

        if ctx := manual_context():
            sums = of_batch(params, carried)
            _check_same(sums, carried, ctx)
            return sums
        try:
            return of_batch(params, carried)
        except ConfigError as error:
            if f"unbound axis name: {AXIS_NAME}" not in str(error.__cause__):
                raise
        # Some operations cannot be traced under `vmap`, so only a loss that names the axis is.
        bound = jax.vmap(of_batch, in_axes=None, out_axes=None, axis_size=1, axis_name=AXIS_NAME)
        return bound(params, carried)

    return wrapped


def _warn_of_statistics(carried: Any, num_microbatches: int) -> None:
    """Warns that batch norm normalizes each microbatch by its own statistics."""
    statistics = [path for path, kind in changing(carried).items() if kind == nnx.BatchStat.__name__]
    statistics += [path for path in flatten_with_paths(carried) if path.startswith("batch_stats.")]
    if statistics:
        what = f"{statistics[0]} is a statistic of the batch: each of {num_microbatches} microbatches is normalized"
        what += " by its own, so the step differs from that of the whole batch"
        warnings.warn(f"{what}; num_microbatches=1 is exact", UserWarning, stacklevel=2)


def _check_same(sums: LossSums, carried: Any, ctx: ParallelContext) -> None:
    """Checks that the results of a loss for local shards differ only between devices that have different rows.

    Raises:
      ConfigError: lists each result that differs over other axes, or carried state that does so more than before.
    """
    problems = Problems()

    def check(where: str, x: jax.Array, allowed: Iterable[str], fix: str) -> None:
        if axes := sorted(varies_over(x) - {*allowed}):
            what = f"differs from device to device along {', '.join(axes)}: with manual=True each has its own shards"
            names = repr(axes[0] if len(axes) == 1 else tuple(axes))
            problems.add(where, what, f"{fix.format(names)}, or manual=False")

    numbers = {"the loss": sums.loss, "the count": sums.count}
    for name, x in (numbers | {f"metrics[{name!r}]": x for name, x in sums.metrics.items()}).items():
        check(name, x, ctx.loss_axes + ctx.slice_axes, "sum what is partial, jax.lax.psum(x, {}), in the loss")
    before = flatten_with_paths(carried)
    for path, x in flatten_with_paths(sums.carried).items():
        fix = "jax.lax.pmean(x, {0}) in the loss, BatchNorm(axis_name={0})"
        check(f"carried.{path.removesuffix('.value')}", x, varies_over(before[path]), fix)
    problems.raise_any(ConfigError, "the results of the loss are not those of all devices:")


@contextmanager
def explained() -> Iterator[None]:
    """Explains errors of JAX and Flax that are caused by a loss written for pmap or for another mesh."""
    try:
        yield
    except Exception as error:
        message = str(error)
        if unbound := re.search(r"unbound axis name: (\w+)", message):
            what = f"the loss communicates over {unbound[1]!r}, an axis name that only pmap, vmap or shard_map binds"
            fix = f'the batch has the rows of all devices: leave axis_name out, or use axis_name="{AXIS_NAME}"'
        elif problem := explicit.problem(error):
            what, fix = problem
        elif "different trace level" in message:
            what = "the loss changes NNX state that was created outside of it, so the change would be lost"
            fix = CARRY
        elif manual_context() and (shapes := _SHARDS.search(message)):
            what = (
                f"with manual=True the loss gets a device's shards of the parameters, and uses them whole: {shapes[0]}"
            )
            fix = (
                "manual=False; or gather what is only stored in shards with meshpar.parallel.data.gather_in_layer, and "
                "give the model the sizes of a shard of what other axes shard"
            )
        elif "Incorrect number of leaves" in message:
            what = "the NNX model has state besides its parameters, but the loss merges only the parameters"
            fix = CARRY
        else:
            raise
        raise ConfigError(f"{what}; {fix}") from error


def takes(loss: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with `count` positional arguments."""
    try:
        signature(loss).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True
