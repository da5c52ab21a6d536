"""Starts a training from a checkpoint: resumes it, or restores some of the arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from meshpar.checkpoint.saved import Checkpoint
from meshpar.checkpoint.selection import EVERYTHING, Selection
from meshpar.config import changed
from meshpar.parallel.context import ParallelContext
from meshpar.train.evaluate import Evaluation
from meshpar.train.resize import averaged, num_slices, with_slices
from meshpar.train.state import TrainState
from meshpar.train.step import Step
from meshpar.tree import flatten_with_paths, map_with_path


class Trainable(Protocol):
    """What a loop trains, such as a `Training`: a first state, a step and an evaluation, before they are compiled."""

    @property
    def ctx(self) -> ParallelContext: ...
    @property
    def structs(self) -> TrainState:
        """The state as `ShapeDtypeStruct`s with shardings."""
        ...

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Path -> names of the dims, of each array of the state that has dims."""
        ...

    def compile_init(self, options: Any = None, given: Any = None) -> Callable[[], TrainState]: ...
    def compile_step(self) -> Step: ...
    def lazy_evaluation(self) -> Evaluation: ...


@dataclass(frozen=True)
class Beginning:
    """The first state of a training, with some or all arrays restored from a checkpoint.

    Args:
      include, exclude: globs of paths in the state to restore, and not to restore.
      config: the config of the run, as JSON data.
      data_changed: the data files that differ from those of the checkpoint.
    """

    training: Trainable
    source: Checkpoint
    include: Sequence[str] = EVERYTHING
    exclude: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    data_changed: Sequence[str] = ()

    @cached_property
    def structs(self) -> TrainState:
        """The state to restore, which may have another number of slices than the training."""
        is_whole = tuple(self.include) == EVERYTHING and not self.exclude
        return saved_structs(self.training, self.source) if is_whole else self.training.structs

    @cached_property
    def selection(self) -> Selection:
        """The arrays to restore. It reads none, so problems are reported before anything is compiled."""
        return self.source.select(self.structs, self.include, self.exclude, self.config)

    def is_resumed(self, directory: Path) -> bool:
        """Whether the source is a checkpoint of the run itself, whose checkpoints are in this folder."""
        return self.source.folder.parent == directory

    def state(self) -> TrainState:
        """Restores the selected arrays, and initializes the rest.

        The optimizer's state is initialized from the restored parameters, so that its copies of them are equal.
        """
        selection = self.selection
        restored = self.source.restore(self.structs, self.include, self.exclude)
        if self.structs != self.training.structs:
            return averaged(restored, self.training.structs)
        if not selection.initialized:
            return restored
        arrays = {path: x for path, x in flatten_with_paths(restored).items() if path in set(selection.restored)}
        params = {path: arrays.pop(path) for path in selection.restored if path.startswith("params.")}
        state = self.training.compile_init(given=params)()
        return map_with_path(lambda path, x: arrays.get(path, x), state)

    def record(self) -> dict[str, Any]:
        """The entry for the run's records: the source, the restored arrays, and the config keys that changed."""
        selection = self.selection
        data = {"data_changed": list(self.data_changed)} if self.data_changed else {}
        return data | {
            "source": str(self.source.folder),
            "restored": selection.restored,
            "initialized": selection.initialized,
            "ignored": selection.ignored,
            "changed": changed(self.source.meta["config"], self.config),
        }


def saved_structs(training: Trainable, source: Checkpoint) -> TrainState:
    """The state that a training expects in a checkpoint.

    It has the training's number of slices, or that of the checkpoint if `parallel.local.resize` averages them.
    """
    structs = training.structs
    local = training.ctx.local
    num = num_slices(source) if local and local.resize == "average" else None
    return with_slices(structs, num) if num and num != structs.skipped.shape[0] else structs
