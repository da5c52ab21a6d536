"""LoRA on codes: equal to LoRA on the kernels that the codes stand for, and on a mesh to one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.models import Llama
from meshpar.nn import quantized_kernel
from meshpar.nn.compressed import dequantized
from meshpar.nn.lora import is_lora
from meshpar.train.program import with_rows
from meshpar.tree import flatten_with_paths, map_with_path
from tests.comparison import largest_difference
from tests.equivalence.conftest import batches, prepared

CODES: dict[str, dict[str, Any]] = {
    "int8": {"kind": "int8", "group": 4},
    "int4": {"kind": "int4", "group": 4},
    "nf4": {"kind": "nf4", "group": 4, "double": True},
}
LAYOUTS = ["data2_fsdp2_tensor2", "tensor4_sp"]


def gradients(model: Llama, layout: str | None, lowering: str, params: Any = None) -> tuple[Any, Any]:
    """The loss and the gradients of a model with DoRA, whose norms are those of the codes, and its parameters."""
    run = prepared("llama_dora", layout, lowering, 1, fields={"weights": model.weights})
    placed = run.placement.structs.params
    if params is None:
        rng = np.random.default_rng(3)
        params = jax.device_get(run.compile_init()().params)
        params = map_with_path(lambda path, x: rng.normal(size=x.shape) / 4 if is_lora(path) else x, params)
    on_mesh = map_with_path(lambda path, s: jax.device_put(flatten_with_paths(params)[path], s.sharding), placed)
    batch = with_rows(run.put(batches()[0]))
    found = jax.jit(run.gradients)(on_mesh, batch, jnp.int32(0), {})
    return jax.device_get({"loss": found.loss, "grads": found.grads}), params


def of_floats(model: Llama, params: Any) -> Any:
    """The same of the model whose kernels are those that the codes stand for, on one device."""
    plain = dequantized(model.abstract(), jax.tree.map(jnp.asarray, flatten_with_paths(params)))
    found, _ = gradients(model.model_copy(update={"weights": None}), None, "auto", _nested(plain))
    return found


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, x in flat.items():
        *parents, last = path.split(".")
        at = nested
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = x
    return nested


def model_of(kind: str) -> Llama:
    plain = prepared("llama_lora", None, "auto", 1).run.model
    return type(plain).model_validate(plain.model_dump() | {"weights": CODES[kind]})


@pytest.mark.parametrize(
    ("kind", "layout", "lowering"),
    [
        pytest.param(kind, layout, lowering, marks=[] if (kind, layout) == ("nf4", LAYOUTS[0]) else pytest.mark.slow)
        for kind in CODES
        for layout in LAYOUTS
        for lowering in ("manual", "auto")
        if (kind, layout, lowering) != ("nf4", LAYOUTS[0], "auto")
    ],
)
def test_gradients_are_those_of_the_kernels_that_the_codes_stand_for(kind, layout, lowering):
    model = model_of(kind)
    _, params = gradients(model, None, "auto")
    got, _ = gradients(model, layout, lowering, params)
    assert all(map(is_lora, flatten_with_paths(got["grads"])))
    assert largest_difference(got, of_floats(model, params)) < 1e-10


def test_planted_scales_of_another_output_are_seen(monkeypatch):
    """A device that used the steps of other outputs would compute with other kernels."""
    model = model_of("nf4")
    _, params = gradients(model, None, "auto")
    want = of_floats(model, params)
    scales = quantized_kernel._scales

    def rolled(stored, *of):
        steps = {"steps": jnp.roll(stored["steps"], 1, -1)} if "steps" in stored else {}
        return scales({**stored, **steps}, *of)

    monkeypatch.setattr(quantized_kernel, "_scales", rolled)
    got, _ = gradients(model, None, "auto", params)
    assert largest_difference(got, want) > 1e-4


def test_a_device_stores_the_bytes_of_the_closed_form():
    """With fsdp 2 and tensor 2, a quarter of: half a byte a weight, one a group, two floats an output."""
    run = prepared("llama_lora", LAYOUTS[0], "manual", 1, fields={"weights": model_of("nf4").weights})
    placed = flatten_with_paths(run.placement.params)
    for name, inputs, outputs in (("attn.q", 16, 16), ("attn.o", 16, 16), ("mlp.up", 16, 32), ("mlp.down", 32, 16)):
        of_kernel = {path: one for path, one in placed.items() if path.startswith(f"blocks.{name}.kernel.")}
        size = inputs * outputs
        floats = {path: one.local_bytes for path, one in of_kernel.items() if path.endswith(("steps", "means"))}
        assert sum(floats.values()) == 2 * 8 * 2 * outputs // 2  # outputs are over tensor, or embed over fsdp
        codes = sum(one.local_bytes for path, one in of_kernel.items() if path not in floats)
        assert codes == 2 * (size // 2 + size // 4) // 4
    held = {path for path in flatten_with_paths(run.placement.opt_state) if not is_lora(path)}
    assert not any("kernel" in path for path in held)
