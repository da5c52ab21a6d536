"""Pruned weights are those of the definition, equal on all devices, and exactly zero after training."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar.mesh.layout import MeshLayout
from meshpar.optim import pruning
from meshpar.optim.pruning import Magnitude, NOfM, Prune, smallest, with_pruning
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.tree import flatten_with_paths
from meshpar.verification.trial import QUICK
from tests.comparison import largest_difference
from tests.equivalence.conftest import batches, prepared

SCHEDULE = {"begin": 1, "every": 1, "times": 2}
PRUNE: dict[str, Prune] = {
    "magnitude": Magnitude(sparsity=0.6, paths=("blocks.attn.o.kernel", "blocks.mlp.up.kernel"), **SCHEDULE),
    "n_of_m": NOfM(paths=("blocks.mlp.*.kernel",), **SCHEDULE),
}
LAYOUT = "data2_fsdp2_tensor2"
STAGES = {"mesh": MeshLayout(pipe=2, fsdp=2, tensor=2), "rules": AxisRules(preset=("pipeline", "fsdp", "megatron"))}
PIPELINE = {"pipeline": {"kind": "1f1b", "num_microbatches": 4}}


@pytest.fixture(autouse=True)
def _float64(float64):
    """Every test of this module computes in float64."""


def trained(kind: str, layout: str | None, lowering: str = "manual", **settings):
    """The parameters and masks after three steps, by path."""
    run = prepared("llama", layout, lowering, 1, prune=PRUNE[kind], **settings)
    step = run.compile_step(QUICK)
    state = run.compile_init()()
    for batch in batches():
        state, _ = step(state, run.put(batch))
    [masks] = [node.masks for node in jax.tree.leaves(state.opt_state, is_leaf=is_pruned) if is_pruned(node)]
    return flatten_with_paths(jax.device_get(state.params)), jax.device_get(masks)


def is_pruned(node) -> bool:
    return isinstance(node, pruning.PruneState)


@lru_cache
def on_one_device(kind: str):
    return trained(kind, None)


def zeros_by_definition(kind: str, weights: np.ndarray) -> np.ndarray:
    """The number of zeros: of each layer's matrix, or of each group of four inputs of an output."""
    if kind == "magnitude":
        return (weights == 0).reshape(len(weights), -1).sum(1)
    layers, inputs, outputs = weights.shape
    return (weights == 0).reshape(layers, inputs // 4, 4, outputs).sum(2)


@pytest.mark.parametrize("kind", PRUNE)
def test_the_zeros_after_training_are_exactly_as_declared(kind):
    params, masks = on_one_device(kind)
    assert len(masks) == (2 if kind == "magnitude" else 3)
    for path, mask in masks.items():
        want = round(0.6 * mask[0].size) if kind == "magnitude" else 2
        assert (zeros_by_definition(kind, params[path]) == want).all(), path
        assert ((params[path] == 0) == ~mask).all()
    assert not any((x == 0).any() for path, x in params.items() if path not in masks and "embedding" not in path)


CASES = {
    "magnitude": ("magnitude", LAYOUT, {}),
    "n_of_m": ("n_of_m", LAYOUT, {}),
    "magnitude, gspmd": ("magnitude", LAYOUT, {"lowering": "auto"}),
    "magnitude, zero1": ("magnitude", "zero1", {}),
    "magnitude, 1f1b": ("magnitude", None, STAGES | {"parallel": PIPELINE}),
}


IN_CI = ("magnitude", "n_of_m")


@pytest.mark.parametrize("case", [pytest.param(x, marks=[] if x in IN_CI else pytest.mark.slow) for x in CASES])
def test_masks_and_parameters_equal_those_of_one_device(case):
    kind, layout, settings = CASES[case]
    want_params, want_masks = on_one_device(kind)
    params, masks = trained(kind, layout, **settings)
    assert all((masks[path] == want_masks[path]).all() for path in want_masks)
    assert largest_difference(params, want_params) < 1e-10


def test_masks_are_sharded_as_their_weights():
    placement = prepared("llama", LAYOUT, "manual", 1, prune=PRUNE["magnitude"]).placement
    weights = flatten_with_paths(placement.sharded)
    masks = {
        path.removeprefix("masks."): placed
        for path, placed in flatten_with_paths(placement.opt_state).items()
        if path.startswith("masks.")
    }
    assert len(masks) == 2
    for path, placed in masks.items():
        assert placed.pspec == weights[path].pspec
        assert placed.spec.dtype == bool
    assert any(any(placed.axes) for placed in masks.values())


def test_the_smallest_are_those_of_a_stable_sort():
    rng = np.random.default_rng(0)
    drawn = np.abs(rng.normal(size=(3, 8, 5)))
    drawn[1] = rng.integers(0, 4, (8, 5))  # many ties, and zeros
    for num in (0, 1, 17, 40):
        want = np.zeros((3, 40), bool)
        order = np.argsort(drawn.reshape(3, -1), axis=1, kind="stable")[:, :num]
        np.put_along_axis(want, order, True, axis=1)
        assert (np.asarray(smallest(jnp.asarray(drawn), 1, jnp.int32(num))).reshape(3, -1) == want).all()


def test_the_fraction_follows_the_schedule_and_a_missed_pruning_is_made_up_for():
    specs = {"w": ArraySpec((8, 8), np.dtype("float64"), ("embed", "mlp"))}
    prune = Magnitude(paths=("w",), sparsity=0.5, begin=2, every=2, times=2)
    tx = with_pruning(optax.sgd(0.0), prune, specs)
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)))}
    state = tx.init(params)
    zeros = []
    for step in (0, 1, 2, 4, 5, 6):  # step 3, after which the first pruning is due, was skipped
        updates, state = tx.update({"w": jnp.ones((8, 8))}, state, params, step=jnp.int32(step))
        params = optax.apply_updates(params, updates)
        zeros.append(int((params["w"] == 0).sum()))
    assert zeros == [0, 0, 0, 28, 32, 32]  # 28 = 0.5 * (1 - 1/8) * 64


def test_planted_a_threshold_of_each_shard_is_seen(monkeypatch):
    """Each half of the rows prunes its own smallest weights, as devices would that do not communicate."""

    def of_halves(magnitudes, start, num):
        halves = jnp.split(magnitudes, 2, axis=start)
        return jnp.concatenate([smallest(half, start, num // 2) for half in halves], axis=start)

    monkeypatch.setattr(pruning, "smallest", of_halves)
    _, masks = trained("magnitude", None)
    monkeypatch.undo()
    want = on_one_device("magnitude")[1]
    assert any((masks[path] != want[path]).any() for path in want)


def test_planted_an_update_without_the_mask_is_seen(monkeypatch):
    monkeypatch.setattr(pruning, "_where", lambda masks, tree, otherwise: tree)
    params, masks = trained("n_of_m", None)
    assert not all((zeros_by_definition("n_of_m", params[path]) == 2).all() for path in masks)
