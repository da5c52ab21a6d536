"""The quickstart's llama in pipeline stages without a framework: GPipe, a scan over ticks that JAX differentiates."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import handwritten


def specs():
    """The layers are sharded over `pipe`; all else is replicated."""
    whole = jax.tree.map(lambda _: P(), handwritten.specs())
    return whole | {"layers": dict.fromkeys(whole["layers"], P("pipe"))}


def init(model, mesh):
    params = handwritten.init(model, mesh)
    return jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs()))


def local_loss(params, batch, *, vocab_size, num_microbatches):
    """The mean over all devices; every stage computes in every tick, and only the last stage's result counts."""
    stage = lax.axis_index("pipe")
    last = lax.axis_size("pipe") - 1
    index = jnp.arange(batch["tokens"].shape[1])
    micro = {name: x.reshape(num_microbatches, -1, x.shape[-1]) for name, x in batch.items()}
    embedded = params["table"][micro["tokens"]]

    def tick(x, t):
        at = jnp.clip(t - stage, 0, num_microbatches - 1)
        rows = {name: x[at] for name, x in micro.items()}
        visible = (index[:, None] >= index) & (rows["segments"][:, :, None] == rows["segments"][:, None, :])
        x = jnp.where(stage == 0, embedded[jnp.minimum(t, num_microbatches - 1)], x)
        y, _ = lax.scan(partial(handwritten.layer, lambda x, *_: x, rows, visible), x, params["layers"])
        return lax.ppermute(y, "pipe", [(i, i + 1) for i in range(last)]), y

    start = lax.pcast(jnp.zeros_like(embedded[0]), ("pipe",), to="varying")
    _, ys = lax.scan(tick, start, jnp.arange(num_microbatches + last))
    y = ys[last:].reshape(*batch["tokens"].shape, -1)
    total, count = handwritten.cross_entropy(params, y, batch["targets"], vocab_size)
    return lax.psum(jnp.where(stage == last, total, 0.0), ("data", "pipe")) / lax.psum(count, "data")


def compile_step(model, mesh, params, batch, learning_rate, num_microbatches):
    """See `handwritten.compile_step`."""
    local = partial(local_loss, vocab_size=model.vocab_size, num_microbatches=num_microbatches)
    rows = {name: P("data") for name in batch}
    loss = jax.shard_map(local, mesh=mesh, in_specs=(specs(), rows), out_specs=P())
    return handwritten.compile_step(model, mesh, params, batch, learning_rate, loss=loss)
