"""Complex parameters and activations: the gradient is JAX's, with its imaginary part, on any mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import AdamW, AxisRules, ConfigError, MeshLayout, Parallel, training, verify

SIZE = 8


def init(key):
    real, imaginary, head = (jax.random.normal(k, (SIZE, SIZE)) / 2 for k in jax.random.split(key, 3))
    return {"w": jax.lax.complex(real, imaginary), "head": head}


def loss(params, batch, key):
    """A filter of each row's spectrum; the product with a complex constant is one of a scalar."""
    spectrum = jnp.fft.fft(batch["x"]) * (0.03 + 0.1j)
    return jnp.square(jnp.abs(jnp.sin(spectrum @ params["w"])) @ params["head"]).mean()


def batch(seed):
    return {"x": np.random.default_rng(seed).normal(size=(8, SIZE))}


def adopted(tx=None, **options):
    """ZeRO-3 gathers again in the backward, where JAX's checkpoint cannot save complex numbers."""
    return training(
        init, loss, tx or optax.sgd(0.1), batch(0), mesh=MeshLayout(data=2, fsdp=2).build(jax.devices()[:4]),
        rules=AxisRules(preset="fsdp", unnamed=(), largest=("fsdp",)), compute_dtype=np.dtype("float64"), **options,
    )  # fmt: skip


def test_complex_parameters_are_equal_to_one_device():
    assert verify(adopted(), [batch(seed) for seed in range(2)]).is_equal


def test_a_step_is_that_of_jax_with_the_imaginary_part():
    step, state = adopted().compile_step(), adopted().compile_init()()
    before = jax.device_get(state.params)
    state, metrics = step(state, batch(0))
    grads = jax.grad(loss)(before, batch(0), None)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, before, grads)
    assert np.abs(grads["w"].imag).max() > 1e-2
    assert all(
        np.allclose(a, b, atol=1e-5) for a, b in zip(*map(jax.tree.leaves, (expected, state.params)), strict=True)
    )
    assert np.allclose(step.read(metrics)["grad_norm"], optax.tree.norm(grads), rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"tx": AdamW(lr=1e-3), "num_steps": 8},
        {"master_dtype": np.dtype("float32")},
        {"parallel": Parallel(gradient_reduction={"across": "int8"})},
    ],
    ids=["optimizer", "master copy", "reduction"],
)
def test_an_option_for_real_numbers_is_refused(options):
    with pytest.raises(ConfigError, match=r"w\n    is complex128, and .* is for real numbers"):
        adopted(**options)
