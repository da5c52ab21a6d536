"""A training step in stages: GPipe, with every tick written out.

In tick t stage s computes microbatch t - s, forward; the backward runs the ticks in reverse. A stage without a
microbatch computes nothing. Ticks are unrolled, so a tick saves separate arrays instead of slots of one array.

Source: Huang et al. 2019, arXiv:1811.06965.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from byhand import adamw, ends, layers
from byhand.axes import Axes
from byhand.program import compile_local


def compile_step(
    axes: Axes, mesh: Mesh, params: Any, batch: Any, model: Any, learning_rate: Callable, num_microbatches: int
) -> tuple[Callable, Any, Any]:
    """See `program.compile_local`. The layers are stacked, and sharded over `axes.stage`.

    Args:
      params: as for `step.compile_step`.
    """
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *params["layers"])
    specs = jax.tree.map(lambda _: P(), params | {"layers": stacked})
    specs["layers"] = jax.tree.map(lambda _: P(axes.stage), stacked)
    local = partial(_step, axes, model, learning_rate, num_microbatches)
    return compile_local(local, mesh, params | {"layers": stacked}, specs, batch, axes.batch)


def _step(
    axes: Axes, model: Any, learning_rate: Callable, num_microbatches: int, state: Any, batch: Any
) -> tuple[Any, jax.Array]:
    params = state["params"]
    stage = lax.axis_index(axes.stage)
    num_stages = lax.axis_size(axes.stage)
    last = num_stages - 1
    num_ticks = num_microbatches + last
    own_layers = jax.tree.map(lambda w: [w[i] for i in range(w.shape[0])], params["layers"])
    own_layers = [{name: w[i] for name, w in own_layers.items()} for i in range(len(own_layers["o"]))]
    count = axes.sum_batch((batch["targets"] >= 0).sum())
    micro = {name: x.reshape(num_microbatches, -1, x.shape[-1]) for name, x in batch.items()}

    def is_active(tick: int) -> jax.Array:
        return (tick >= stage) & (tick - stage < num_microbatches)

    def shared(tick: int) -> layers.Shared:
        index = jnp.clip(tick - stage, 0, num_microbatches - 1)
        return layers.shared({name: x[index] for name, x in micro.items()}, model.head_size)

    def forward(tick: int, x: jax.Array) -> tuple[jax.Array, list[layers.Saved]]:
        common = shared(tick)
        saved = []
        for weights in own_layers:
            x, one = layers.forward(axes, weights, x, common)
            saved.append(one)
        return x, saved

    def backward(tick: int, saved: list[layers.Saved], dy: jax.Array, grads: Any) -> tuple[jax.Array, Any]:
        common = shared(tick)
        own = []
        for weights, one in zip(reversed(own_layers), reversed(saved), strict=True):
            dy, grad = layers.backward(axes, weights, one, dy, common)
            own.insert(0, grad)
        return dy, jax.tree.map(jnp.add, grads, own)

    tokens = micro["tokens"]
    x0 = _on(stage == 0, partial(ends.embed, axes), params["embedding"], tokens)
    x = x0[0]
    ys = []
    saved = []
    for tick in range(num_ticks):
        y, one = _on(is_active(tick), partial(forward, tick), x)
        saved.append(one)
        ys.append(y)
        if tick + 1 < num_ticks:
            x = lax.ppermute(y, axes.stage, [(i, i + 1) for i in range(last)])
            if tick + 1 < num_microbatches:
                x = jnp.where(stage == 0, x0[tick + 1], x)

    def loss(y: jax.Array) -> Any:
        targets = micro["targets"].reshape(-1, y.shape[1])
        return ends.loss(axes, params["norm"], params["head"], y, targets, count, model.vocab_size)

    value, dlast, dnorm, dhead = _on(stage == last, loss, jnp.concatenate(ys[last:]))
    dlast = dlast.reshape(num_microbatches, -1, *dlast.shape[1:])
    grads = jax.tree.map(jnp.zeros_like, own_layers)
    dy = dlast[-1]
    dx0 = []
    for tick in reversed(range(num_ticks)):
        skip = (jnp.zeros_like(dy), grads)
        dx, grads = lax.cond(
            is_active(tick),
            partial(backward, tick),
            lambda _saved, _dy, _grads, skip=skip: skip,
            saved[tick],
            dy,
            grads,
        )
        if tick < num_microbatches:
            dx0.insert(0, dx)
        if tick:
            dy = lax.ppermute(dx, axes.stage, [(i + 1, i) for i in range(last)])
            if tick - 1 >= last:
                dy = jnp.where(stage == last, dlast[tick - 1 - last], dy)
    embed_backward = partial(ends.embed_backward, axes, params["embedding"].shape[0])
    dtable = _on(stage == 0, embed_backward, tokens, jnp.stack(dx0))
    outer = lax.psum({"embedding": dtable, "norm": dnorm, "head": dhead}, (axes.batch, axes.stage))
    own = axes.sum_batch(jax.tree.map(lambda *each: jnp.stack(each), *grads))
    norm = jnp.sqrt(lax.psum(_square(own), axes.stage) + _square(outer))
    return adamw.update(state, outer | {"layers": own}, norm, learning_rate), lax.psum(value, (axes.batch, axes.stage))


def _on(condition: jax.Array, fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args) where the condition holds, else zeros."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fn, *args))
    return lax.cond(condition, fn, lambda *_: zeros, *args)


def _square(tree: Any) -> jax.Array:
    return sum(jnp.square(x).sum() for x in jax.tree.leaves(tree))  # pyright: ignore
