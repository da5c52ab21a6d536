"""A user's own Flax models, which runs import."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar import LossSums

VOCAB = 320


def named(*dims):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), dims)


class Own(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, tokens):
        table = self.param("table", named("vocab", "embed"), (VOCAB, self.width))
        x = nn.with_logical_constraint(jnp.take(table, tokens, axis=0), ("batch", "height", "embed"))
        bias = nn.with_logical_partitioning(nn.initializers.zeros, ("mlp",))
        scale = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        hidden = nn.RMSNorm(scale_init=scale, name="norm")(x)
        hidden = nn.Dense(32, kernel_init=named("embed", "mlp"), bias_init=bias, name="up")(hidden)
        x = x + nn.Dense(self.width, use_bias=False, kernel_init=named("mlp", "embed"), name="down")(nn.gelu(hidden))
        return nn.Dense(VOCAB, use_bias=False, kernel_init=named("embed", "vocab"), name="head")(x)


def build(width: int = 16) -> nn.Module:
    return Own(width)


def wider() -> nn.Module:
    return Own(24)


def loss(model, params, batch, key):
    logits = model.apply({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["targets"], 0)).mean()


class Rows(nn.Module):
    """Classes of rows, tokens of rows, numbers or pairs, by the shapes of its outputs."""

    outputs: int = 4
    kind: str = "classes"

    @nn.compact
    def __call__(self, x, z=None):
        if self.kind == "tokens":
            hidden = jnp.take(self.param("table", named("vocab", "embed"), (VOCAB, 16)), x, axis=0)
        else:
            hidden = x if z is None else z
        kernel = named("embed", "mlp")
        first = nn.Dense(self.outputs, kernel_init=kernel, use_bias=False)(hidden)
        if self.kind != "pairs":
            return first
        return first, nn.Dense(self.outputs, kernel_init=kernel, use_bias=False, name="other")(hidden)


class Pixels(nn.Module):
    """Classes of images."""

    outputs: int = 3

    @nn.compact
    def __call__(self, image):
        x = image.reshape(image.shape[0], -1).astype("f")
        return nn.Dense(self.outputs, kernel_init=named("embed", "mlp"), use_bias=False)(x)


def rows(num=64, seed=0, width=8):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(num, width)).astype("f")
    numbers = draw.normal(size=(2, num, 4)).astype("f")
    return {
        "x": x, "z": -x, "label": draw.integers(4, size=num), "other": draw.integers(4, size=num),
        "y": numbers[0], "y2": numbers[1],
    }  # fmt: skip


def other_rows():
    return rows(seed=1)


def tokens(num=64):
    draw = np.random.default_rng(0)
    return {name: draw.integers(0, 60, size=(num, 8)) for name in ("tokens", "other")}


def loss_of_encoder(model, batch):
    """Of whatever the head returns: the second array is the other text of a pair, or a mask."""
    outputs = jax.tree.leaves(model(batch["tokens"], batch["other"]))
    return sum(jnp.square(x).mean() for x in outputs)


def scaled(row, rng):
    return {**row, "x": row["x"] * 2}


def loss_of_rows(model, batch):
    losses = jnp.square(model(batch["x"]) - batch["y"]).mean(-1) * batch["counted"].astype("f")
    return LossSums(losses.sum(), batch["counted"].sum())


def loss_of_images(model, batch):
    losses = model(batch["image"]).mean(-1) * batch["label"].mean(-1) * batch["counted"].astype("f")
    return LossSums(losses.sum(), batch["counted"].sum())


def reward(answers, lines):
    return [float(len(answer)) for answer in answers]


def other_reward(answers, lines):
    return [0.0 for _ in answers]
