"""What several models of the zoo share: batches, widened parameters, names of dims, losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS = 16
SEQ = 8
VOCAB = 48

Dims = Mapping[str, tuple[str, ...]]

ATTENTION: Dims = {
    "**query.kernel": ("embed", "heads", "head_dim"),
    "**key.kernel": ("embed", "heads", "head_dim"),
    "**value.kernel": ("embed", "heads", "head_dim"),
    "**query.bias": ("heads", "head_dim"),
    "**key.bias": ("heads", "head_dim"),
    "**value.bias": ("heads", "head_dim"),
    "**out.kernel": ("heads", "head_dim", "embed"),
    "**out.bias": ("embed",),
}
"""Names for Flax's `MultiHeadDotProductAttention` and `MultiHeadAttention`."""
CONV: Dims = {"**Conv_*.kernel": ("height", "width", "embed", "mlp"), "**Conv_*.bias": ("mlp",)}
WHOLE = {"height": (), "width": (), "channels": (), "classes": ()}
"""Rules for dims that no layout shards."""


def norms(dim: str = "embed") -> Dims:
    """Names for the scales and biases of normalization layers."""
    return {"**Norm_*.scale": (dim,), "**Norm_*.bias": (dim,), "**norm*.scale": (dim,), "**norm*.bias": (dim,)}


def mlp(up: str, down: str) -> Dims:
    """Names for the two dense layers of an MLP, given their paths."""
    return {
        f"**{up}.kernel": ("embed", "mlp"),
        f"**{up}.bias": ("mlp",),
        f"**{down}.kernel": ("mlp", "embed"),
        f"**{down}.bias": ("embed",),
    }


def stacked(dims: Dims) -> Dims:
    """The same names for parameters that a scan stacks."""
    return {glob: ("layers", *names) for glob, names in dims.items()}


def wide(init: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """Wraps an init so that it returns floats of JAX's widest type; Flax's default is float32, whatever JAX's is."""

    def widened(x: Any) -> Any:
        return x.astype(jnp.result_type(float)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return lambda key: jax.tree.map(widened, init(key))


def sentences(rows: int = ROWS, seq: int = SEQ, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    """Tokens and the tokens after them."""
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, seq + 1), np.int32)
    return {"tokens": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}


def images(size: int = 8, channels: int = 3, classes: int = 8) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"image": rng.normal(size=(ROWS, size, size, channels)), "label": rng.integers(0, classes, ROWS, np.int32)}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def one_hot_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """As Flax's examples write it: JAX's explicit mode cannot gather a label's logit from a sharded vocabulary."""
    one_hot = labels[..., None] == jnp.arange(logits.shape[-1])
    return -(jax.nn.log_softmax(logits) * one_hot).sum(-1).mean()


def accuracy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return (logits.argmax(-1) == labels).astype(logits.dtype).mean()
