"""Models that are no decoders of meshpar's, the trainings of them, and what plain JAX computes on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import optax

from meshpar import AxisRules, MeshLayout, Training, training
from meshpar.tree import flatten_with_paths
from meshpar.verification.trial import QUICK
from tests.zoo import MODELS, Zoo, vit
from tests.zoo.parts import SEQ, accuracy, cross_entropy
from tests.zoo.reference import first, moved

ROWS = 16
RATE = 0.1
LAYOUTS: dict[str, tuple[dict[str, int], list[str]]] = {
    "one": ({}, ["replicated"]),
    "data4": ({"data": 4}, ["replicated"]),
    "data8": ({"data": 8}, ["replicated"]),
    "tensor2": ({"tensor": 2}, ["megatron"]),
    "cube": ({"data": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron"]),
    "hsdp": ({"replica": 2, "fsdp": 2, "tensor": 2}, ["hsdp", "megatron"]),
    "fsdp4": ({"fsdp": 4}, ["fsdp"]),
    "expert4": ({"expert": 4}, ["experts"]),
    "sequence": ({"data": 2, "tensor": 4}, ["megatron_sp"]),
}
KERNELS = {"vit": ["**.query", "**.Dense_*"], "t5": ["**.query", "**.wi_0.*"], "gshard": ["**.wi", "**.wo"]}
"""Model -> globs of kernels that LoRA adapts."""


@lru_cache
def model(name: str) -> tuple[Zoo, Any]:
    """A model without dropout, and its first parameters."""
    zoo = _without_dropout(MODELS[name]()) if name == "vit" else MODELS[name]()
    return zoo, jax.device_get(moved(first(zoo.init, jax.random.key(0))))


def _without_dropout(zoo: Zoo) -> Zoo:
    def loss(params, batch, key):
        logits = vit.ViT().apply({"params": params}, batch["image"])
        return cross_entropy(logits, batch["label"]), {"accuracy": accuracy(logits, batch["label"])}

    return replace(zoo, loss=loss, draws=False)


def batches(name: str, num: int) -> list[dict[str, np.ndarray]]:
    """The rows of the model's batch in `num` orders."""
    rng = np.random.default_rng(1)
    orders = [rng.permutation(ROWS) for _ in range(num)]
    return [{key: x[order] for key, x in model(name)[0].batch.items()} for order in orders]


def adopted(name: str, layout: str, tx: Any = None, init: Any = None, loss: Any = None, **options: Any) -> Training:
    """A training of the model in float64."""
    zoo, params = model(name)
    sizes, presets = LAYOUTS[layout]
    mesh = MeshLayout(**sizes)
    if layout == "sequence":
        options["batch_dims"] = {key: ("batch", "seq") for key, x in zoo.batch.items() if x.shape[1:] == (SEQ,)}

    def moved_init(key):
        return jax.tree.unflatten(jax.tree.structure(zoo.init(key)), jax.tree.leaves(params))  # in Linen's boxes

    return training(
        init or moved_init, loss or zoo.loss, tx or optax.sgd(RATE),
        dict(zoo.batch), mesh=mesh.build(jax.devices()[: mesh.requested()]),
        rules=AxisRules(preset=presets, **zoo.rules), dims=zoo.dims, **{"compute_dtype": np.float64} | options,
    )  # fmt: skip


def trained(made: Training, name: str, num_steps: int = 2, step: Any = None) -> tuple[list[float], Any]:
    """The losses of some steps, and the last state."""
    step, state = step or made.compile_step(QUICK), made.compile_init(QUICK)()
    losses = []
    for batch in batches(name, num_steps):
        state, metrics = step(state, made.put(batch))
        losses.append(float(np.mean(step.read(metrics)["loss"])))
    return losses, jax.device_get(state)


def plain_loss(name: str) -> Callable[..., Any]:
    """(params, batch) -> the mean, by the user's own program."""

    def loss(params, batch):
        result = model(name)[0].loss(params, batch, None)
        return result[0] if isinstance(result, tuple) else result

    return loss


@lru_cache
def plain_gradient(name: str) -> Callable[..., Any]:
    """(params, batch) -> the mean and its gradient, compiled once."""
    return jax.jit(jax.value_and_grad(plain_loss(name)))


def by_hand(
    name: str, num_steps: int = 2, loss: Callable[..., Any] | None = None, params: Any = None, parts: int = 1
) -> tuple[list[float], Any]:
    """The same by `jax.grad` and stochastic gradient descent on one device.

    Args:
      parts: the microbatches of a batch, each of every `parts`-th row; gradients are their mean.
    """
    grad = jax.jit(jax.value_and_grad(loss)) if loss else plain_gradient(name)
    params = model(name)[1] if params is None else params
    losses = []
    for batch in batches(name, num_steps):
        found = [grad(params, {key: x[i::parts] for key, x in batch.items()}) for i in range(parts)]
        losses.append(float(np.mean([one[0] for one in found])))
        mean = jax.tree.map(lambda *g: sum(g) / parts, *(one[1] for one in found))
        params = jax.device_get(jax.tree.map(lambda p, g: p - RATE * g, params, mean))
    return losses, params


def difference(one: Any, other: Any) -> float:
    """The largest difference of two trees with the same paths."""
    a, b = flatten_with_paths(one), flatten_with_paths(other)
    assert a.keys() == b.keys()
    return max(np.abs(np.float64(a[path]) - np.float64(b[path])).max() for path in a)


def mean_of(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *x: sum(x) / len(x), *trees)
