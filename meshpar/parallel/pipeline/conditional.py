"""Conditionals of a stage, which say how often their branches run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def run_if(
    condition: jax.Array, change: Callable[..., Any], changed: Any, *args: Any, taken: tuple[int, int], stages: int = 1
) -> Any:
    """`change(changed, *args)` if the condition holds, else `changed`, without a copy.

    Args:
      taken: (how often the condition holds, out of how many times), on a stage where it can hold.
      stages: the condition can hold on one of this many stages.
    """
    times, of = taken
    with taken_scope(times, of=of, stages=stages):
        return lax.cond(condition, change, lambda changed, *_: changed, changed, *args)


def taken_scope(*times: int, of: int, stages: int = 1) -> Any:
    """A named scope that records how often the branches of a conditional run. `meshpar.cost` reads it.

    Args:
      times: a number for each branch, or one number for all.
      stages: only one of this many stages takes the branches.
    """
    on = f"on_1_of_{stages}_stages/" if stages > 1 else ""
    return jax.named_scope(f"{on}taken_{'_'.join(map(str, times))}_of_{of}")
