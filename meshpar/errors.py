"""The errors that meshpar raises on purpose, and how several problems become one error.

A user with three mistakes in a config, or ten arrays that do not fit a mesh, reads about all of them at once: code that
checks collects `Problem`s in a `Problems`, and raises a single error at the end.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from meshpar.synonyms import meant

MAX_PROBLEMS = 100
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class MeshparError(Exception):
    """Bad input, as opposed to a bug: the command line prints the text and exits with 2."""

    exit_code: ClassVar[int] = 2


class RunError(MeshparError, RuntimeError):
    """A run failed after it started: the disk was full, the data ended early, or the steps were not finite."""

    exit_code = 1


class ConfigError(MeshparError, ValueError):
    """A config file, an override or a value in it is wrong."""


class MeshError(MeshparError, ValueError):
    """The axis sizes do not fit the devices."""


class ShardingError(MeshparError, ValueError):
    """Rules, dims and mesh do not fit each other."""


class ScheduleError(MeshparError, ValueError):
    """A pipeline schedule misses an operation, does one twice, or never ends."""


class DataError(MeshparError, ValueError):
    """The data is not where the config says, or it does not fit the model."""


class CheckpointError(MeshparError, ValueError):
    """A checkpoint cannot be written, or does not fit the model."""


class DamagedError(CheckpointError):
    """A file of a checkpoint differs from what was written."""


class DamagedWarning(UserWarning):
    """The latest checkpoint is damaged, and an earlier one is used instead."""


class ProgramError(MeshparError, ValueError):
    """The text of a compiled program could not be read completely."""


class VerificationError(MeshparError, ValueError):
    """A training run cannot be compared with one device in float64, as a proof requires."""


class PlanError(MeshparError, ValueError):
    """The table of a collective deadlocks, or loses a chunk."""


class ContractError(MeshparError, ValueError):
    """A compiled program does something that its contract forbids."""


class ContractWarning(UserWarning):
    """A compiled program sends more than the traced one says."""


class DataWarning(UserWarning):
    """A damaged token cache is built again; or a run resumes with other data, as the user requested."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Args:
      where: the place, as the user knows it: `mesh.tensor`, `blocks.attn.q bfloat16[32, 4096]`.
      what: what is wrong there, and why that matters.
      fix: the smallest change that would fix it; empty if none is known.
    """

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"  {printable(self.where, keep='')}", f"    {self.what}"]
        if self.fix:
            lines.append(f"    {self.fix}")
        return "\n".join(lines)


@dataclass
class Problems:
    """Collects problems; `raise_any` raises them together, or returns if there are none.

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

    def extend(self, others: Problems, prefix: str) -> None:
        """Adds others, whose places are below `prefix`."""
        self.found += [replace(one, where=f"{prefix}{one.where}") for one in others.found]

    def __len__(self) -> int:
        return len(self.found)

    def raise_any(self, error: type[MeshparError], heading: str) -> None:
        """Raises `error` with `heading` above the problems, in the order in which they were added."""
        if not self.found:
            return
        lines = [heading, *map(str, self.found[:MAX_PROBLEMS])]
        if len(self.found) > MAX_PROBLEMS:
            lines.append(f"  ... and {len(self.found) - MAX_PROBLEMS} more")
        raise error("\n".join(lines))


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The valid name that was most likely meant by a typo or by another framework's name; None if none is near.

    >>> nearest("tensr", ["data", "tensor"]), nearest("tp", ["data", "tensor"])
    ('tensor', 'tensor')
    """
    names = sorted(names)
    name = name[:200]
    if word := meant(name, names):
        return word
    if close := difflib.get_close_matches(name, names, n=1):
        return close[0]
    lower = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    return lower[close[0]] if close else None


def suggestion(name: str, names: Iterable[str], otherwise: str) -> str:
    """The fix for an unknown name: the nearest of the valid names, or another fix if none is near.

    >>> suggestion("tensr", ["data", "tensor"], "there are data, tensor")
    'did you mean tensor?'
    """
    near = nearest(name, names)
    return f"did you mean {near}?" if near else otherwise


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with control characters, which a terminal would obey instead of showing, as escapes.

    >>> print(printable("\x1b]0;owned\a"))
    \\x1b]0;owned\\x07
    """
    shown = (c if c.isprintable() or c in keep else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return "".join(shown)


def control_character(text: str) -> str | None:
    """The first character of a name or a path that would end a line, command a terminal or reorder a text, as its
    escape; None if there is none. Such a name could become a line of its own in a script or a log.

    >>> control_character("run/x\\ntouch FILE #"), control_character("Läufe 1/\u200dz"), control_character("\\x1b[2J")
    ('\\\\n', None, '\\\\x1b')
    """
    found = _CONTROL.search(text)
    return found and printable(found.group(), keep="")


def excerpt(text: str, length: int = 80) -> str:
    """The text, cut off after `length` characters.

    >>> excerpt("9" * 5000, 10)
    '9999999999... (5000 characters)'
    """
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"
