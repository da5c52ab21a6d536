"""Operations of the user's own: a kernel, or any function that the partitioner does not need to look into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshpar.errors import ShardingError
from meshpar.partition.op import apply
from meshpar.partition.signature import Call, Labels, Signature


def partitioned(
    dims: str, fn: Callable[..., Any], *, summed: Sequence[str] = (), whole: Sequence[str] | None = None
) -> Callable[..., Any]:
    """Makes a function of arrays an operation that meshpar partitions by the names of its dims.

    On several devices `fn` gets local shards, and is differentiated as any function, so it may be a Pallas kernel with
    a `custom_vjp`. Anywhere else it gets whole arrays.

    Args:
      dims: the dims of each operand and of each result, as in `jnp.einsum`: names are separated by spaces, arrays by
        commas.
      fn: arrays -> an array, or a tuple of arrays if there are several results.
      summed: dims of operands over which a shard's result is one term of the sum, as a product's contracted dims are.
      whole: dims that are never sharded, because `fn` needs all of them. Default: those of operands that no result has
        and that are not summed.

    Communication: none inside. An operand that is sharded in a dim that has to be whole is gathered before; a sum over
      `summed` is reduced after.

    Raises:
      ShardingError: a name twice in an array; a result with a dim that no operand has; a dim without a rule; when it is
        called, arrays that do not fit.

    >>> import jax.numpy as jnp
    >>> scaled = partitioned("rows features, features -> rows features", lambda x, scale: x * scale)
    >>> scaled(jnp.ones((4, 2)), jnp.arange(2.0))[0].tolist()
    [0.0, 1.0]
    """
    ins, outs = _parsed(dims)
    kept = {name for one in outs for name in one}
    found = dict.fromkeys(name for one in ins for name in one)
    if unknown := [name for name in (*summed, *(whole or ())) if name not in found]:
        raise ShardingError(f"partitioned({dims!r}): no operand has {', '.join(unknown)}; it has {', '.join(found)}")
    lost = [name for name in found if name not in kept and name not in summed]
    whole = lost if whole is None else whole
    if left := [name for name in lost if name not in whole]:
        names = ", ".join(left)
        raise ShardingError(f"partitioned({dims!r}): no result has {names}; put {names} in summed, or in whole")

    def labels(arrays: list[tuple[str, ...]]) -> tuple[Labels, ...]:
        return tuple(tuple(None if name in whole else name for name in one) for one in arrays)

    def compute(call: Call, *shards: Any) -> Sequence[Any]:
        results = fn(*shards)
        return results if isinstance(results, (tuple, list)) else [results]

    signature = Signature(labels(ins), labels(outs), compute, tuple(name for name in summed if name not in whole))

    def operation(*arrays: Any) -> Any:
        _check_sizes(dims, ins, [jax.numpy.shape(x) for x in arrays])
        results = apply(signature, *arrays)
        _check_sizes(dims, [*ins, *outs], [jax.numpy.shape(x) for x in (*arrays, *results)])
        return results[0] if len(outs) == 1 else tuple(results)

    return operation


def _parsed(dims: str) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    if dims.count("->") != 1:
        raise ShardingError(f"partitioned({dims!r}): give operands -> results, as in 'rows in, in out -> rows out'")
    ins, outs = ([tuple(one.split()) for one in side.split(",")] for side in dims.split("->"))
    for one in (*ins, *outs):
        if twice := [name for i, name in enumerate(one) if name in one[:i]]:
            raise ShardingError(f"partitioned({dims!r}): {' '.join(one)!r} has {twice[0]} twice; rename one of them")
    known = {name for one in ins for name in one}
    if new := [name for one in outs for name in one if name not in known]:
        raise ShardingError(f"partitioned({dims!r}): no operand has {', '.join(new)}, of which the result has shards")
    return ins, outs


def _check_sizes(dims: str, arrays: Sequence[tuple[str, ...]], shapes: Sequence[tuple[int, ...]]) -> None:
    sizes: dict[str, int] = {}
    if len(shapes) < len(arrays) and all(len(shape) != len(one) for shape, one in zip(shapes, arrays, strict=False)):
        arrays = arrays[: len(shapes)]
    if len(shapes) != len(arrays):
        raise ShardingError(f"partitioned({dims!r}): got {len(shapes)} arrays for {len(arrays)}")
    for one, shape in zip(arrays, shapes, strict=True):
        if len(one) != len(shape):
            raise ShardingError(f"partitioned({dims!r}): an array of shape {shape} for {' '.join(one)!r}")
        for name, size in zip(one, shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise ShardingError(f"partitioned({dims!r}): {name} is {sizes[name]} and {size}")
