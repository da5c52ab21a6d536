"""A training step of every layout but the pipeline: one device, data, ZeRO-3, and tensor parallelism."""

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

EXPERTS = ("gate_up", "down")
NORMS = ("attn_norm", "mlp_norm", "norm")


def compile_step(
    axes: Axes, mesh: Mesh, params: Any, batch: Any, model: Any, learning_rate: Callable
) -> tuple[Callable, Any, Any]:
    """See `program.compile_local`.

    Args:
      params: whole arrays, see `convert.from_llama`.
    """
    local = partial(_step, axes, model, learning_rate)
    return compile_local(local, mesh, params, specs(axes, params), batch, axes.rows)


def specs(axes: Axes, params: Any) -> Any:
    """How each parameter is sharded: over `tensor`, or over `batch` where it is stored in shards."""
    t = axes.tensor
    whole = axes.batch if axes.stored else None
    layer = {name: P(whole, t) for name in ("qkv", "o", "gate_up", "down")} | {
        "attn_norm": P(whole),
        "mlp_norm": P(whole),
    }
    if axes.per_token:
        layer |= dict.fromkeys(EXPERTS, P(axes.expert)) | {"router": P()}
    return {
        "embedding": P(whole or t),
        "layers": [layer for _ in params["layers"]],
        "norm": P(whole),
        "head": P(whole, t),
    }


def _step(axes: Axes, model: Any, learning_rate: Callable, state: Any, batch: Any) -> tuple[Any, jax.Array]:
    params = state["params"]
    ends_ = axes.gather({name: w for name, w in params.items() if name != "layers"})
    count = axes.sum_batch((batch["targets"] >= 0).sum())
    common = layers.shared(batch, model.head_size)
    x = ends.embed(axes, ends_["embedding"], batch["tokens"])
    saved = []
    for weights in params["layers"]:
        x, one = layers.forward(axes, weights, x, common)
        saved.append(one)
    value, dx, dnorm, dhead = ends.loss(
        axes, ends_["norm"], ends_["head"], x, batch["targets"], count, model.vocab_size
    )
    layer_grads = []
    for weights, one in zip(reversed(params["layers"]), reversed(saved), strict=True):
        dx, grad = layers.backward(axes, weights, one, dx, common)
        layer_grads.insert(0, grad)
    dtable = ends.embed_backward(axes, ends_["embedding"].shape[0], batch["tokens"], dx)
    grads = axes.reduce({"embedding": dtable, "norm": dnorm, "head": dhead}) | {"layers": layer_grads}
    grads = _summed(axes, grads)
    norm = _global_norm(axes, grads)
    return adamw.update(state, grads, norm, learning_rate), axes.sum_batch(value)


def _summed(axes: Axes, grads: Any) -> Any:
    """Sums gradients over the devices that hold a copy of the parameter and a part of its gradient."""

    def one(path: Any, g: jax.Array) -> jax.Array:
        over = () if axes.stored else axes.rows
        if axes.expert and path[-1].key in EXPERTS:
            over = tuple(axis for axis in over if axis != axes.expert)
        if axes.sequence and path[-1].key in NORMS:
            over += (axes.tensor,)
        return lax.psum(g, over) if over else g

    return jax.tree.map_with_path(one, grads)


def _global_norm(axes: Axes, grads: Any) -> jax.Array:
    def square(g: jax.Array) -> jax.Array:
        return jnp.square(g).sum()

    sharded = axes.batch if axes.stored else axes.tensor or axes.expert
    if sharded is None:
        return jnp.sqrt(sum(map(square, jax.tree.leaves(grads))))
    parts = jax.tree.leaves_with_path(grads)
    if axes.expert:
        is_copy = [path[-1].key not in EXPERTS for path, _ in parts]
    else:
        is_copy = [not axes.stored and path[-1].key in NORMS for path, _ in parts]
    part = sum(square(g) for (_, g), copy in zip(parts, is_copy, strict=True) if not copy)
    whole = sum(square(g) for (_, g), copy in zip(parts, is_copy, strict=True) if copy)
    return jnp.sqrt(lax.psum(part, sharded) + whole)
