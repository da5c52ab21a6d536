"""LoRA and frozen parameters: equal to one device; a planted fault is seen; and what is frozen stays as it was."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshpar.nn.layers import LowRank
from meshpar.nn.lora import is_lora
from meshpar.parallel.context import manual_axes
from meshpar.parallel.local import varies_over, varying_like
from meshpar.tree import flatten_with_paths
from tests.equivalence.conftest import on_one_device, outcome, prepared

LAYOUT = "data2_fsdp2_tensor2"


def test_lora_is_equal_to_one_device_and_changes_only_its_own_parameters():
    run, want = prepared("llama_lora", LAYOUT, "manual", 4), on_one_device("llama_lora")
    got = outcome(run)
    assert got.difference(want) < 1e-10
    assert all(map(is_lora, flatten_with_paths(got.gradients)))
    first = flatten_with_paths(jax.device_get(run.compile_init()().params))
    for path, array in flatten_with_paths(got.params).items():
        assert np.array_equal(array, first[path]) != is_lora(path), path


@pytest.mark.slow
def test_lora_under_gspmd_is_equal_to_one_device():
    assert outcome(prepared("llama_lora", LAYOUT, "auto", 4)).difference(on_one_device("llama_lora")) < 1e-10


def test_a_thin_product_that_is_summed_too_early_is_seen(monkeypatch):
    """LoRA's is as much a partial sum as the kernel's own product: it is summed where the region is left."""

    def summed(self, x):
        thin = jnp.tensordot(x, self.a[...], axes=self.num_inputs)
        axes = tuple(axis for axis in manual_axes("heads") if axis in varies_over(thin))
        thin = varying_like(lax.psum(thin, axes), thin) if axes else thin
        return jnp.tensordot(thin, self.b[...], axes=1) * jnp.asarray(self.scale, x.dtype)

    want = on_one_device("llama_lora")
    monkeypatch.setattr(LowRank, "__call__", summed)
    got = outcome(prepared("llama_lora", LAYOUT, "manual", 4))
    assert got.difference(want) > 1e-4
