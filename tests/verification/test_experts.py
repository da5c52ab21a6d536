"""Faults that experts are prone to are planted in a run, and `verify` finds them and blames axis expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import AdamW, AxisRules, Balance, Experts, Llama, MeshLayout, Run, Synthetic, training, verify
from meshpar.nn.experts import exchange, mixture
from meshpar.nn.experts.exchange import Devices
from meshpar.nn.experts.functional import DIMS
from meshpar.nn.experts.routing import Router
from meshpar.parallel import data
from meshpar.parallel.context import dispatch_axes

EXPERTS = Experts(num=8, per_token=2, intermediate_size=8, balance=Balance(weight=0.1))
RULES = AxisRules(preset=("fsdp", "experts"))


def run_of(sizes, **settings):
    return Run(
        model=Llama(num_layers=2, hidden_size=16, num_heads=2, intermediate_size=8, vocab_size=32, experts=EXPERTS),
        data=Synthetic(batch_size=8, seq_len=16, vocab_size=32),
        optim=AdamW(lr=1e-2, clip_norm=0.1),
        mesh=MeshLayout(**sizes),
        rules=RULES,
        num_steps=4,
        run_dir="unused",
        **settings,
    )


def doubled_router(monkeypatch):
    summed = data.sum_gradient

    def twice(grad, axes):
        is_router = grad.ndim == 3 and grad.shape[-1] == 4
        return summed(grad, axes) * (2 if is_router and "expert" in axes else 1)

    monkeypatch.setattr(data, "sum_gradient", twice)


def sent_to_a_neighbour(monkeypatch):
    starts = exchange._starts
    monkeypatch.setattr(exchange, "_starts", lambda sizes: jnp.roll(starts(sizes), 1, axis=-1))


def norm_without_experts(monkeypatch):
    norm = data.global_norm

    def without(grads, placements):
        leaves = zip(jax.tree.leaves(grads), jax.tree.leaves(placements), strict=True)
        others = [(g, p) for g, p in leaves if ("expert",) not in p.axes]
        return norm(*map(list, zip(*others, strict=True)))

    monkeypatch.setattr(data, "global_norm", without)


def balance_twice(monkeypatch):
    auxiliary = Router.auxiliary

    def doubled(*args):
        losses, metrics = auxiliary(*args)
        times = 2.0 if dispatch_axes("experts") else 1.0
        return type(auxiliary(*args))({name: times * x for name, x in losses.items()}, metrics)

    monkeypatch.setattr(Router, "auxiliary", doubled)


FAULTS = {
    doubled_router: "gradient of blocks.mlp.router.weight",
    sent_to_a_neighbour: "loss",
    norm_without_experts: "norm",
    balance_twice: "loss",
}


@pytest.mark.slow
def test_a_run_with_experts_is_equal():
    found = verify(run_of({"expert": 2, "fsdp": 2}))
    assert found.is_equal, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("plant", FAULTS)
def test_verify_blames_axis_expert(plant, monkeypatch):
    plant(monkeypatch)
    settings = {"parallel": {"expert": "ragged"}} if plant is sent_to_a_neighbour else {}
    found = verify(run_of({"expert": 2, "fsdp": 2}, **settings))
    assert not found.is_equal
    assert [row.name for row in found.culprits] == ["expert=2"]
    assert FAULTS[plant] in str(found.culprits[0].difference or found.culprits[0].error)


ARRAYS = {"router": (16, 8), "gate": (8, 16, 4), "up": (8, 16, 4), "down": (8, 4, 16)}


def loss_of_a_user(params, batch, key):
    y, auxiliary = mixture(batch["x"], *(params[name] for name in ARRAYS), EXPERTS)
    return jnp.square(y - batch["y"]).mean() + sum(auxiliary.losses.values())


def rows(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(8, 4, 16)).astype(np.float32) for name in ("x", "y")}


def of_a_user():
    """A training whose loss calls `mixture`, without drops, in a program that XLA partitions."""

    def init(key):
        keys = jax.random.split(key, len(ARRAYS))
        return {name: jax.random.normal(k, ARRAYS[name]) for name, k in zip(ARRAYS, keys, strict=True)}

    mesh = MeshLayout(expert=2).build(jax.devices()[:2])
    dims = dict(zip(ARRAYS, DIMS, strict=True))
    return training(init, loss_of_a_user, optax.sgd(0.1), rows(0), mesh=mesh, rules=RULES, dims=dims)


def test_a_loss_with_a_mixture_is_equal():
    """The loss runs under a vmap of nothing, for which `lax.ragged_dot` has no rule."""
    found = verify(of_a_user(), [rows(1), rows(2)])
    assert found.is_equal, str(found)


def test_a_mixture_that_computes_the_experts_of_a_neighbour_is_seen(monkeypatch):
    index = Devices.index.fget
    monkeypatch.setattr(Devices, "index", property(lambda devices: 1 - index(devices)))
    assert not verify(of_a_user(), [rows(1), rows(2)]).is_equal
