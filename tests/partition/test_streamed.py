"""Overlapped products of a user's model: what is streamed, and what is refused because nothing can be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar
from meshpar import ConfigError, MeshLayout, Parallel, training
from meshpar.collectives import ring
from meshpar.collectives.ring import Ring
from meshpar.cost.traced import traced_collectives, traffic
from meshpar.train.program import shardings, with_rows

ROWS = {"x": np.ones((8, 8, 16), "float32")}
DIMS = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
BOTH_WAYS = {"overlap": "bidirectional"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"mesh": "data=2 fsdp=4", "rules": "fsdp", "parallel": Parallel(fsdp=BOTH_WAYS)},
    "tensor": {"mesh": "data=2 tensor=4", "rules": "megatron_sp", "parallel": Parallel(tensor=BOTH_WAYS)},
}
SEQUENCE = {"batch_dims": {"x": ("batch", "seq", "")}, "activation_dims": ["residual_seq"]}


def init(key):
    return {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}


def mlp(params, batch, key):
    x = meshpar.constrain(batch["x"], "batch", "residual_seq", "embed")
    x = meshpar.constrain(jnp.tanh(x @ params["up"]) @ params["down"], "batch", "residual_seq", "embed")
    return jnp.square(x).mean()


def tied(params, batch, key):
    """A matrix is read twice, and no value of a product is gathered."""
    return sum(jnp.sum(params[name]) * params[name].mean() for name in DIMS) + batch["x"].mean()


def adopted(loss, layout, **more):
    more = {**LAYOUTS[layout], **(SEQUENCE if layout == "tensor" else {"activation_dims": ["residual_seq"]}), **more}
    return training(init, loss, optax.sgd(0.1), ROWS, dims=DIMS, **more)


def sent(loss, layout, **more):
    made = adopted(loss, layout, **more)
    found = traced_collectives(jax.make_jaxpr(made.step)(made.placement.structs, made.batch))
    return traffic(found), {one.kind for one in found}


AGAIN = {"fsdp": 0, "tensor": 3 * (4 * 2 * 16 * 4)}
"""Bytes that the backward of a ring sends again: three hops of a shard of x. ZeRO-3 gathers weights again anyway."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_send_chunks_and_the_bytes_of_the_closed_form(layout):
    whole, without = sent(mlp, layout, parallel=Parallel())
    chunks, kinds = sent(mlp, layout)
    assert chunks == whole | {(layout,): whole[layout,] + AGAIN[layout]}
    assert "collective_permute" in kinds - without


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overlap_that_no_product_has_is_refused(layout):
    with pytest.raises(ConfigError, match=f"parallel.{layout}.overlap\n    no product of the loss"):
        sent(tied, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overlap_is_no_error_on_a_mesh_without_its_axis(layout):
    """`verify` compares each axis alone with one device."""
    one = MeshLayout().build(jax.devices()[:1])
    alone = adopted(mlp, layout).on(mesh=one)
    assert not traced_collectives(jax.make_jaxpr(alone.step)(alone.placement.structs, alone.batch))


def test_a_fragment_without_parameters_is_refused():
    local = {"axis": "data", "every": 2, "fragments": 2}
    with pytest.raises(ConfigError, match=r"parallel.local.fragments: 2 fragments .* has 0: a stack"):
        sent(mlp, "tensor", parallel=Parallel(local=local), rules="replicated", mesh="data=8", num_steps=2)


# Planted faults -----------------------------------------------------------------------------------------------------


def difference(layout):
    """How far the gradients of the MLP on some layout are from those of one device."""
    made = adopted(mlp, layout)
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=x.shape).astype("float32") / 4 for name, x in jax.eval_shape(init, 0).items()}
    batch = {"x": rng.normal(size=ROWS["x"].shape).astype("float32")}
    placed = jax.device_put(params, shardings(made.placement.structs.params))
    found = jax.jit(made.gradients)(placed, with_rows(made.put(batch)), np.int32(0), {}).grads
    expected = jax.grad(lambda params: mlp(params, jax.device_put(batch), None))(params)
    return max(np.abs(found[name] - expected[name]).max() for name in DIMS)


def of_the_wrong_neighbour(patch):
    """Each chunk is taken for that of the next device. Sums that are scattered wrong alike would make up for it."""
    gather = ring.gather
    patch.setattr(
        ring,
        "gather",
        lambda own, chunk, visit: gather(own, chunk, lambda carry, x, rank: visit(carry, x, (rank + 1) % own.size)),
    )


def without_the_last(patch):
    """The farthest chunk is not used, and the farthest device adds no part."""
    gather, scatter, shift = ring.gather, ring.reduce_scatter, Ring.rank

    def gathered(own, chunk, visit):
        last = own.rank(2)
        return gather(own, chunk, lambda carry, x, rank: visit(carry, jnp.where(rank == last, 0 * x, x), rank))

    def scattered(own, make):
        last = shift(own, 2)
        return scatter(own, lambda rank: jnp.where(rank == last, 0, 1) * make(rank))

    patch.setattr(ring, "gather", gathered)
    patch.setattr(ring, "reduce_scatter", scattered)


PLANTED = [("fsdp", of_the_wrong_neighbour), ("tensor", without_the_last)]
MORE = [("tensor", of_the_wrong_neighbour), ("fsdp", without_the_last)]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


@pytest.mark.parametrize(("layout", "plant"), [*PLANTED, *SLOW])
def test_planted_faults_in_chunks_are_found(layout, plant, monkeypatch):
    assert difference(layout) < 1e-6
    plant(monkeypatch)
    assert difference(layout) > 1e-3
