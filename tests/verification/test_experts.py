"""Faults that experts are prone to are planted in a run, and `verify` finds them and blames axis expert."""

from __future__ import annotations

import jax
import pytest

from meshpar import AdamW, AxisRules, Balance, Experts, Llama, MeshLayout, Run, Synthetic, verify
from meshpar.nn.experts import exchange
from meshpar.nn.experts.routing import Router
from meshpar.parallel import data
from meshpar.parallel.context import dispatch_axes

EXPERTS = Experts(num=8, per_token=2, intermediate_size=8, balance=Balance(weight=0.1))


def run_of(sizes, **settings):
    return Run(
        model=Llama(num_layers=2, hidden_size=16, num_heads=2, intermediate_size=8, vocab_size=32, experts=EXPERTS),
        data=Synthetic(batch_size=8, seq_len=16, vocab_size=32),
        optim=AdamW(lr=1e-2, clip_norm=0.1),
        mesh=MeshLayout(**sizes),
        rules=AxisRules(preset=("fsdp", "experts")),
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
    monkeypatch.setattr(exchange, "_starts", lambda sizes: jax.numpy.roll(starts(sizes), 1, axis=-1))


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


IN_CI = [norm_without_experts]


@pytest.mark.parametrize("plant", [pytest.param(one, marks=[] if one in IN_CI else pytest.mark.slow) for one in FAULTS])
def test_verify_blames_axis_expert(plant, monkeypatch):
    plant(monkeypatch)
    settings = {"parallel": {"expert": "ragged"}} if plant is sent_to_a_neighbour else {}
    found = verify(run_of({"expert": 2, "fsdp": 2}, **settings))
    assert not found.is_equal
    assert [row.name for row in found.culprits] == ["expert=2"]
    assert FAULTS[plant] in str(found.culprits[0].difference or found.culprits[0].error)
