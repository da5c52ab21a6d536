"""A collective is traced to the parameter that it gathers, or whose gradient it reduces, or to none."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshpar.inspection.program.hlo import Collective, collectives_of
from meshpar.tree import flatten_with_paths
from tests.program.test_bytes import found_in, prepared
from tests.program.test_hlo import make_mesh

WEIGHTS = {"stack": P(None, "fsdp"), "head": P("fsdp")}


@lru_cache
def found(name: str) -> list[Collective]:
    return collectives_of(jax.jit(PROGRAMS[name], donate_argnums=0).lower(params(), batch()).compile(), make_mesh())


def params() -> Any:
    shapes = {"stack": (3, 16, 16), "head": (16, 8)}
    return {
        name: jax.ShapeDtypeStruct(shapes[name], jnp.bfloat16, sharding=jax.NamedSharding(make_mesh(), spec))
        for name, spec in WEIGHTS.items()
    }


def batch() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=jax.NamedSharding(make_mesh(), P("fsdp")))


def gathered(w: jax.Array) -> jax.Array:
    return lax.all_gather(w.astype(jnp.float32), "fsdp", tiled=True)


def manual(function, out: Any) -> Any:
    return jax.shard_map(function, mesh=make_mesh(), in_specs=(WEIGHTS, P("fsdp")), out_specs=out)


def forward(w: Any, x: jax.Array) -> jax.Array:
    x, _ = lax.scan(lambda x, layer: (jnp.tanh(x @ gathered(layer)), None), x, w["stack"])
    return x @ gathered(w["head"])


def trained(w: Any, x: jax.Array) -> Any:
    """One step of SGD with momentum that starts at zero, donated, so that gradients end in their parameters."""

    def local(w: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda w: lax.psum(forward(w, x).sum(), "fsdp"))(w)
        return jax.tree.map(lambda w, g: w - jnp.asarray(0.1, w.dtype) * g, w, grads)

    return manual(local, WEIGHTS)(w, x)


def mixed(w: Any, x: jax.Array) -> Any:
    """The gathered array is the square of a parameter, not a view of it."""
    return w, manual(lambda w, x: x @ gathered(w["head"] * w["head"]), P("fsdp"))(w, x)


def changed(w: Any, x: jax.Array) -> Any:
    """The gathered array is carried by the loop, and differs from the argument after the first turn."""

    def turn(carry: Any, _: None) -> Any:
        head, x = carry
        return (head * jnp.asarray(2, head.dtype), x + gathered(head).sum()), None

    def local(w, x):
        return lax.scan(turn, (w["head"], x), None, length=3)[0][1]

    return w, manual(local, P("fsdp"))(w, x)


PROGRAMS = {"trained": trained, "mixed": mixed, "changed": changed}


def test_a_gather_is_traced_through_slices_casts_and_the_scan():
    gathers = [collective for collective in found("trained") if collective.kind == "all_gather"]
    assert {collective.tensors for collective in gathers} == {("w.stack",), ("w.head",)}
    assert all(collective.times % 3 == 0 for collective in gathers if collective.tensors == ("w.stack",))


def test_a_reduction_is_traced_to_the_parameter_that_it_updates():
    scatters = [collective for collective in found("trained") if collective.kind == "reduce_scatter"]
    assert sorted((collective.tensors, collective.times) for collective in scatters) == [
        (("w.head",), 1),
        (("w.stack",), 3),
    ]


@pytest.mark.parametrize("name", ["mixed", "changed"])
def test_no_tensor_is_named_where_it_would_be_wrong(name):
    assert [(collective.kind, collective.tensors) for collective in found(name)] == [("all_gather", ())]


@pytest.mark.parametrize("lowering", ["manual", "auto"])
@pytest.mark.parametrize("layout", ["zero3", "data8"])
def test_every_parameter_of_a_real_step_is_found(layout, lowering):
    """FSDP gathers all parameters and reduces all gradients; activations and scalars have no tensor."""
    run = prepared(layout, lowering)
    wanted = {f"state.params.{path}" for path in flatten_with_paths(run.specs)}
    of_step = found_in(layout, lowering, 1)
    reduced = {tensor for collective in of_step if collective.kind != "all_gather" for tensor in collective.tensors}
    assert reduced == wanted
    if layout == "zero3":
        assert {
            tensor for collective in of_step if collective.kind == "all_gather" for tensor in collective.tensors
        } == wanted


def test_a_reduction_is_not_traced_to_the_optimizers_state():
    tx = optax.adam(1e-3)

    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.square(x @ p["w"]).sum())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    weights = {"w": jnp.ones((16, 4))}
    state = tx.init(weights)
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=jax.NamedSharding(make_mesh(), P("data")))
    whole = jax.NamedSharding(make_mesh(), P())
    with jax.numpy_dtype_promotion("standard"):
        jitted = jax.jit(step, donate_argnums=(0, 1), in_shardings=(whole, whole, x.sharding), out_shardings=whole)
        program = jitted.lower(weights, state, x).compile()
    assert [collective.tensors for collective in collectives_of(program, make_mesh())] == [("params.w",)]
