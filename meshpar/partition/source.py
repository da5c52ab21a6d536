"""The line of the user's code that an operation of a traced program stands for.

This file depends on JAX's internals: `jax._src.source_info_util`, which has no public counterpart.
"""

from __future__ import annotations

import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jax._src import source_info_util

_LIBRARIES = {"site-packages", "meshpar"}


@dataclass(frozen=True)
class Source:
    """An operation of the user's program.

    Args:
      name: of the primitive.
      info: JAX's record of where it was traced; None for an operation that no line stands for.
      caller: the function that it is in, where that is known.
    """

    name: str
    info: Any = None
    caller: Source | None = None

    @classmethod
    def of(cls, eqn: Any, caller: Source | None = None) -> Source:
        return cls(eqn.primitive.name, eqn.source_info, caller)

    @property
    def line(self) -> str:
        """File, line and function of the user's own code, outside of libraries, that called the operation."""
        if own := self._own:
            frame = _frame(own)
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
        outermost = self
        while outermost.caller is not None:
            outermost = outermost.caller
        found = source_info_util.summarize(outermost.info) if outermost.info is not None else ""
        return found.strip() or "a line that JAX does not name"

    def naming(self) -> AbstractContextManager[Any]:
        """Gives what is traced inside the `with` block this line and the scopes of the user's program."""
        if self.info is None:
            return nullcontext()
        name_stack = source_info_util.current_name_stack() + self.info.name_stack
        return source_info_util.user_context((self._own or self.info).traceback, name_stack=name_stack)

    @cached_property
    def _own(self) -> Any:
        """JAX's record of the operation; where no line of the user's is in it, that of the function around it."""
        if _frame(self.info) is not None:
            return self.info
        return self.caller._own if self.caller is not None else None


def _frame(info: Any) -> Any:
    """The innermost frame of the user's own code, outside of libraries; None if there is none."""
    frames = source_info_util.user_frames(info.traceback) if info is not None else []
    return next((frame for frame in frames if not _LIBRARIES & {*Path(frame.file_name).parts}), None)


def line_of(error: BaseException) -> str:
    """File, line and function of the user's own code that raised an error; "" if none did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _LIBRARIES & {*Path(frame.filename).parts}]
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].name})" if own else ""
