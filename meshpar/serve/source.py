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
from meshpar.mesh import process
from meshpar.mesh.layout import MeshLayout
from meshpar.nn.transformer import Decoder
from meshpar.run import Run
from meshpar.serve.decoding import for_tokens
from meshpar.sharding.constrain import Lowering
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.train.data import Data, Synthetic
from meshpar.train.tokenizer import Bytes, Ids, Tokenizer


@dataclass(frozen=True)
class Source:
    """A trained model.

    Args:
      restore: structs with shardings -> the parameters.
      dtype: of the parameters, as they are stored.
    """

    model: Decoder
    tokenizer: Tokenizer
    layout: MeshLayout
    rules: AxisRules
    manual: bool
    dtype: np.dtype
    compute: np.dtype
    restore: Callable[[Any], Any]

    def how(self, mesh: AnyMesh) -> Lowering:
        """The run's lowering, as far as it makes sense for single tokens."""
        return for_tokens(Lowering(mesh, self.rules, self.manual, self.compute))

    def simulate(self, num_devices: int | None) -> None:
        """Where the devices are CPUs: presents as many as are asked for, or as the mesh has."""
        if count := num_devices or self.layout.requested():
            process.simulate(count)


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
    return Source(
        _decoder(run), _tokenizer(run.data), run.mesh, run.rules, run.lowering == "manual",
        np.dtype(run.precision.params), np.dtype(run.precision.compute),
        lambda structs: saved.restore({"params": structs}, take=["params.**"])["params"],
    )  # fmt: skip


def _decoder(run: Run) -> Decoder:
    if not isinstance(run.model, Decoder):
        raise ConfigError(f"model.kind = {run.model.kind}: only meshpar's own decoders keep keys and values of tokens")
    return run.model


def _tokenizer(data: Data) -> Tokenizer:
    return Ids(data.vocab_size, data.bos) if isinstance(data, Synthetic) else Bytes()  # pyright: ignore
