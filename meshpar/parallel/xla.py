"""What XLA does otherwise than a reader of the code expects, most of it on CPUs, and what meshpar does about it.

Each function says what happens without it, as seen with jax 0.10.2. Tests plant programs without `in_order`
(`tests/program/test_order.py`, `tests/process/test_xla_order.py`) and without `not_before`
(`tests/program/test_long_context.py`). A program for GPUs or TPUs has only the barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from meshpar.parallel.context import manual, platform
from meshpar.parallel.scopes import run_if

T = TypeVar("T")
UNROLLED_WEIGHTS = 2**17
UNROLLED_LAYERS = 16


def in_order(number: jax.Array, results: Any) -> jax.Array:
    """`number`, integers of any shape, which on CPUs is known only when the first of `results` is.

    XLA:CPU begins the collectives of a program in the same order on every device. But a conditional counts as begun
    while its branch still computes what its collectives send, and a loop while it runs. A later collective that needs
    no result of it may then run first, on some devices only. Equal collectives are told apart by their order alone, so
    devices wait for each other forever, or mix up their data. A later collective waits if what it sends is computed
    from a result of the earlier one; in a conditional, if the condition is.

    Only the manual lowering makes it wait. A barrier orders nothing, and no compiler can know that the minimum is 0.
    """
    leaves = jax.tree.leaves(results)
    if manual() is None or platform() != "cpu" or not leaves:
        return number
    is_negative = leaves[0][(0,) * leaves[0].ndim] < 0
    return number + jnp.minimum(is_negative.astype(number.dtype), 0)


def run_in_order(run: Callable[[Any], Any], carry: Any) -> Any:
    """`run(carry)`, a loop whose collectives on CPUs begin only when the carry is known, see `in_order`.

    The loop stands in a branch that is always taken, whose condition is computed from the carry.
    """
    if platform() != "cpu":
        return run(carry)
    return run_if(in_order(jnp.int32(1), carry) == 1, run, carry, times=(1, 1))


def recomputed(saved_and_grad: T) -> T:
    """What a backward saved, and the gradient that it waits for.

    Without the barrier XLA computes parts of the backward in the forward, where it finds the same operations, and holds
    their results until the gradient is there. XLA:CPU needs `ParallelContext.compiler_options`, too.
    """
    return lax.optimization_barrier(saved_and_grad)


def row_major(values: list[jax.Array]) -> list[jax.Array]:
    """The same values, which XLA:GPU stores in the order of their dims.

    It stores what is gathered or scattered along a later dim with that dim first. Slots in which such values are
    collected get the same order, and to read one of them in a loop, XLA would transpose all slots before the loop.
    """
    if platform() != "gpu":
        return values
    return [with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim)))) for x in values]


def not_before(value: T, result: jax.Array) -> T:
    """`value`, which is computed after `result`, and not before the loop in which `result` is.

    JAX moves what depends on no layer out of the loop over layers, and stores all of it.
    """
    return lax.optimization_barrier((value, result))[0]


def without_copy(values: T) -> T:
    """New parameters, and the old moments of the optimizer, from which XLA:CPU computes them.

    Without the barrier it would copy the moments before it overwrites them.
    """
    return lax.optimization_barrier(values)


def is_unrolled(platform: str | None, weights: int, num_layers: int, recomputes: bool) -> bool:
    """Whether a step is faster without a loop over layers.

    On CPUs a loop copies the parameters of each layer and keeps XLA from fusing layers. The loop stays if layers are so
    small that it costs little, if they are so many that compiling takes long, and with remat, because layers without a
    loop need a tenth more memory. On GPUs and TPUs a loop reads parameters in place, and its program stays small.

    Args:
      weights: of a layer.
      recomputes: whether the backward recomputes activations.
    """
    is_worth_it = weights >= UNROLLED_WEIGHTS and num_layers <= UNROLLED_LAYERS
    return platform == "cpu" and is_worth_it and not recomputes
