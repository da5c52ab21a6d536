"""Every error that meshpar raises on purpose, and how many problems become one error.

A user who has three mistakes in a config, or ten arrays that do not fit a mesh, reads about all of them
at once: code that checks collects `Problem`s in a `Problems` and raises a single error at the end.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field


class MeshparError(Exception):
    """Bad input, as opposed to a bug: the command line prints its text and exits with 2."""


class ConfigError(MeshparError, ValueError):
    """A config file, an override or a value in it is wrong."""


class MeshError(MeshparError, ValueError):
    """The axis sizes do not fit the devices."""


class ShardingError(MeshparError, ValueError):
    """Rules, dims and mesh do not fit each other."""


class ScheduleError(MeshparError, ValueError):
    """A pipeline schedule misses an operation, does one twice, or never ends."""


class DataError(MeshparError, ValueError):
    """There is no data where the config says, or it does not fit the model."""


class CheckpointError(MeshparError, ValueError):
    """A checkpoint cannot be written, or does not fit the model."""


class ProgramError(MeshparError, ValueError):
    """The text of a compiled program could not be read completely."""


class ProofError(MeshparError, ValueError):
    """A training cannot be compared as closely as a proof needs."""


class PlanError(MeshparError, ValueError):
    """The table of a collective deadlocks, or loses a chunk."""


class ContractError(MeshparError, ValueError):
    """A compiled program does what its contract rules out."""


class ContractWarning(UserWarning):
    """A compiled program sends more than the closed form of its presets."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Args:
      where: the place, as the user knows it: `mesh.tensor`, `blocks.attn.q bfloat16[32, 4096]`.
      what: what is wrong there, and why that matters.
      fix: the nearest change that would mend it; empty when none can be named.
    """

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"  {self.where}", f"    {self.what}"]
        return "\n".join(lines + [f"    {self.fix}"] * bool(self.fix))


@dataclass
class Problems:
    """Collects problems; `raise_any` raises them together, or returns when there are none.

    >>> problems = Problems()
    >>> problems.add("mesh.tensor", "3 does not divide 8 devices", "one of 1, 2, 4, 8")
    >>> problems.raise_any(MeshError, "the mesh does not fit 8 devices:")
    Traceback (most recent call last):
        ...
    meshpar.errors.MeshError: the mesh does not fit 8 devices:
      mesh.tensor
        3 does not divide 8 devices
        one of 1, 2, 4, 8
    """

    found: list[Problem] = field(default_factory=list)

    def add(self, where: str, what: str, fix: str = "") -> None:
        self.found.append(Problem(where, what, fix))

    def __len__(self) -> int:
        return len(self.found)

    def raise_any(self, error: type[MeshparError], heading: str) -> None:
        """Raises `error` with `heading` over all problems, in the order in which they were added."""
        if self.found:
            raise error("\n".join([heading, *map(str, self.found)]))


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The valid name that was most likely meant; None if no name is near.

    >>> nearest("tensr", ["data", "tensor"])
    'tensor'
    """
    return next(iter(difflib.get_close_matches(name, sorted(names), n=1)), None)
