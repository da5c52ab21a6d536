"""DoRA: an adapted kernel has the direction of `kernel + update`, and a trained norm for each output.

    V = W + scale * a @ b                     W[inputs, outputs]
    W' = (|W| + magnitude) * V / |V|          norms over the inputs, one for each output

The parameter `magnitude` is the change of the norm. It begins at zero, as b does, so that an adapted model begins as
the model, whatever its weights are; the paper's magnitude is `|W| + magnitude`. The norms count as constants in the
backward, as in section 4.3 of the paper and in PEFT.

Source: Liu et al. 2024, arXiv:2402.09353.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.parallel.precision import wide

TINY = 1e-30
"""The least square of a norm. The outputs of weights that are zero stay zero."""


def norms(kernel: jax.Array, inputs: tuple[int, ...]) -> jax.Array:
    """The norm of each output's weights, in float32 at least.

    >>> norms(jnp.array([[3.0, 0.0], [4.0, 2.0]]), (0,)).tolist()
    [5.0, 2.0]
    """
    return lax.sqrt(_squares(kernel, inputs))


def stretch(kernel: jax.Array, update: jax.Array, magnitude: jax.Array, inputs: tuple[int, ...]) -> jax.Array:
    """What DoRA multiplies each output of `kernel + update` by: [stacked..., outputs...], in float32 at least.

    Args:
      kernel, update: [stacked..., inputs..., outputs...].
      magnitude: [stacked..., outputs...].
      inputs: the indices of the input dims.

    Communication: where the inputs are sharded, all-reduces of two numbers an output.
    """
    own = _squares(kernel, inputs)
    of_sum = lax.max(_squares(wide(kernel) + update, inputs), jnp.asarray(TINY, own.dtype))
    before, after = (lax.stop_gradient(lax.sqrt(one)) for one in (own, of_sum))
    return (before + wide(magnitude)) / after


def adapted(kernel: jax.Array, update: jax.Array, magnitude: jax.Array | None, inputs: tuple[int, ...]) -> jax.Array:
    """The kernel of LoRA, or of DoRA where there are magnitudes, in float32 at least; see `stretch`.

    >>> kernel, change = jnp.array([[3.0, 0.0], [4.0, 2.0]]), jnp.array([[0.0, 2.0], [0.0, -2.0]])
    >>> adapted(kernel, change, jnp.array([5.0, 1.0]), (0,)).tolist()
    [[6.0, 3.0], [8.0, 0.0]]
    """
    whole = wide(kernel) + update
    if magnitude is None:
        return whole
    return whole * jnp.expand_dims(stretch(kernel, update, magnitude, inputs), inputs)


def _squares(kernel: jax.Array, inputs: tuple[int, ...]) -> jax.Array:
    return lax.square(wide(kernel)).sum(inputs)
