"""Looks up a schedule by its name."""

from __future__ import annotations

import os
from typing import get_args

from meshpar.config import build
from meshpar.errors import Problems, ScheduleError, nearest
from meshpar.parallel.pipeline.schedule import Pipeline, Schedule, ScheduleFile

KINDS: dict[str, type[Schedule]] = {cls.model_fields["kind"].default: cls for cls in get_args(get_args(Pipeline)[0])}


def get_schedule(name: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None) -> Schedule:
    """The schedule of this name, or the schedule whose orders are in the file of this name.

    Args:
      num_chunks: the number of chunks of each stage; None for the schedule's default.

    Raises:
      ScheduleError: there is no such schedule or file; or it does not fit the stages, microbatches or chunks.

    >>> get_schedule("zb_h1", 4, 8)
    ZeroBubbleH1(num_microbatches=8, cut=None, kind='zb_h1')
    """
    kind = ScheduleFile if name not in KINDS and os.path.isfile(name) else KINDS.get(name)
    if kind is None:
        near = nearest(name, KINDS)
        hint = f"; did you mean {near}?" if near else ""
        raise ScheduleError(f"no schedule or file is called {name!r}{hint}; the schedules are {', '.join(KINDS)}")
    if num_chunks is not None and "num_chunks" not in kind.model_fields:
        settable = ", ".join(key for key, cls in KINDS.items() if "num_chunks" in cls.model_fields)
        raise ScheduleError(f"{name}: its number of chunks is fixed; it can be set for {settable}")
    settings = {"num_microbatches": num_microbatches, "path": name, "num_chunks": num_chunks}
    settings = {key: value for key, value in settings.items() if key in kind.model_fields and value is not None}
    schedule = build(kind, settings, f"schedule {name}")
    problems = Problems()
    schedule.check(num_stages, problems)
    problems.raise_any(ScheduleError, f"{name} does not fit {num_stages} stages:")
    return schedule
