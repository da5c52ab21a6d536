"""How a training begins: with parameters that are drawn, with some of a checkpoint, or where its last one left it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from meshpar.checkpoint.saved import Saved
from meshpar.checkpoint.selection import EVERYTHING, Selection
from meshpar.config import changed
from meshpar.train.state import TrainState
from meshpar.train.training import Training
from meshpar.tree import flatten_with_paths, map_with_path


@dataclass(frozen=True)
class Beginning:
    """The first state of a training, some or all of it from a checkpoint.

    Args:
      take, leave: globs of paths of the state.
      config: of the run, as JSON data.
      data_changed: the files of the data that are not those of the checkpoint.
    """

    training: Training
    source: Saved
    take: Sequence[str] = EVERYTHING
    leave: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    data_changed: Sequence[str] = ()

    @cached_property
    def selection(self) -> Selection:
        """What is taken. Reads no array, so that what does not fit is told before anything is compiled."""
        return self.source.select(self.training.placement.structs, self.take, self.leave, self.config)

    def state(self) -> TrainState:
        """Restores what is taken, and makes the rest.

        The optimizer's state is made of the parameters that were taken: copies that it keeps of them are theirs.
        """
        structs, selection = self.training.placement.structs, self.selection
        restored = self.source.restore(structs, self.take, self.leave)
        if not selection.made:
            return restored
        taken = {path: x for path, x in flatten_with_paths(restored).items() if path in set(selection.taken)}
        given = {path: taken.pop(path) for path in selection.taken if path.startswith("params.")}
        made = self.training.compile_init(given=given)()
        return map_with_path(lambda path, x: taken.get(path, x), made)

    def record(self) -> dict[str, Any]:
        """For the run's records: what was taken from where, and which keys of the config have changed."""
        selection = self.selection
        data = {"data_changed": list(self.data_changed)} if self.data_changed else {}
        return data | {
            "source": str(self.source.folder),
            "taken": selection.taken,
            "made": selection.made,
            "unused": selection.unused,
            "changed": changed(self.source.meta["config"], self.config),
        }
