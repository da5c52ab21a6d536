"""Stacks of equal layers, whose parameters have a leading dim `layers`, and the loops that compute them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from meshpar.parallel.context import planned, platform
from meshpar.parallel.data import gathering_again
from meshpar.parallel.outputs import Auxiliary

if TYPE_CHECKING:
    from meshpar.nn.decoder import Decoder

Layer = Callable[[Any, Int[Array, ""], Any], tuple[Any, Auxiliary]]
"""(the module of a layer, its index in the model, carry) -> (the next carry, its `Auxiliary`)."""
OfRow = Callable[[Any, Any], tuple[Any, Auxiliary]]
"""(carry, a row of a stack) -> (the next carry, the layer's share of the model's `Auxiliary`)."""


def stacked(build: Callable[[nnx.Rngs], nnx.Module], num_layers: int, padding: int, rngs: nnx.Rngs) -> Any:
    """Layers as one module, whose parameters are stacked along a leading dim `layers`; rows of padding are zeros.

    Memory: layers are initialized one after the other, so temporary arrays have the size of one layer.
    """
    graphs: list[Any] = []

    def init(key: jax.Array) -> Any:
        graph, params = nnx.split(build(nnx.Rngs(params=key)))
        graphs.append(graph)  # it has no arrays, and is the same for all layers
        return params

    def pad(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, jnp.zeros((padding, *x.shape[1:]), x.dtype)]) if padding else x

    keys = jax.random.split(rngs.params(), num_layers)
    params = jax.tree.map(pad, jax.lax.map(init, keys))
    layers = nnx.merge(graphs[0], params)
    for _, param in nnx.to_flat_state(nnx.state(layers, nnx.Param)):
        param.set_metadata(dims=("layers", *param.get_metadata()["dims"]))
    return layers


def scan_layers(model: Decoder, stacks: Mapping[str, Any], layer: Layer, carry: Any) -> tuple[Any, Auxiliary]:
    """Computes all layers of a model. Returns the last carry, and the sum of the layers' shares of `Auxiliary`.

    Args:
      stacks: name -> the `stacked` layers of `model.stacks`. Rows of padding come last, and are not computed.
    """
    unroll = model.layers_of_an_iteration(platform(), model.remat.recomputes)
    if planned() and model.unroll == "auto":
        unroll = 1  # the partitioner decides
    # XLA does not merge the recomputation with the forward across a loop; without a loop it needs barriers.
    needs_barriers = unroll > 1 or [len(loop.stacks) for loop in model.loops] != [1]
    rows, layers = {}, {}
    for name, indices in model.stacks.items():
        graph, params = nnx.split(stacks[name])
        rows[name] = (params, jnp.asarray(indices, jnp.int32), jnp.arange(len(indices), dtype=jnp.int32))
        layers[name] = _of_row(model, layer, graph, len(indices), needs_barriers)
    total = Auxiliary({}, {})
    begin = dict.fromkeys(rows, 0)
    for loop in model.loops:
        of_loop = {}
        for name, num in Counter(loop.stacks).items():
            of_loop[name] = jax.tree.map(partial(_rows, begin[name], loop.repeats, num), rows[name])
            begin[name] += loop.repeats * num
        times = max(1, min(unroll // len(loop.stacks), loop.repeats))
        carry, shares = jax.lax.scan(partial(_iteration, loop.stacks, layers), carry, of_loop, unroll=times)
        for share in shares:
            total = total.plus(jax.tree.map(lambda x: x.sum(0), share))
    return carry, total


def _of_row(model: Decoder, layer: Layer, graph: Any, num_rows: int, needs_barriers: bool) -> OfRow:
    """The function of a layer of a stack of `num_rows` layers, which the backward recomputes as `model.remat` says."""

    def of_row(carry: Any, row: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, Auxiliary]:
        params, index, place = row
        carry, auxiliary = layer(nnx.merge(graph, params), index, carry)
        return carry, auxiliary.share(num_rows, place)

    if not model.remat.recomputes:
        return of_row
    policy = gathering_again(model.remat.checkpoint_policy())
    return jax.checkpoint(of_row, policy=policy, prevent_cse=needs_barriers)


def _rows(begin: int, repeats: int, num: int, x: jax.Array) -> jax.Array:
    """[repeats, num, ...], rows of a stack from `begin`; without the second dim if an iteration has one row."""
    rows = x[begin : begin + repeats * num]
    return rows if num == 1 else rows.reshape(repeats, num, *x.shape[1:])


def _iteration(
    stacks: Sequence[str], layers: Mapping[str, OfRow], carry: Any, rows: Mapping[str, Any]
) -> tuple[Any, list[Auxiliary]]:
    """One layer of each of `stacks`, in this order."""
    shares = []
    for i, name in enumerate(stacks):
        row = rows[name]
        if stacks.count(name) > 1:
            row = jax.tree.map(itemgetter(stacks[:i].count(name)), row)
        carry, share = layers[name](carry, row)
        shares.append(share)
    return carry, shares
