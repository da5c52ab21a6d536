"""Checks the arrays of a user's batch: each has the same rows, and they can be split equally."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import DataError, Problems, nearest, suggestion
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.sequence import SEQ
from meshpar.sharding.spec import ArraySpec

ROWS = "rows"
"""The name of the array of row indices that a step adds to a batch."""


def check_arrays(batch: Any) -> None:
    """Checks that an example batch is a mapping of names to arrays with rows, before a loss reads it.

    Raises:
      DataError: lists every value that is no such array.
    """
    if not isinstance(batch, Mapping):
        raise DataError(f"batch is a {type(batch).__name__}, and no mapping of names to arrays, as {{'x': x}} is")
    problems = Problems()
    for name, x in batch.items():
        if reason := _unfit(x):
            problems.add(f"batch[{name!r}]", *reason)
    problems.raise_any(DataError, "this batch cannot be trained on:")


def batch_specs(
    batch: Mapping[str, Any], batch_dims: Mapping[str, tuple[str, ...]], ctx: ParallelContext
) -> dict[str, ArraySpec]:
    """The specs of an example batch.

    Args:
      batch_dims: array -> a name for each of its dims; default: `batch` for the first, and no names for the others.
      ctx: the mesh and the rules that shard the rows, and the number of microbatches.

    Raises:
      DataError: lists every array that does not fit its names in `batch_dims`, and every name there without an array;
        or the rows cannot be split equally.
    """
    problems = Problems()
    specs: dict[str, ArraySpec] = {}
    if not batch:
        problems.add("batch", "contains no arrays", "an example: {name: array}")
    for name, x in batch.items():
        if name == ROWS:
            problems.add(f"batch[{name!r}]", "a step adds the index of each row under this name", "another name")
        elif (dims := batch_dims.get(name, ("batch", *[""] * (x.ndim - 1)))) and len(dims) != x.ndim:
            shape = f"{np.dtype(x.dtype)}{list(x.shape)}"
            problems.add(f"batch_dims[{name!r}]", f"{len(dims)} names for {shape}", "a name for each dim")
        else:
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)  # `put` stores 64 bits as 32, if JAX's 64-bit mode is off
            specs[name] = ArraySpec(tuple(x.shape), np.dtype(dtype), tuple(dims))
            _check_dims(name, specs[name], ctx, problems)
    for name in (name for name in batch_dims if name not in batch):
        fix = suggestion(name, batch, f"the arrays are {', '.join(batch)}")
        problems.add(f"batch_dims[{name!r}]", "the batch has no such array", fix)
    _check_rows(specs, ctx, problems)
    problems.raise_any(DataError, "this batch cannot be trained on:")
    return specs


def check_batch(batch: Mapping[str, Any], structs: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Checks that a batch has the arrays that the step was compiled for.

    Raises:
      DataError: lists every array that is missing or unknown, or has another shape or dtype.
    """
    problems = Problems()
    for name in (name for name in structs if name not in batch):
        problems.add(f"batch[{name!r}]", "is missing", f"the step was compiled for {', '.join(structs)}")
    for name, x in batch.items():
        if name not in structs:
            fix = suggestion(name, structs, f"the step was compiled for {', '.join(structs)}")
            problems.add(f"batch[{name!r}]", "the step has no such array", fix)
        elif (reason := _unfit(x)) or (reason := _unlike(x, structs[name])):
            problems.add(f"batch[{name!r}]", *reason)
    problems.raise_any(DataError, "this batch differs from the one that the step was compiled for:")


def token_order(ctx: ParallelContext, specs: Mapping[str, ArraySpec]) -> np.ndarray | None:
    """int[seq]: which token of a row is at each place of its shards; None if rows keep their order."""
    if not ctx.sequence.is_zigzag:
        return None
    (seq_len,) = {spec.shape[SEQ] for spec in specs.values() if spec.dims[SEQ:] == ("seq",)}
    return ctx.sequence.order(seq_len)


def arranged(x: Any, order: np.ndarray | None) -> Any:
    """An array [batch, seq] of whole rows, with their tokens in the order of `token_order`."""
    return x if order is None else x[:, order]


def _unfit(x: Any) -> tuple[str, str] | None:
    """Why a value is not an array with rows, and a fix; None if it is one."""
    library = type(x).__module__.partition(".")[0]
    if library in ("torch", "tensorflow"):
        return f"is a tensor of {library}, and JAX reads NumPy's arrays", "x.numpy(), in the data pipeline"
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return f"is a {type(x).__name__}, not an array", "numpy.asarray(x)"
    if not x.shape:
        fix = "repeat it for each row; or let the loss close over it, if it never changes"
        return "is a scalar, and each array of a batch has a first dim of rows", fix
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
        return f"has the dtype {x.dtype}, and JAX has arrays of numbers", "numbers, such as the ids of texts"
    return None


def _unlike(x: Any, struct: jax.ShapeDtypeStruct) -> tuple[str, str] | None:
    """How an array differs from the one that the step was compiled for, and a fix; None if it does not."""
    expected = f"{struct.dtype}{list(struct.shape)}"
    got = f"{x.dtype}{list(x.shape)}"
    if x.shape[1:] == struct.shape[1:] and x.shape[0] < struct.shape[0]:
        fix = "leave out a shorter last batch; or fill it with rows that do not count, see meshpar.LossSums"
        return f"has {x.shape[0]} rows, and the step was compiled for {struct.shape[0]}", fix
    if tuple(x.shape) != struct.shape:
        return f"is {got}, and the step was compiled for {expected}", "batches of one shape, or a step for each"
    if jax.dtypes.canonicalize_dtype(x.dtype) != struct.dtype:
        return f"is {got}, and the step was compiled for {expected}", f"x.astype({str(struct.dtype)!r})"
    return None


def _check_dims(name: str, spec: ArraySpec, ctx: ParallelContext, problems: Problems) -> None:
    """Reports named dims, other than the rows, that have no rule or cannot be divided by their shards."""
    for size, dim in zip(spec.shape, spec.dims, strict=True):
        where = f"batch_dims[{name!r}]: {dim} = {size}"
        if dim and dim not in ctx.rules.table:
            near = nearest(dim, ctx.rules.table)
            fix = f"rules.{dim}=[] to leave it whole" + (f", or did you mean {near}?" if near else "")
            problems.add(where, "no rule covers it", fix)
        elif dim not in ("", "batch") and size % ctx.shards(dim):
            problems.add(where, f"is not divisible by its {ctx.shards(dim)} shards", f"rules.{dim}=[]")


def _check_rows(specs: Mapping[str, ArraySpec], ctx: ParallelContext, problems: Problems) -> None:
    """Reports why the rows cannot be split into equal parts."""
    counts = {name: spec.shape[0] for name, spec in specs.items() if spec.dims[0] == "batch"}
    if ctx.num_microbatches > 1:
        for name in (name for name in specs if name not in counts):
            what = f"has no rows to cut into {ctx.num_microbatches} microbatches"
            problems.add(f"batch_dims[{name!r}]", what, "batch as the name of the first dim, or num_microbatches=1")
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        problems.add("batch", f"its arrays have different numbers of rows: {listed}", "the same rows in each array")
        return
    if not {*ctx.rules.partition_axes("batch")} <= {*ctx.mesh.shape}:
        return  # `resolve` reports rules with an axis that the mesh does not have
    parts = ctx.shards("batch") * ctx.num_passes
    for count in set(counts.values()):
        if not count or count % parts:
            what = f"{count} rows cannot be cut into {parts} equal parts"
            cause = f"({ctx.shards('batch')} devices x {ctx.num_passes} microbatches)"
            problems.add("batch", f"{what} {cause}", f"a multiple of {parts} rows")
