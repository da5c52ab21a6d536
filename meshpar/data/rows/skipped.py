"""Counts the rows that are left out because their content is damaged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshpar.progress import say

MOST_NAMED = 10


@dataclass
class Skipped:
    """The rows that this process left out.

    Args:
      count: how many, each time that one was read.
      named: what is wrong with the first ones; each is said once.
    """

    count: int = 0
    named: set[str] = field(default_factory=set)

    def add(self, wrong: Iterable[str]) -> None:
        """Adds rows by what is wrong with them."""
        for what in wrong:
            self.count += 1
            if what not in self.named and len(self.named) < MOST_NAMED:
                self.named.add(what)
                say(f"meshpar: skips a corrupt row: {what}")
