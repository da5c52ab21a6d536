"""A user's own models, rows and losses, which the configs of these tests name."""

from __future__ import annotations

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar import LossSums

NUM_CLASSES = 4
NUM_FEATURES = 8


def columns(num: int = 96, classes: int = NUM_CLASSES, seed: int = 0, bad: str = "") -> dict[str, np.ndarray]:
    """Points around the centres of their classes."""
    draw = np.random.default_rng(seed)
    label = draw.integers(classes, size=num)
    centres = np.random.default_rng(9).normal(size=(classes, NUM_FEATURES))
    x = (centres[label] + draw.normal(size=(num, NUM_FEATURES))).astype(np.float32)
    if bad == "label":
        label[17] = classes
    return {"x": x, "label": label, "y": x[:, :2].sum(-1)}


class Items:
    """Rows by index; the row `broken` is wrong in some way."""

    def __init__(self, columns, broken=-1, how=""):
        self.columns, self.broken, self.how = columns, broken, how

    def __len__(self):
        return len(self.columns["x"])

    def __getitem__(self, index):
        row = {name: x[index] for name, x in self.columns.items()}
        if index != self.broken:
            return row
        if self.how == "file":
            raise FileNotFoundError(2, "No such file or directory", "pictures/17.png")
        return {"shape": row | {"x": row["x"][:3]}, "missing": {"x": row["x"]}, "tuple": (1, 2)}[self.how]


def items(num: int = 96, broken: int = -1, how: str = "") -> Items:
    return Items(columns(num), broken, how)


def stream(num: int = 96):
    return (Items(columns(num))[i] for i in range(num))


def of_grain(num: int = 96, iterates: bool = False):
    import grain

    rows = grain.MapDataset.source(Items(columns(num)))
    return rows.to_iter_dataset() if iterates else rows


def noisy(row, rng):
    return {**row, "x": row["x"] + rng.normal(size=row["x"].shape).astype(np.float32)}


def tokens(num: int = 32) -> dict[str, np.ndarray]:
    return {"tokens": np.random.default_rng(0).integers(2, 16, size=(num, 8))}


def named(*dims):
    return nn.with_partitioning(nn.initializers.lecun_normal(), dims)


class MLP(nn.Module):
    """A Linen model with statistics of the batch and dropout."""

    outputs: int = NUM_CLASSES
    statistics: bool = True
    rate: float = 0.1

    @nn.compact
    def __call__(self, x, train: bool):
        dtype = jnp.result_type(float)
        x = nn.Dense(16, kernel_init=named("embed", "mlp"), param_dtype=dtype)(x.astype(dtype))
        if self.statistics:
            # Flax's batch norm stores its statistics in float32, whatever the dtype of the parameters is.
            mean = self.variable("batch_stats", "mean", jnp.zeros, (16,), dtype)
            now = x.mean(0) if train else mean.value
            if train and not self.is_initializing():
                mean.value = 0.9 * mean.value + 0.1 * now
            x = x - now
        x = nn.gelu(x)
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        return nn.Dense(self.outputs, kernel_init=named("mlp", None), param_dtype=dtype)(x)


class Embedded(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        table = self.param("table", named("vocab", "embed"), (16, 8))
        return jnp.take(table, tokens, axis=0) @ table.T


class Linear(nnx.Module):
    def __init__(self, outputs: int = NUM_CLASSES, *, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(1.0), ("embed", "mlp"))
        self.linear = nnx.Linear(NUM_FEATURES, outputs, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(self, features):
        return self.linear(features)


def squared(model, batch):
    """A mean: it does not say which rows count."""
    return jnp.square(model(batch["x"], train=False)[:, 0] - batch["y"]).mean()


def counted(model, batch):
    errors = jnp.square(model(batch["x"], train=False)[:, 0] - batch["y"]) * batch["counted"].astype("f")
    return LossSums(errors.sum(), batch["counted"].sum())


class Seen:
    """A callback that notes the events."""

    lists: ClassVar[dict] = {}
    losses: ClassVar[dict] = {}
    evaluated: ClassVar[dict] = {}

    def __init__(self, name):
        self.events, self.loss, self.means = [self.__class__.__dict__[key].setdefault(name, []) for key in KEPT]

    def on_train_begin(self, state, step):
        self.events.append(("train_begin", step))

    def on_step_begin(self, step):
        self.events.append(("step_begin", step))

    def on_step_end(self, state, step, metrics):
        assert int(state.step) == step
        self.events.append(("step_end", step))
        self.loss.append(metrics["loss"])

    def on_evaluation_begin(self, state, step):
        self.events.append(("evaluation_begin", step))

    def on_evaluation_end(self, state, step, metrics):
        self.events.append(("evaluation_end", step))
        self.means.append(metrics)

    def on_checkpoint(self, step, folder):
        assert (folder / "meta.json").is_file()
        self.events.append(("checkpoint", step))

    def on_train_end(self, state, step):
        self.events.append(("train_end", step))


KEPT = ("lists", "losses", "evaluated")


class Ends:
    def __init__(self, at):
        self.at = at

    def on_step_end(self, state, step, metrics):
        return "loss is fine" if step == self.at and metrics["loss"] > 0 else None


def largest(state, step):
    return {"largest": jnp.abs(jax.tree.leaves(state.params)[0]).max()}


class Pixels(nn.Module):
    """Logits of three classes from all pixels of an image."""

    @nn.compact
    def __call__(self, image):
        x = image.reshape(image.shape[0], -1)
        return nn.Dense(3, kernel_init=named("embed", "mlp"), use_bias=False, param_dtype=x.dtype)(x)
