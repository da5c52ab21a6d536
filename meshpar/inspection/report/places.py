"""The places in the code that communicate: what stands in one line of the text, and in one row of the page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Protocol


class Communication(Protocol):
    """A collective as a program's text tells it, or as plain data does; the attributes are those of `Collective`."""

    @property
    def kind(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...] | None: ...
    @property
    def times(self) -> int: ...
    @property
    def branches(self) -> tuple[str, ...]: ...
    @property
    def arrays(self) -> Sequence[object]: ...
    @property
    def tensors(self) -> tuple[str, ...]: ...
    @property
    def sent_bytes(self) -> Fraction | float: ...
    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class Place:
    """All collectives of one kind, over the same axes, from one line of code.

    Args:
      axes: as `fsdp, tensor`.
      in_branch: whether they run only if a conditional takes their branch.
      times: how often they run together.
      sent_bytes: that a device sends in all of them.
      names: their tensors, the one that sends most first; of activations, the shapes.
    """

    kind: str
    axes: str
    source: str
    in_branch: bool
    times: int
    sent_bytes: float
    names: tuple[str, ...]

    @property
    def what(self) -> str:
        """The first of the names, and how many there are besides."""
        return ", ".join(self.names[:1]) + (f" and {len(self.names) - 1} more" if len(self.names) > 1 else "")


def places(found: Iterable[Communication]) -> list[Place]:
    """The places of collectives, most bytes first."""
    where = lambda one: (one.kind, axes_name(one.axes), one.source, bool(one.branches))
    groups = ((key, list(group)) for key, group in groupby(sorted(found, key=where), where))
    made = [Place(*key, sum(one.times for one in group), _sent(group), _names(group)) for key, group in groups]
    return sorted(made, key=lambda place: place.sent_bytes, reverse=True)


def axes_name(axes: tuple[str, ...] | None) -> str:
    """`fsdp, tensor`; axes are unknown where no mesh names them."""
    return "unknown axes" if axes is None else ", ".join(axes) or "none"


def short_source(source: str) -> str:
    """The file as seen from here, or by its last two names."""
    here = os.getcwd() + os.sep
    return source.removeprefix(here) if source.startswith(here) else "/".join(source.split("/")[-2:])


def _sent(group: list[Communication]) -> float:
    return float(sum(one.times * one.sent_bytes for one in group))


def _names(group: list[Communication]) -> tuple[str, ...]:
    group = sorted(group, key=lambda one: one.times * one.sent_bytes, reverse=True)
    tensors = dict.fromkeys(tensor for one in group for tensor in one.tensors)
    return tuple(tensors or dict.fromkeys(str(array) for one in group for array in one.arrays))
