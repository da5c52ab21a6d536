"""A small language model of a user's own, written for local shards: every region of a decoder in forty lines."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from meshpar import AxisRules, LossSums, MeshLayout, Training, training
from meshpar.nn.layers import dropout
from meshpar.parallel import tensor
from meshpar.parallel.context import manual_axes
from meshpar.parallel.data import gather_in_layer
from meshpar.train import token_loss

VOCAB = 13
PADDED = 16
WIDTH = 8
MLP = 12
ROWS = 8
SEQ = 8
DIMS = {
    "table": ("vocab", "embed"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "head": ("embed", "vocab"),
}
SHAPES = {"table": (PADDED, WIDTH), "up": (WIDTH, MLP), "down": (MLP, WIDTH), "head": (WIDTH, PADDED)}


def init(key):
    keys = dict(zip(SHAPES, jax.random.split(key, len(SHAPES)), strict=True))
    return {name: jax.random.normal(keys[name], shape, jnp.float32) / 2 for name, shape in SHAPES.items()}


def centred(x_BRD):
    """Each channel less its mean over the sequence, of which a device may hold a shard."""
    mean = x_BRD.mean(1, keepdims=True)
    axes = manual_axes("residual_seq")
    return x_BRD - (lax.pmean(mean, axes) if axes else mean)


def embed(table_VD, tokens_BS):
    """Rows of a table, of which a device may hold a shard: it adds zeros for the tokens of others."""
    if not (axes := manual_axes("vocab")):
        return tensor.exit_region(table_VD[tokens_BS], "vocab")
    place = tokens_BS - lax.axis_index(axes) * len(table_VD)
    is_own = (place >= 0) & (place < len(table_VD))
    own_BSD = table_VD[jnp.where(is_own, place, 0)]
    return tensor.exit_region(jnp.where(is_own[..., None], own_BSD, jnp.zeros_like(own_BSD)), "vocab")


def loss(params, batch, key):
    p = {name: gather_in_layer(x, DIMS[name]) for name, x in params.items()}
    x_BRD = embed(p["table"], batch["tokens"])
    hidden = jnp.tanh(tensor.enter_region(centred(x_BRD), "mlp") @ p["up"])
    update = tensor.exit_region(hidden @ p["down"], "mlp")
    x_BRD += update if key is None else dropout(update, 0.3, key, rows(batch))
    logits = tensor.enter_region(x_BRD, "vocab") @ p["head"]
    counted = batch["targets"] >= 0
    nll = token_loss.cross_entropy(logits, jnp.where(counted, batch["targets"], 0), VOCAB)
    return LossSums(jnp.where(counted, nll, jnp.zeros_like(nll)).sum(), counted.sum(dtype=jnp.int32))


def rows(batch):
    """The global indices of the local rows."""
    return batch["row"]


def batch_of(seed):
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, VOCAB, (ROWS, SEQ))
    targets[rng.random((ROWS, SEQ)) < np.linspace(0, 0.9, ROWS)[:, None]] = -1
    arrays = {"tokens": rng.integers(0, VOCAB, (ROWS, SEQ)), "targets": targets, "row": np.arange(ROWS)}
    return {name: array.astype(np.int32) for name, array in arrays.items()}


BATCHES = [batch_of(seed) for seed in range(4)]


def toy(sizes: dict[str, int], *presets: str, **more) -> Training:
    """The model's training on a mesh of these sizes."""
    count = int(np.prod(list(sizes.values())))
    return training(
        init,
        more.pop("loss", loss),
        optax.adam(1e-2),
        BATCHES[0],
        mesh=MeshLayout(**sizes).build(jax.devices()[:count]),
        rules=more.pop("rules", AxisRules(preset=presets)),
        dims=DIMS,
        activation_dims=("residual_seq",),
        manual=True,
        **more,
    )
