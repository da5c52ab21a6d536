"""Where a model to generate from comes from: a run, by its config or by its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshpar import config
from meshpar.checkpoint.saved import META, Saved, find
from meshpar.errors import CheckpointError, ConfigError
from meshpar.nn.transformer import Decoder
from meshpar.run import Run
from meshpar.serve.decoding import for_tokens
from meshpar.sharding.constrain import Lowering
from meshpar.sharding.resolve import AnyMesh
from meshpar.train.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Source:
    """A trained model, and where it is to run.

    Args:
      run: whose model, mesh, rules, lowering and precision are meant.
      restore: structs with shardings -> the parameters.

    Raises:
      ConfigError: the model is of the user's own.
    """

    run: Run
    restore: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not isinstance(self.run.model, Decoder):
            what = "only meshpar's own decoders keep keys and values of tokens"
            raise ConfigError(f"model.kind = {self.run.model.kind}: {what}")

    @property
    def model(self) -> Decoder:
        return self.run.model  # pyright: ignore

    @property
    def tokenizer(self) -> Tokenizer:
        return self.run.data.tokenizer

    def how(self, mesh: AnyMesh) -> Lowering:
        """The run's lowering, as far as it makes sense for single tokens."""
        run = self.run
        return for_tokens(Lowering(mesh, run.rules, run.lowering == "manual", np.dtype(run.precision.compute)))


def open_source(path: Path, overrides: Sequence[str] = ()) -> Source:
    """A run's model, by its config, by the folder that it wrote, or by that of one of its checkpoints.

    Raises:
      ConfigError, CheckpointError: there is no model, or it was not trained.
    """
    if not path.is_dir():
        return of_run(config.load(Run, path, overrides), f"meshpar train {path}")
    if (path / "config.json").is_file():
        raise ConfigError(f"{path} is a Hugging Face model: only runs of meshpar can be generated from")
    saved = find(path)
    return _of_checkpoint(saved, config.build(Run, saved.meta["config"], str(saved.folder / META), overrides))


def of_run(run: Run, train: str = "train it first") -> Source:
    """The model of the latest checkpoint that a run wrote."""
    try:
        return _of_checkpoint(find(run.run_dir), run)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; an untrained model says nothing: {train}") from None


def _of_checkpoint(saved: Saved, run: Run) -> Source:
    return Source(run, lambda structs: saved.restore({"params": structs}, take=["params.**"])["params"])
