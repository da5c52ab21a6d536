"""The line of the user's code that an operation of a traced program stands for.

This file depends on JAX's internals: `jax._src.source_info_util`, which has no public counterpart.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from jax._src import source_info_util


@dataclass(frozen=True)
class Source:
    """An operation of the user's program.

    Args:
      name: of the primitive.
      info: JAX's record of where it was traced; None for an operation that no line stands for.
    """

    name: str
    info: Any = None

    @classmethod
    def of(cls, eqn: Any) -> Source:
        return cls(eqn.primitive.name, eqn.source_info)

    @property
    def line(self) -> str:
        """File, line and function, outside of JAX and Flax."""
        return source_info_util.summarize(self.info) if self.info is not None else "unknown"

    def naming(self) -> AbstractContextManager[Any]:
        """Gives what is traced inside the `with` block this line and the scopes of the user's program."""
        if self.info is None:
            return nullcontext()
        name_stack = source_info_util.current_name_stack() + self.info.name_stack
        return source_info_util.user_context(self.info.traceback, name_stack=name_stack)
