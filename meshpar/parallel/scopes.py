"""Named scopes that state what those who count operations cannot see: how often a part runs, and what of it is needed.

XLA keeps the names in its instructions, so the same functions read them from a traced and from a compiled program.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any

import jax
from jax import lax

_TAKEN = re.compile(r"(?:on_1_of_(?P<stages>\d+)_stages/)?taken_(?P<times>\d+(?:_\d+)*)_of_(?P<of>\d+)\)*(?:/cond)?$")
_RUNS = re.compile(r"runs_(\d+)_times(?:/while)?$")
_NEEDED = re.compile(r"needed_(\d+)_of_(\d+)")
_DECLARED = re.compile(r"declares_(\d+)_flops")


def taken(*times: int, of: int, stages: int = 1) -> AbstractContextManager[Any]:
    """A scope for a conditional: how often its branches run.

    Args:
      times: a number for each branch, or one number for all.
      of: how often the conditional runs.
      stages: only one of this many stages takes the branches.
    """
    on = f"on_1_of_{stages}_stages/" if stages > 1 else ""
    return jax.named_scope(f"{on}taken_{'_'.join(map(str, times))}_of_{of}")


def times_of_branches(scope: str, mean: bool = False) -> list[Fraction] | None:
    """How often each branch of a conditional runs, or one number for all of them; None if its scope says nothing.

    Args:
      scope: the scope of the conditional, or the name of its instruction.
      mean: whether to return the mean of all stages of a pipeline; else that of a stage that takes the branches.
    """
    found = _TAKEN.search(scope)
    if not found:
        return None
    of = int(found["of"]) * (int(found["stages"]) if mean and found["stages"] else 1)
    return [Fraction(int(times), of) for times in found["times"].split("_")]


def run_if(
    condition: jax.Array, change: Callable[..., Any], changed: Any, *args: Any, times: tuple[int, int], stages: int = 1
) -> Any:
    """`change(changed, *args)` if the condition holds, else `changed`, without a copy.

    Args:
      times: (how often the condition holds, out of how many times), on a stage where it can hold.
      stages: the condition can hold on one of this many stages.
    """
    holds, of = times
    with taken(holds, of=of, stages=stages):
        return lax.cond(condition, change, lambda changed, *_: changed, changed, *args)


def runs(times: int) -> AbstractContextManager[Any]:
    """A scope for a loop whose length depends on data: how often it is expected to run."""
    return jax.named_scope(f"runs_{times}_times")


def times_of_loop(scope: str) -> int | None:
    """How often a loop over data is expected to run; None if its scope says nothing."""
    found = _RUNS.search(scope)
    return int(found[1]) if found else None


def needed(part: Fraction) -> AbstractContextManager[Any]:
    """A scope for products of which a model needs only a part, as causal attention needs half of all scores."""
    return jax.named_scope(f"needed_{part.numerator}_of_{part.denominator}")


def needed_part(scope: str) -> Fraction:
    """The part of a product that a model needs: all of it if no scope around it says otherwise."""
    found = _NEEDED.search(scope)
    return Fraction(int(found[1]), int(found[2])) if found else Fraction(1)


def declared(num_flops: int) -> AbstractContextManager[Any]:
    """A scope that declares the operations of a kernel on one device, for a kernel that skips cells of its grid."""
    return jax.named_scope(f"declares_{num_flops}_flops")


def declared_flops(scope: str) -> int | None:
    """The operations that a kernel declares; None if it declares none."""
    found = _DECLARED.search(scope)
    return int(found[1]) if found else None
