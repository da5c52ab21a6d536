"""A finding about a compiled program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Something that a compiled program does and that its author probably did not intend; see `inspect`.

    Args:
      kind: `rematerialization`, `unplanned_gather`, `replication`, `donation_copied` or `reduction_in_loop`.
      what: the problem, in a sentence.
      where: `file:line` of the author's code, or the path of an argument or output.
      num_bytes: the cost on one device in one call: bytes held, or bytes sent by gathers and reductions.
      fix: the proposed change.
    """

    kind: str
    what: str
    where: str
    num_bytes: int
    fix: str

    def as_json(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {"kind": self.kind, "what": self.what, "where": self.where, "bytes": self.num_bytes, "fix": self.fix}
