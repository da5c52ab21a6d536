"""Losses over a sharded vocabulary equal NumPy, finite differences, Optax and one device; planted faults are seen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from meshpar import LossSums, training
from meshpar.mesh.layout import MeshLayout
from meshpar.parallel.context import ParallelContext, tracing
from meshpar.sharding.rules import AxisRules
from meshpar.train import token_loss
from meshpar.train import training as trainings
from meshpar.train.loss import Distill
from tests.comparison import largest_difference

VOCAB = 29
PADDED = 32


@pytest.fixture(autouse=True)
def _float64(float64):
    """Every test of this module computes in float64."""


def reference_cost(logits, target, teacher, smoothing, z_loss, temperature, weight, vocab):
    """The cost of one token, in NumPy's longest floats."""
    x, t = (np.asarray(v[:vocab], np.longdouble) for v in (logits, teacher))

    def log_softmax(v):
        return v - v.max() - np.log(np.exp(v - v.max()).sum())

    q = np.full(vocab, smoothing / vocab, np.longdouble)
    q[target] += 1 - smoothing
    log_z = x.max() + np.log(np.exp(x - x.max()).sum())
    log_p = log_softmax(t / temperature)
    log_s = log_softmax(x / temperature)
    kl = (np.exp(log_p) * (log_p - log_s)).sum()
    return (1 - weight) * (-(q * log_softmax(x)).sum() + z_loss * log_z**2) + weight * temperature**2 * kl


NUMBERS = {"smoothing": 0.1, "z_loss": 1e-2, "temperature": 2.0, "weight": 0.4}


def costs(logits, targets, teacher):
    distill = Distill(teacher="unused", temperature=NUMBERS["temperature"], weight=NUMBERS["weight"])
    nll = token_loss.cross_entropy(logits, targets, VOCAB, NUMBERS["smoothing"], NUMBERS["z_loss"])
    return distill.add(nll, logits, teacher, VOCAB)


def drawn():
    rng = np.random.default_rng(0)
    logits, teacher = (jnp.asarray(3 * rng.normal(size=(2, 3, PADDED))) for _ in range(2))
    return logits, jnp.asarray(rng.integers(0, VOCAB, (2, 3)), jnp.int32), teacher


def test_the_cost_of_a_token_equals_numpy():
    logits, targets, teacher = drawn()
    want = [
        [reference_cost(logits[i, j], int(targets[i, j]), teacher[i, j], vocab=VOCAB, **NUMBERS) for j in range(3)]
        for i in range(2)
    ]
    np.testing.assert_allclose(costs(logits, targets, teacher), np.asarray(want, np.float64), rtol=1e-13)


def test_the_gradient_of_distillation_equals_finite_differences_and_none_reaches_the_teacher(monkeypatch):
    logits, targets, teacher = drawn()

    def total(logits, teacher):
        return costs(logits, targets, teacher).sum()

    grads, to_teacher = jax.grad(total, (0, 1))(logits, teacher)
    direction = jnp.asarray(np.random.default_rng(1).normal(size=logits.shape))
    slope = (total(logits + 1e-5 * direction, teacher) - total(logits - 1e-5 * direction, teacher)) / 2e-5
    np.testing.assert_allclose((grads * direction).sum(), slope, rtol=1e-8)
    assert not np.any(to_teacher)
    assert not np.any(grads[..., VOCAB:])
    monkeypatch.setattr(token_loss.lax, "stop_gradient", lambda x: x)  # control: a gradient that leaks is seen
    assert np.abs(jax.grad(total, 1)(logits, teacher)).max() > 1e-3


def test_label_smoothing_equals_optax():
    logits, targets, _ = drawn()
    labels = optax.smooth_labels(jax.nn.one_hot(targets, VOCAB, dtype=jnp.float64), 0.1)
    want = optax.softmax_cross_entropy(logits[..., :VOCAB], labels)
    np.testing.assert_allclose(token_loss.cross_entropy(logits, targets, VOCAB, 0.1), want, rtol=1e-13)


def on_four_devices(logits, targets, teacher) -> tuple[Any, Any]:
    """The costs, and the gradient of their sum, where each device has a quarter of the vocabulary."""
    mesh = MeshLayout(tensor=4).build(jax.devices()[:4])
    ctx = ParallelContext(mesh=mesh, rules=AxisRules(preset="megatron"), manual=True)

    def local(logits, targets, teacher):
        with tracing(ctx):

            def total(logits):
                return (costs(logits, targets, teacher).sum(), costs(logits, targets, teacher))

            grads, found = jax.grad(total, has_aux=True)(logits)
            return found, grads

    shards = PartitionSpec(None, None, "tensor")
    whole = PartitionSpec()
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(shards, whole, shards), out_specs=(whole, shards), check_vma=True
    )
    return jax.device_get(jax.jit(mapped)(logits, targets, teacher))


def difference() -> float:
    logits, targets, teacher = drawn()
    want = costs(logits, targets, teacher), jax.grad(lambda x: costs(x, targets, teacher).sum())(logits)
    return largest_difference(on_four_devices(logits, targets, teacher), want)


def test_costs_and_gradients_on_four_devices_equal_those_on_one():
    assert difference() < 1e-12


def test_planted_smoothing_over_the_local_vocabulary_is_seen(monkeypatch):
    cross_entropy = token_loss.cross_entropy

    def by_local_size(logits, targets, vocab_size, smoothing, z_loss):
        return cross_entropy(logits, targets, vocab_size, smoothing * logits.shape[-1] / PADDED, z_loss)

    monkeypatch.setattr(token_loss, "cross_entropy", by_local_size)
    assert difference() > 1e-2


def test_planted_a_sum_over_the_local_vocabulary_is_seen(monkeypatch):
    monkeypatch.setattr(token_loss.lax, "psum", lambda x, axes: jax.lax.pmax(jax.lax.stop_gradient(x), axes))
    assert difference() > 1e-2


def test_planted_local_ids_of_padding_are_seen(monkeypatch):
    monkeypatch.setattr(token_loss, "ids_of_shard", lambda width, axes: jnp.arange(width, dtype=jnp.int32))
    with pytest.raises(AssertionError):
        assert difference() < 1e-12


def mean_of_eights() -> float:
    """The mean over 16 rows of a loss of local shards, whose count is a number that its shapes say."""
    mesh, batch = MeshLayout(data=8).build(), {"x": np.full(16, 8, np.float32)}

    def loss(params, batch, key):
        return LossSums((params["w"] * batch["x"]).sum(), jnp.int32(batch["x"].size))

    step = training(
        lambda key: {"w": jnp.ones((), jnp.float32)}, loss, optax.sgd(0.1), batch, mesh=mesh, manual=True,
        rules=AxisRules(preset="replicated"),
    )  # fmt: skip
    _, metrics = step.compile_step()(step.compile_init()(), step.put(batch))
    return float(metrics["loss"])


def test_a_count_of_local_rows_that_no_data_decides_is_summed():
    assert mean_of_eights() == 8


def test_planted_a_count_that_is_taken_for_that_of_all_devices(monkeypatch):
    monkeypatch.setattr(trainings, "of_shards", lambda loss: loss)
    assert mean_of_eights() == 64
