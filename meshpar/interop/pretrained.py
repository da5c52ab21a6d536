"""Starts a training from a Hugging Face model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshpar.interop.huggingface import Pretrained
from meshpar.train.state import TrainState
from meshpar.train.training import Training
from meshpar.tree import flatten_with_paths


@dataclass(frozen=True)
class PretrainedBeginning:
    """The first state of a training, with the parameters of a folder. Others, such as LoRA's, are initialized."""

    training: Training
    source: Pretrained

    def state(self) -> TrainState:
        """Reads the parameters, each device its own shards, and initializes the rest."""
        structs = flatten_with_paths(self.training.placement.structs.params)
        params = self.source.params({path: structs[path] for path in self.source.paths})
        return self.training.compile_init(given={f"params.{path}": array for path, array in params.items()})()

    def record(self) -> dict[str, Any]:
        """The entry for the run's records: the source, and which parameters were restored and initialized."""
        taken = [f"params.{path}" for path in self.source.paths]
        made = [f"params.{path}" for path in flatten_with_paths(self.training.specs) if path not in self.source.paths]
        return {"source": str(self.source.folder), "restored": taken, "initialized": made, "ignored": [], "changed": {}}
