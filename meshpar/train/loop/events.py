"""Calls the methods of a user's callbacks at the events of a training."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.errors import ConfigError, MeshparError, Problems, RunError, suggestion
from meshpar.progress import say
from meshpar.train.step import Metrics, Step

EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_train_begin": ("state", "step"),
    "on_step_begin": ("step",),
    "on_step_end": ("state", "step", "metrics"),
    "on_evaluation_begin": ("state", "step"),
    "on_evaluation_end": ("state", "step", "metrics"),
    "on_checkpoint": ("step", "folder"),
    "on_exception": ("step", "error"),
    "on_train_end": ("state", "step"),
}
"""Method of a callback -> its arguments."""
ENDING = ("on_step_end", "on_evaluation_end")
"""The events at which a callback may end the run, by returning why."""


@dataclass(frozen=True)
class StepMetrics(Mapping[str, Any]):
    """The metrics of a step, which are read from the devices when the first of them is needed: that waits for the step.

    Numbers are floats, others NumPy arrays.
    """

    step: Step
    metrics: Metrics

    @cached_property
    def _values(self) -> dict[str, Any]:
        found = self.step.read(self.metrics)
        return {name: value if np.ndim(value) else float(value) for name, value in found.items()}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)


@dataclass
class Events:
    """The callbacks of a run that have methods of `EVENTS`.

    Args:
      ends: why a callback ends the run; None while none does.
      unsaved: steps of checkpoints that were started, and not reported yet.
    """

    callbacks: Sequence[Any]
    ends: str | None = None
    unsaved: list[int] = field(default_factory=list)

    def has(self, event: str) -> bool:
        return any(hasattr(callback, event) for callback in self.callbacks)

    def call(self, event: str, *arguments: Any) -> None:
        """Calls the method of each callback that has it, in order. They may move data between host and devices.

        Raises:
          RunError: a method failed; the text names it and the line.
          ConfigError: a method returned what has no meaning.
        """
        step = arguments[EVENTS[event].index("step")]
        for callback in self.callbacks:
            if method := getattr(callback, event, None):
                with jax.transfer_guard("allow"), _blamed(callback, event, step):
                    returned = method(*arguments)
                if returned is None:
                    continue
                if event not in ENDING or not isinstance(returned, str):
                    may = "None, or a text that says why the run ends" if event in ENDING else "None"
                    raise ConfigError(f"{name_of(callback)}.{event} returned {returned!r}; it may return {may}")
                self.ends = self.ends or returned

    def saving(self, step: int) -> None:
        """Notes a checkpoint that was started."""
        if jax.process_index() == 0 and self.has("on_checkpoint"):
            self.unsaved.append(step)

    def saved(self, directory: Path) -> None:
        """Reports the checkpoints that are on disk now."""
        for step in [step for step in self.unsaved if (directory / str(step)).is_dir()]:
            self.unsaved.remove(step)
            self.call("on_checkpoint", step, directory / str(step))

    @contextmanager
    def failing(self, step: Callable[[], int]) -> Iterator[None]:
        """Reports what ends the run early, other than the caller's end of its own loop. It is raised again."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            try:
                self.call("on_exception", step(), error)
            except MeshparError as another:  # the first error is the one to raise
                say(f"meshpar: {another}")
            raise


def events_of(callbacks: Sequence[Any], evaluates: bool) -> tuple[Events, list[Callable[..., Any]]]:
    """The callbacks with methods of `EVENTS`, and those that are functions (state, step) -> metrics of an evaluation.

    Args:
      evaluates: whether the run has rows to evaluate.

    Raises:
      ConfigError: lists every unknown event, every method with other arguments, and everything that is no callback.
    """
    problems = Problems()
    of_events, functions = [], []
    for callback in callbacks:
        found = [name for name in dir(callback) if name.startswith("on_")]
        if isinstance(callback, type):
            what = "is a class, and its methods need an object"
            problems.add(f"callbacks: {callback.__name__}", what, f"{callback.__name__}()")
        elif not found and not callable(callback):
            what = "has no method of an event, and is no function (state, step) -> metrics"
            problems.add(f"callbacks: {name_of(callback)}", what, f"a method: {', '.join(EVENTS)}")
        for name in [] if isinstance(callback, type) else found:
            _check_method(callback, name, problems)
        of_events += [callback] if found else []
        functions += [callback] if callable(callback) else []
    if not evaluates and not functions:
        for callback in of_events:
            for name in ("on_evaluation_begin", "on_evaluation_end"):
                if hasattr(callback, name):
                    problems.add(f"{name_of(callback)}.{name}", "there are no rows to evaluate", "held-out rows")
    problems.raise_any(ConfigError, "these callbacks are wrong:")
    return Events(of_events), functions


def name_of(callback: Any) -> str:
    """The name of a callback's class, or of a function."""
    return getattr(callback, "__qualname__", type(callback).__qualname__)


def _check_method(callback: Any, name: str, problems: Problems) -> None:
    where = f"{name_of(callback)}.{name}"
    method = getattr(callback, name)
    if name not in EVENTS:
        problems.add(where, "there is no such event", suggestion(name, EVENTS, f"there are {', '.join(EVENTS)}"))
    elif not callable(method):
        problems.add(where, f"is {type(method).__name__}, and no method", f"def {name}(self, ...)")
    else:
        arguments = ", ".join(EVENTS[name])
        try:
            inspect.signature(method).bind(*EVENTS[name])
        except TypeError:
            problems.add(where, f"is called with ({arguments})", f"def {name}(self, {arguments})")


@contextmanager
def _blamed(callback: Any, event: str, step: int) -> Iterator[None]:
    """Turns an exception of a callback into one line that names its file and line."""
    try:
        yield
    except MeshparError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = frames[2] if len(frames) > 2 else frames[-1]  # below those of this file: `_blamed` and `call`
        last = [frame for frame in frames if frame.filename == own.filename][-1]
        first = next(iter(str(error).strip().splitlines()), "")
        where = f"{name_of(callback)}.{event} failed at {last.filename}:{last.lineno}"
        raise RunError(f"step {step}: {where}: {type(error).__name__}: {first}") from error
