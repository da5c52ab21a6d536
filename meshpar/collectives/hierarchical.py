"""An all-reduce over several networks: fast ones inside slower ones."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from meshpar.collectives.execute import manual_axes
from meshpar.collectives.operations import Choice, all_gather, all_reduce, cut, join, reduce_scatter, same_sum
from meshpar.mesh.varying import Axes


def hierarchical_all_reduce(x: jax.Array, levels: Sequence[str | Axes], *, algorithm: Choice = "auto") -> jax.Array:
    """The sum over the axes of all levels: a reduce-scatter inside, an all-reduce across, an all-gather inside.

    Args:
      x: any shape; padded to equal parts on each level.
      levels: one or more axes for each level, the fastest network first.

    Returns:
      Like x; the same on all devices of the axes, and typed as invariant over them.

    Communication: for g ranks inside and k across: 2(g-1)/g S inside, 2(k-1)/k S/g across.

    >>> mesh = jax.make_mesh((2, 2), ("dcn", "ici"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> local = lambda x: hierarchical_all_reduce(x, ["ici", "dcn"])
    >>> f = jax.shard_map(local, mesh=mesh, in_specs=jax.P(("dcn", "ici")), out_specs=jax.P())
    >>> jax.jit(f)(jax.numpy.arange(4.0)).tolist()
    [6.0]
    """
    first, *others = map(manual_axes, levels)
    if not others:
        return all_reduce(x, first, algorithm=algorithm)

    def summed(x: jax.Array) -> jax.Array:
        parts = cut(x, jax.lax.axis_size(first))
        part = reduce_scatter(parts, first, algorithm=algorithm)
        part = hierarchical_all_reduce(part, others, algorithm=algorithm)
        return join(all_gather(part, first, algorithm=algorithm), x.shape)

    return same_sum(summed, tuple(axis for level in (first, *others) for axis in level), x)
