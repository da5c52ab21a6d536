"""What a forward sows is a result that the loss may ask for, and no state that passes from step to step."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from meshpar import training
from meshpar.train.program import with_rows


class Sowing(nn.Module):
    """Sows a loss of its own and the largest number, as mixtures of experts and attention do, beside statistics."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(8, name="up")(x)
        self.sow("losses", "size", jnp.square(x).mean())
        self.sow("largest", "of_up", x.max())
        self.sow("intermediates", "hidden", x)
        return nn.BatchNorm(use_running_average=not train)(x)


class SowingNNX(nnx.Module):
    def __init__(self, rngs):
        self.up, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        x = self.up(x)
        self.sow(nnx.Intermediate, "size", jnp.square(x).mean())
        return self.norm(x)


BATCH = {"x": jax.random.normal(jax.random.key(1), (8, 8))}


def asking(*names):
    def loss(model, batch):
        out, sown = model(batch["x"], mutable=list(names))
        assert {*sown} == {*names}
        return jnp.square(out - 1).mean() + sum(map(sum, jax.tree.leaves(sown, is_leaf=lambda x: isinstance(x, tuple))))

    return loss


def plain(model, batch):
    return jnp.square(model(batch["x"]) - 1).mean()


def of_flax(params, carried, names):
    """The same loss, as Flax alone computes it."""
    held = {"params": params, "batch_stats": carried["batch_stats"]}
    out, new = Sowing().apply(held, BATCH["x"], mutable=["batch_stats", *names])
    sown = [x for name in names for x in jax.tree.leaves(new[name])]
    return jnp.square(out - 1).mean() + sum(sown), new["batch_stats"]


@pytest.mark.parametrize("names", [(), ("losses",), ("losses", "intermediates")], ids=lambda names: "-".join(names))
def test_a_linen_loss_gets_what_it_asks_for_and_carries_only_state(names):
    loss = asking(*names) if names else plain
    if "intermediates" in names:
        loss = lambda model, batch: jnp.square(model(batch["x"], mutable=list(names))[0] - 1).mean()
    made = training(Sowing(), loss, optax.sgd(0.1), BATCH, mesh="data=8", rules="replicated")
    assert {*made.carried} == {"batch_stats"}
    params, carried = made.init(jax.random.key(0)), made.init_carried(jax.random.key(0))
    found = made.loss(params, with_rows(BATCH), None, carried)
    expected, statistics = of_flax(params, carried, () if "intermediates" in names else names)
    assert abs(found.loss / float(found.count) - expected) < 1e-6
    assert jax.tree.all(jax.tree.map(jnp.array_equal, found.carried["batch_stats"], statistics))


def test_planted_what_is_sown_and_passed_on_grows(monkeypatch):
    monkeypatch.setattr(
        "meshpar.interop.module._changing", lambda variables, *_: {*variables(jax.random.key(0))} - {"params"}
    )
    with pytest.raises(Exception, match=r"carried.largest.of_up.1\n    is not in the carried state so far"):
        training(Sowing(), plain, optax.sgd(0.1), BATCH, mesh="data=8", rules="replicated").compile_step()


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_an_nnx_model_carries_only_state():
    made = training(SowingNNX, plain, optax.sgd(0.1), BATCH, mesh="data=8", rules="replicated")
    step, state = made.compile_step(), made.compile_init()()
    for _ in range(2):
        state, _ = step(state, made.put(BATCH))
    assert {*state.carried} == {"norm"}
