"""Numbers that wait for a result, so that XLA:CPU runs the collectives of conditionals and loops in one order.

XLA:CPU begins the collectives of a program in the same order on every device. But a conditional counts as begun while
its branch still computes what its collectives send, and a loop while it runs. A later collective that needs no result
of it may then run first, on some devices only. Equal collectives are told apart by their order alone, so devices wait
for each other forever, or mix up their data. A later collective waits if what it sends is computed from a result of the
earlier one; in a conditional, if the condition is. Other backends run collectives in the program's order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshpar.parallel.context import manual, platform


def after(number: jax.Array, results: Any) -> jax.Array:
    """`number`, integers of any shape, which on CPUs is known only when the first of `results` is.

    Only the manual lowering makes it wait. No compiler can know that the minimum is 0.
    """
    leaves = jax.tree.leaves(results)
    if manual() is None or platform() != "cpu" or not leaves:
        return number
    is_negative = leaves[0][(0,) * leaves[0].ndim] < 0
    return number + jnp.minimum(is_negative.astype(number.dtype), 0)
