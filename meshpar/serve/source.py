"""Where a model to generate from comes from: a run, by its config or by its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshpar import config
from meshpar.errors import CheckpointError, ConfigError
from meshpar.mesh import process
from meshpar.mesh.layout import MeshLayout
from meshpar.nn.transformer import Decoder
from meshpar.run import Run
from meshpar.serve.decoding import for_tokens
from meshpar.sharding.constrain import Lowering
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.train.checkpoint import latest, read_params, saved_config
from meshpar.train.data import Data, Synthetic
from meshpar.train.tokenizer import Bytes, Ids, Tokenizer

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Source:
    """A trained model.

    Args:
      restore: structs with shardings -> the parameters.
      dtype: of the parameters, as they are stored.
    """

    name: str
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
    """A run's model, by its config or by the folder that it wrote.

    Raises:
      ConfigError, CheckpointError: there is no model, or it was not trained.
    """
    if not path.is_dir():
        run = config.load(Run, path, overrides)
        return of_run(run, run.run_dir, f"meshpar train {path}")
    if (path / "config.json").is_file():
        raise ConfigError(f"{path} is a Hugging Face model: only runs of meshpar can be generated from")
    if not (path / CHECKPOINTS).is_dir():
        raise CheckpointError(f"{path} is no folder of a run: it has no folder {CHECKPOINTS}")
    saved = config.build(Run, saved_config(path / CHECKPOINTS), str(latest(path / CHECKPOINTS)), overrides)
    return of_run(saved, path)


def of_run(run: Run, run_dir: Path, train: str = "train it first") -> Source:
    """The model of the latest checkpoint in `run_dir`."""
    directory = run_dir / CHECKPOINTS
    try:
        latest(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error}: untrained parameters say nothing; {train}") from None
    return Source(
        str(run_dir), run.model, _tokenizer(run.data), run.mesh, run.rules, run.lowering == "manual",
        np.dtype(run.precision.params), np.dtype(run.precision.compute),
        lambda structs: read_params(directory, structs),
    )  # fmt: skip


def _tokenizer(data: Data) -> Tokenizer:
    return Ids(data.vocab_size, data.bos) if isinstance(data, Synthetic) else Bytes()  # pyright: ignore
