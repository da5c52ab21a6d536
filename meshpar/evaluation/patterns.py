"""Regular expressions that come with tasks, run for a bounded time: some take exponentially long for some texts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshpar.errors import ConfigError, excerpt

LONGEST_S = 1.0
"""The longest time for one text."""
LONGEST_PATTERN = 10_000
"""The most characters of a pattern."""


@dataclass(frozen=True)
class Pattern:
    """A regular expression as in Python's `re`, by the library `regex`, which can stop.

    Args:
      text: the expression.

    Raises:
      ConfigError: it is no regular expression, too long, or a text takes longer than `LONGEST_S`.

    >>> Pattern("[0-9]+").findall("3 and 14")
    ['3', '14']
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or len(self.text) > LONGEST_PATTERN:
            raise ConfigError(
                f"the pattern {excerpt(str(self.text))} is no text of {LONGEST_PATTERN} characters at most"
            )
        _ = self._compiled

    def findall(self, text: str) -> list[Any]:
        """See `re.findall`."""
        return self._bounded("findall", text)

    def sub(self, replacement: str, text: str, count: int = 0) -> str:
        """See `re.sub`."""
        return self._bounded("sub", replacement, text, count=count)

    def _bounded(self, method: str, *arguments: str, **options: Any) -> Any:
        try:
            return getattr(self._compiled, method)(*arguments, timeout=LONGEST_S, **options)
        except TimeoutError:
            text = arguments[-1]
            what = f"takes longer than {LONGEST_S:g} s for a text of {len(text)} characters"
            raise ConfigError(f"the pattern {excerpt(self.text)} {what}; remove a repetition within another") from None

    @cached_property
    def _compiled(self) -> Any:
        import regex

        try:
            return regex.compile(self.text)
        except regex.error as error:
            raise ConfigError(f"the pattern {excerpt(self.text)} is no regular expression: {error}") from None
