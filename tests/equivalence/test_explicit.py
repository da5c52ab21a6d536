"""Models for JAX's explicit mode, sharded as published: equal to one device, and they send no more than in JAX."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import AxisRules, ConfigError, MeshLayout, inspect, training
from meshpar.train.program import shardings
from meshpar.train.state import TrainState
from meshpar.train.training import Training
from meshpar.verification.trial import QUICK, Trial
from tests.zoo import EXPLICIT, Zoo, explicit_gemma
from tests.zoo.reference import moved

SHARDED = ({"fsdp": 4, "tensor": 2}, {"fsdp": 2, "tensor": 4}, {"fsdp": 8}, {"tensor": 8})
TWO_TENSOR_AXES = (
    {"data": 2, "tensor": 2, "context": 2}, {"tensor": 4, "context": 2}, {"data": 8}, {"data": 2, "tensor": 4},
)  # fmt: skip
AXES = {"explicit_gemma": ("fsdp", "tensor"), "explicit_llada": ("fsdp", "tp"), "explicit_llama": ("x", "y", "z")}
"""The axes of the meshes that the models are written for; the first is that of the rows."""
MESHES = {"explicit_gemma": SHARDED, "explicit_llada": SHARDED, "explicit_llama": TWO_TENSOR_AXES}
SCALARS = 64
"""Bytes over each axis for numbers that JAX's program does not compute: the count of rows, the norm of the gradient."""


def cases(in_ci=EXPLICIT):
    """Each model on each mesh; in CI some models, on the first."""
    for model, meshes in MESHES.items():
        for sizes in meshes:
            name = "-".join([model, *(f"{axis}{size}" for axis, size in sizes.items())])
            is_slow = model not in in_ci or sizes is not meshes[0]
            yield pytest.param(model, sizes, marks=[pytest.mark.slow] if is_slow else [], id=name)


@pytest.fixture(autouse=True)
def _promotion(float64):
    with jax.numpy_dtype_promotion("standard"):
        yield


def built(model: str) -> Zoo:
    return import_module(f"tests.zoo.{model}").build()


def own_mesh(zoo: Zoo, sizes: dict[str, int]) -> Mesh:
    """The mesh of explicit axes that the model is written for, with its own names of axes."""
    axes = {name: sizes.get(zoo.axes.get(name, name), 1) for name in AXES[zoo.name]}
    devices = jax.devices()[: int(np.prod([*axes.values()]))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Explicit,) * len(axes), devices=devices)


def declared(tree: Any, mesh: Mesh) -> Any:
    """The shardings that a model gives its parameters: by metadata of NNX, or by their types."""

    def of(x: Any) -> Any:
        metadata = x.get_metadata().get("out_sharding") if isinstance(x, nnx.Variable) else None
        array = x.get_value() if isinstance(x, nnx.Variable) else x
        return NamedSharding(mesh, metadata or array.sharding.spec)

    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return jax.tree.unflatten(jax.tree.structure(tree), map(of, leaves))


def program(zoo: Zoo, sizes: dict[str, int]) -> tuple[Any, Any, Mesh]:
    """The user's own program in JAX's explicit mode, as shapes: (its loss and gradients, arguments, mesh)."""
    mesh = own_mesh(zoo, sizes)
    with jax.set_mesh(mesh), nnx.use_eager_sharding(False):
        shapes = jax.eval_shape(zoo.init, jax.random.key(0))
        of_params = declared(shapes, mesh)
        params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, of_params)
        of_rows = NamedSharding(mesh, P(AXES[zoo.name][0]))
        batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of_rows) for name, x in zoo.batch.items()}
        traced = jax.jit(lambda params, batch: jax.value_and_grad(zoo.loss)(params, batch, None)).trace(params, batch)
    return traced, (params, batch), mesh


@lru_cache
def on_one_device(model: str) -> tuple[Zoo, Any, Any]:
    """The model, parameters, and its loss and gradients in the user's own program on one device."""
    zoo = built(model)
    traced, (structs, _), mesh = program(zoo, {})
    with jax.set_mesh(mesh), nnx.use_eager_sharding(False):
        params = moved(jax.device_get(jax.jit(zoo.init)(jax.random.key(0))))
        arguments = (jax.device_put(params, jax.tree.map(lambda x: x.sharding, structs)), zoo.batch)
    return zoo, params, jax.device_get(traced.lower().compile(QUICK)(*jax.device_put(arguments)))


def adopted(zoo: Zoo, sizes: dict[str, int], **more: Any) -> Training:
    mesh = MeshLayout(**sizes)
    return training(
        zoo.init, zoo.loss, optax.sgd(0.1), dict(zoo.batch), mesh=mesh.build(jax.devices()[: mesh.requested()]),
        rules=AxisRules(preset="replicated", unnamed=()), axes=zoo.axes, compute_dtype=np.dtype("float64"), **more,
    )  # fmt: skip


def difference(model: str, sizes: dict[str, int]) -> float:
    """The largest difference of the loss and of each gradient from one device."""
    zoo, params, expected = on_one_device(model)
    trial = Trial(adopted(zoo, sizes))
    state = TrainState(np.int32(0), params, optax.sgd(0.1).init(params), np.int32(0), {})
    state = jax.device_put(state, shardings(trial.training.placement.structs))
    _, metrics, grads = trial._step(state, trial.training.put(dict(zoo.batch)))
    found = jax.device_get((metrics["loss"], grads))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


@pytest.mark.parametrize(("model", "sizes"), list(cases()))
def test_a_model_for_explicit_axes_is_equal_to_one_device(model, sizes):
    assert difference(model, sizes) < 1e-10


@pytest.mark.parametrize(("model", "sizes"), list(cases(in_ci=("explicit_gemma",))))
def test_it_sends_no_more_than_jaxs_own_program(model, sizes):
    zoo = built(model)
    step = adopted(zoo, sizes)
    own, _, mesh = program(zoo, sizes)
    most = inspect(own.lower().compile(QUICK), mesh).bytes_per_axis
    sent = inspect(step.compile_step(QUICK).compiled, step.mesh).bytes_per_axis
    total, most = sum(sent.values()), sum(most.values())
    print(f"{model} {sizes}: {total} bytes, JAX's program {most}: {total / most:.2f}")
    assert 0 < total <= most + SCALARS


def test_every_gradient_is_a_number_to_compare():
    for model in EXPLICIT:
        _, _, (_, grads) = on_one_device(model)
        assert all(1e-7 < np.abs(g).max() < 1e2 for g in jax.tree.leaves(grads)), model


def forward_bytes(**wrong: P) -> int:
    """What a forward pass of Gemma moves, with other shardings than the published ones."""
    step = adopted(explicit_gemma.build(**wrong), {"fsdp": 4, "tensor": 2})
    return sum(moved.sent for moved in step.activations)


def test_a_planted_wrong_sharding_is_followed_and_shows_in_what_is_sent():
    assert forward_bytes(act_btf=P("fsdp", None, None)) > 1.1 * forward_bytes()


def test_a_planted_sharding_of_the_rows_over_another_axis_is_refused():
    with pytest.raises(ConfigError, match=r"explicit_gemma.py:\d+ \(__call__\): .* incompatible shardings"):
        forward_bytes(act_btd=P("tensor", None, "fsdp"))
