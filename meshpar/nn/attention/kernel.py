"""The base class of attention cores that are kernels for one kind of device."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import jax

from meshpar.config import Config
from meshpar.errors import ConfigError, Problems
from meshpar.nn.attention.blocks import Blocks
from meshpar.nn.attention.core import Core, Window
from meshpar.nn.attention.setting import Setting, of_arrays


class Kernel(Config):
    """A core that runs on one kind of device, within limits. `blocks` gives the same result without limits."""

    kind: str
    device: ClassVar[str]
    """The device that it runs on, such as `TPU`."""

    @abstractmethod
    def limits(self, setting: Setting) -> list[str]:
        """The reasons why the kernel cannot compute this setting; empty if it can.

        Each reason is the rest of a sentence that begins with the kernel's name.
        """

    @abstractmethod
    def describe(self, setting: Setting) -> str:
        """Says which scores it computes for a row."""

    @abstractmethod
    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, window: Window) -> jax.Array:
        """See `Core`."""

    def reference(self, seq_len: int, small_seq_len: int) -> Blocks:
        """Returns the core for a small copy of a run, which computes on CPUs in float64."""
        return Blocks().reference(seq_len, small_seq_len)

    def check(self, setting: Setting, problems: Problems) -> None:
        """Reports every limit that does not hold."""
        for why in self.limits(setting):
            problems.add(f"model.attention = {self.kind}", f"{self.kind} {why}", "model.attention=blocks")

    def require(self, setting: Setting) -> None:
        """Raises ConfigError with every limit that does not hold."""
        problems = Problems()
        self.check(setting, problems)
        problems.raise_any(ConfigError, "this attention is beyond the limits of its kernel:")


def for_prompts(core: Core, q: jax.Array, window: Window) -> Core:
    """Returns `blocks` if the core is a kernel beyond its limits, so that a model generates on any device."""
    if isinstance(core, Kernel) and core.limits(of_arrays(q, None, window)):
        return Blocks()
    return core
