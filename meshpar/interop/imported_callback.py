"""Imports a user's own callback that a config names."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from meshpar.config import Config, Target
from meshpar.errors import ConfigError
from meshpar.interop import user_code


class ImportedCallback(Config):
    """A class with methods such as `on_step_end`, or a function of the state and the step.

    >>> ImportedCallback(target="my_module:Patience", arguments={"steps": 3}).target
    'my_module:Patience'
    """

    shorthand: ClassVar = "target"

    target: Target
    """`package.module:name` of a class with methods such as `on_step_end(state, step, metrics)`; or of a function
    (state, step) -> {name: number}, recorded with each evaluation."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class or of the function."""

    def load(self) -> Any:
        """The object, or the function.

        Raises:
          ConfigError: it cannot be imported, or not be called with these arguments.
        """
        found = user_code.load(self.target)
        if not callable(found):
            raise ConfigError(f"callbacks: {self.target} is {type(found).__name__}, not a class or a function")
        with user_code.blamed(self.target):
            return found(**self.arguments) if isinstance(found, type) else partial(found, **self.arguments)
