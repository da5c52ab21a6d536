"""Overlapped products of a user's model: what is streamed, and what is refused because nothing can be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar
from meshpar import ConfigError, Parallel, training
from meshpar.cost.traced import traced_collectives, traffic

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


def sent(loss, layout, **more):
    more = {**LAYOUTS[layout], **(SEQUENCE if layout == "tensor" else {"activation_dims": ["residual_seq"]}), **more}
    made = training(init, loss, optax.sgd(0.1), ROWS, dims=DIMS, **more)
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


def test_a_fragment_without_parameters_is_refused():
    local = {"axis": "data", "every": 2, "fragments": 2}
    with pytest.raises(ConfigError, match=r"parallel.local.fragments: 2 fragments .* 0 stacked layers"):
        sent(mlp, "tensor", parallel=Parallel(local=local), rules="replicated", mesh="data=8", num_steps=2)
