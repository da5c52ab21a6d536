"""How a training begins with a model of Hugging Face's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshpar.interop.huggingface import Pretrained
from meshpar.train.state import TrainState
from meshpar.train.training import Training
from meshpar.tree import flatten_with_paths


@dataclass(frozen=True)
class PretrainedBeginning:
    """The first state of a training whose parameters are read, and those drawn that the folder has not: LoRA's."""

    training: Training
    source: Pretrained

    def state(self) -> TrainState:
        """Reads the parameters, each device its own shards, and makes the rest."""
        placed = flatten_with_paths(self.training.placement.structs.params)
        read = self.source.params({path: placed[path] for path in self.source.paths})
        return self.training.compile_init(given={f"params.{path}": array for path, array in read.items()})()

    def record(self) -> dict[str, Any]:
        """For the run's records: what was taken from where."""
        taken = [f"params.{path}" for path in self.source.paths]
        made = [f"params.{path}" for path in flatten_with_paths(self.training.specs) if path not in self.source.paths]
        return {"source": str(self.source.folder), "taken": taken, "made": made, "unused": [], "changed": {}}
