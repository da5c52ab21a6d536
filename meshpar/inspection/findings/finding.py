"""A finding, and what the author of a program meant it to do: without the second, nobody can tell the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshpar.tree import matching

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """Something that a program does and that its author hardly meant.

    Args:
      kind: `rematerialization`, `unplanned_gather`, `replication`, `donation_copied` or `reduction_in_loop`.
      what: happens, in a sentence.
      where: `file:line` of the author's code; the path of an argument or output where it is about that.
      num_bytes: what it costs one device in one call: bytes held; of gathers and reductions, bytes sent.
      fix: what to write instead.
    """

    kind: str
    what: str
    where: str
    num_bytes: int
    fix: str

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "kind": self.kind,
            "what": self.what,
            "where": self.where,
            "bytes": self.num_bytes,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Planned:
    """What is meant, so that it is no finding. Arguments go by their dotted paths, such as `state.params.head`.

    Args:
      gathered: path -> the axes over which the parameter is stored, and gathered before use.
      reduced_in_loop: path -> the axes over which its gradient is reduced in each turn of an accumulation.
      whole: globs of arguments that every device is to hold whole.
      dims: path -> names of the dims, for arrays that are placed by rules.

    >>> Planned(gathered={"params.w": ("fsdp",)}, whole=("batch.**",)).is_whole("batch.tokens")
    True
    """

    gathered: Mapping[str, Axes] = field(default_factory=dict)
    reduced_in_loop: Mapping[str, Axes] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    dims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def is_whole(self, path: str) -> bool:
        return any(matching([path], glob) for glob in self.whole)
