"""Starts a training from a Hugging Face model, and keeps the files of the model beside its checkpoints."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshpar.checkpoint.saved import find
from meshpar.errors import CheckpointError, ConfigError
from meshpar.interop.folder import MODEL_FILES
from meshpar.interop.huggingface import Pretrained
from meshpar.interop.peft import files_of
from meshpar.train.data.tokenizer import Bytes, Tokenizer
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


def model_files(from_hf: Path | None, from_checkpoint: Path | None, run_dir: Path) -> Path | None:
    """The folder with the config, the tokenizer and the templates of a run's model: its own, or that of its `init`."""
    folders = [run_dir / MODEL_FILES]
    if from_hf:
        folders.append(files_of(from_hf) if from_hf.is_dir() else from_hf)
    elif from_checkpoint:
        with suppress(CheckpointError):  # a run that resumes does not need its source any more
            folders.append(find(from_checkpoint, include=()).folder.parents[1] / MODEL_FILES)
    return next((folder for folder in folders if folder.is_dir()), None)


def check_ids(folder: Path, tokenizer: Tokenizer) -> None:
    """Checks that data are not encoded as bytes if the model in the folder has a tokenizer.

    Raises:
      ConfigError: they are: the ids of bytes are other ids than those of the model.
    """
    if isinstance(tokenizer, Bytes) and (folder / "tokenizer.json").is_file():
        what = f"bytes are not the ids of the model, whose tokenizer is in {folder}"
        raise ConfigError(f"data.tokenizer: {what}; data.tokenizer={folder / 'tokenizer.json'}")
