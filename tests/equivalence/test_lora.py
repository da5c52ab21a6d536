"""LoRA and frozen parameters are equal to one device, frozen parameters keep their values, planted faults are seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from meshpar.mesh.layout import MeshLayout
from meshpar.mesh.varying import varies_over, varying_like
from meshpar.nn import dora
from meshpar.nn.lora import is_lora
from meshpar.nn.low_rank import Adapter
from meshpar.optim import frozen_layers
from meshpar.parallel.context import ParallelContext, manual_axes
from meshpar.parallel.pipeline import layers
from meshpar.sharding.rules import AxisRules
from meshpar.train.program import with_rows
from meshpar.tree import flatten_with_paths, map_with_path
from tests.comparison import largest_difference
from tests.equivalence.conftest import batches, first_state, on_one_device, outcome, prepared

LAYOUT = "data2_fsdp2_tensor2"
SLOW = [pytest.mark.slow]
IN_CI = ("llama_frozen_layers", LAYOUT, "manual")


@pytest.mark.parametrize(
    ("model", "layout", "lowering"),
    [
        pytest.param(
            model, layout, lowering, marks=[] if (model, layout, lowering) == ("llama_dora", LAYOUT, "manual") else SLOW
        )
        for model in ("llama_lora", "llama_dora")
        for layout, lowering in ((LAYOUT, "manual"), (LAYOUT, "auto"), ("tensor4_sp", "manual"), ("zero3", "manual"))
    ],
)
def test_lora_is_equal_to_one_device_and_changes_only_its_own_parameters(model, layout, lowering):
    run = prepared(model, layout, lowering, 4)
    want = on_one_device(model)
    got = outcome(run)
    assert got.difference(want) < 1e-10
    assert all(map(is_lora, flatten_with_paths(got.gradients)))
    first = flatten_with_paths(jax.device_get(run.compile_init()().params))
    for path, array in flatten_with_paths(got.params).items():
        assert np.array_equal(array, first[path]) != is_lora(path), path


@pytest.mark.slow
def test_planted_norms_of_a_shard_are_seen(monkeypatch):
    """A row-parallel kernel has a shard of its inputs: DoRA's norms are sums over the devices of `tensor`."""
    expected = on_one_device("llama_dora")

    def of_first_shard(kernel, inputs):
        shard = lax.slice_in_dim(kernel, 0, kernel.shape[inputs[0]] // 2, axis=inputs[0])
        return jnp.square(shard).sum(inputs)

    monkeypatch.setattr(dora, "_squares", of_first_shard)
    assert outcome(prepared("llama_dora", LAYOUT, "manual", 4)).difference(expected) > 1e-4


@pytest.mark.parametrize(
    ("model", "layout", "lowering"),
    [
        pytest.param(model, layout, lowering, marks=[] if (model, layout, lowering) == IN_CI else SLOW)
        for model in ("llama_frozen_layers", "llama_lora_layers")
        for layout in (LAYOUT, "zero1", "zero2", "zero3", "tensor4_sp")
        for lowering in ("manual", "auto")
    ],
)
def test_frozen_layers_keep_every_bit_and_have_no_state(model, layout, lowering):
    """Layers 0 and 1 and the MLP of layer 3, of a model or of its LoRA."""
    run = prepared(model, layout, lowering, 2)
    found = outcome(run)
    assert found.difference(on_one_device(model)) < 1e-10
    first = flatten_with_paths(jax.device_get(first_state(run.run.model, run.run.lora, run.run.freeze).params))
    for path, x in flatten_with_paths(found.params).items():
        if path.startswith("blocks."):
            kept = {i for i in range(len(x)) if x[i].tobytes() == first[path][i].tobytes()}
            is_frozen = run.run.lora and not is_lora(path)
            assert kept == ({0, 1, 2, 3} if is_frozen else {0, 1, 3} if ".mlp." in path else {0, 1}), path
    moments = {path: x for path, x in flatten_with_paths(found.gradients).items() if path.startswith("blocks.")}
    assert moments
    assert all(len(x) == (1 if ".mlp." in path else 2) for path, x in moments.items())


@pytest.mark.slow
def test_planted_gradients_of_frozen_layers_in_the_norm_are_seen(monkeypatch):
    want = on_one_device("llama_frozen_layers")
    monkeypatch.setattr(frozen_layers.Rows, "without_frozen", lambda self, grad: grad)
    planted = outcome(prepared("llama_frozen_layers", None, "auto", 1))
    assert abs(planted.norms - want.norms).max() > 1e-3


@pytest.mark.slow
def test_the_trained_layers_are_those_that_optax_trains_with_a_mask():
    """By Optax's own AdamW on one device, where products with zeros leave the frozen rows out of the gradients."""
    model = "llama_frozen_layers"
    run = prepared(model, None, "auto", 1)
    start = first_state(run.run.model, None, run.run.freeze)
    whole = prepared("llama", None, "auto", 1, fields={"num_layers": 4})  # the same model, nothing of which is frozen
    params = jax.tree.map(jnp.asarray, start.params)
    masks = map_with_path(_trained, params)
    decays = map_with_path(lambda path, x: "norm" not in path and "scale" not in path, params)
    adamw = run.run.optim
    tx = optax.adamw(
        adamw.learning_rate(3), adamw.b1, adamw.b2, adamw.eps, weight_decay=adamw.weight_decay, mask=decays
    )
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes floats with integer step counts
        state = tx.init(params)
        for batch in batches():
            grads = jax.jit(whole.gradients)(params, with_rows(whole.put(batch)), jnp.int32(0), {}).grads
            grads = jax.tree.map(jnp.multiply, grads, masks)
            scale = jnp.minimum(1, 1 / optax.tree.norm(grads))  # the run's `clip_norm` is 1
            grads = jax.tree.map(lambda g, scale=scale: g * scale, grads)
            updates, state = tx.update(grads, state, params)
            params = jax.tree.map(lambda p, u, mask: p + u * mask, params, updates, masks)
    assert largest_difference(jax.device_get(params), on_one_device(model).params) < 1e-10


def _trained(path, x):
    """1 for each row that the freezing of the model leaves, and 0 for the others."""
    if path == "head":
        return jnp.zeros_like(x)
    kept = {"mlp": [0, 0, 1, 0]}.get(path.split(".")[1], [0, 0, 1, 1]) if path.startswith("blocks.") else [1] * len(x)
    return jnp.broadcast_to(jnp.asarray(kept, x.dtype).reshape(-1, *[1] * (x.ndim - 1)), x.shape)


STAGES = {
    "pipe2_fsdp2_tensor2": ("1f1b", {"pipe": 2, "fsdp": 2, "tensor": 2}, ("pipeline", "fsdp", "megatron_sp")),
    "pipe2_zero2": ("zb_h1", {"pipe": 2, "fsdp": 4}, ("pipeline", "zero2")),
    "pipe2_data2_tensor2": ("gpipe", {"pipe": 2, "data": 2, "tensor": 2}, ("pipeline", "megatron")),
}


def in_stages(model, mesh):
    """A pipelined run with a declared reduction, whose permutes run after the stages' operations."""
    kind, sizes, presets = STAGES[mesh]
    parallel = {
        "pipeline": {"kind": kind, "num_microbatches": 4},
        "gradient_reduction": {"algorithm": "ring", "bucket_bytes": "3KiB"},
    }
    rules = AxisRules(preset=presets)
    return prepared(model, None, "manual", 1, mesh=MeshLayout(**sizes), rules=rules, parallel=parallel)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        pytest.param(
            model, mesh, marks=[] if (model, mesh) == ("llama_lora", "pipe2_fsdp2_tensor2") else pytest.mark.slow
        )
        for model in ("llama", "llama_lora", "llama_dora", "llama_frozen")
        for mesh in STAGES
    ],
)
def test_stages_with_a_declared_reduction_are_equal_to_one_device(model, mesh):
    assert outcome(in_stages(model, mesh)).difference(on_one_device(model)) < 1e-10


@pytest.mark.slow
def test_planted_frozen_parameters_that_are_zero_on_the_stages_are_seen(monkeypatch):
    """Each stage computes with zeros in place of its frozen parameters."""
    whole = layers.frozen_in
    monkeypatch.setattr(layers, "frozen_in", lambda *trees: jax.tree.map(jnp.zeros_like, whole(*trees)))
    run = in_stages("llama_lora", "pipe2_fsdp2_tensor2")
    assert outcome(run).difference(on_one_device("llama_lora")) > 1e-3


def test_planted_copies_on_other_stages_that_are_not_summed_are_a_type_error(monkeypatch):
    """The embedding's gradient is computed on the first stage, the head's on the last. JAX's types show the fault."""
    copies = ParallelContext.copy_axes

    def within_stage(self, dims):
        return tuple(tuple(axis for axis in axes if axis != "pipe") for axes in copies(self, dims))

    run = in_stages("llama", "pipe2_fsdp2_tensor2")
    monkeypatch.setattr(ParallelContext, "copy_axes", within_stage)
    with pytest.raises(ValueError, match=r"grads\['embedding'\].*not \{pipe\}"):
        _ = run.traced_bytes


def test_planted_a_thin_product_that_is_summed_too_early_is_seen(monkeypatch):
    """LoRA's product is a partial sum like the kernel's own, and is summed where the region is left."""

    def summed(self, x):
        thin = jnp.tensordot(x, self.a, axes=self.a.ndim - 1)
        axes = tuple(axis for axis in manual_axes("heads") if axis in varies_over(thin))
        thin = varying_like(lax.psum(thin, axes), thin) if axes else thin
        return jnp.tensordot(thin, self.b, axes=1) * jnp.asarray(self.scale, thin.dtype)

    want = on_one_device("llama_lora")
    monkeypatch.setattr(Adapter, "term", summed)
    got = outcome(prepared("llama_lora", LAYOUT, "manual", 4))
    assert got.difference(want) > 1e-4
