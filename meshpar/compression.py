"""Compresses a trained model, for `meshpar compress`: writes a run that stores its projections in fewer bytes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshpar import config
from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.checkpoint.saved import FOLDER
from meshpar.convert import RUN_CONFIG, on_one_device, trained
from meshpar.errors import ConfigError, Problems
from meshpar.experiment.config import Init, Run
from meshpar.experiment.prepare import Prepared
from meshpar.inspection.report.table import table
from meshpar.interop.export import check_free, whole_or_not
from meshpar.interop.folder import MODEL_FILES, SOURCE
from meshpar.models.decoder import DecoderModel
from meshpar.nn.compressed import Factors, LowRankKernel, factorize, quantize
from meshpar.nn.quantized_kernel import Quantized
from meshpar.tree import human_bytes


@dataclass(frozen=True)
class Compressed:
    """The result of `compress`.

    Args:
      bytes_before, bytes_after: bytes of all parameters.
      ranks: path of a projection -> the rank of its factors, and the largest relative error of a layer.
    """

    bytes_before: int
    bytes_after: int
    ranks: dict[str, tuple[int, float]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        ratio = self.bytes_after / self.bytes_before
        held = f"parameters: {human_bytes(self.bytes_after)}, {ratio:.3f} of {human_bytes(self.bytes_before)}"
        rows = [[path, str(rank), f"{error:.4f}"] for path, (rank, error) in self.ranks.items()]
        return f"{table(['projection', 'rank', 'error'], rows)}\n{held}" if rows else held


def compress(
    source: Path | str, folder: Path | str, *, weights: Quantized | None = None, low_rank_error: float | None = None
) -> Compressed:
    """Writes the last checkpoint of a run as a run whose model stores its projections compressed.

    The new folder contains a config and the checkpoint of step 0. It is a run like any other: for `generate`, `serve`,
    `export`, and if its weights are floats, for `train`. Embedding, norms and output projection do not change.

    Args:
      source: a run directory, or the config of a run.
      folder: created, complete or not at all.
      weights: kernels are stored as codes, with a scale for each group.
      low_rank_error: kernels are stored as two factors of the smallest rank for which the relative error of each layer,
        in the Frobenius norm, is at most this. Kernels with fewer elements than their factors stay whole. With
        `weights`, the factors are stored as codes.

    Raises:
      ConfigError: lists the problems of the settings, or why the model cannot be compressed.
      CheckpointError: the folder exists, or there is no checkpoint.

    Memory: on one device, the parameters and the state of their optimizer.

    Numerics: see `Quantized`, and `nn.compressed.factorize`.
    """
    _check_settings(weights, low_rank_error)
    folder = Path(folder)
    check_free(folder)
    run, params, saved = trained(Path(source))
    model = _plain_decoder(run)
    factors: dict[str, Factors] = {}
    before = _num_bytes(params)
    if low_rank_error is not None:
        factors = factorize(model.abstract(), params, low_rank_error, weights)
        params = _in_factors(params, factors)
        ranks = [LowRankKernel(path=path, rank=one.rank) for path, one in factors.items()]
        model = model.model_copy(update={"low_rank": tuple(ranks)})
    if weights:
        quantized = model.model_copy(update={"weights": weights})
        quantized.abstract()  # lists the kernels that cannot be divided into groups
        params = quantize(model.abstract(), params, weights)
        model = quantized
    with whole_or_not(folder) as made:
        if (saved.run_dir / MODEL_FILES).is_dir():
            other = shutil.ignore_patterns(SOURCE)  # whose weights are others
            shutil.copytree(saved.run_dir / MODEL_FILES, made / MODEL_FILES, ignore=other)
        # Kernels that LoRA adapted or that were pruned may be codes or factors now.
        # Another run directory starts from this one: its codes are frozen, and must not be random.
        init = Init(from_checkpoint=folder)
        fields = {"model": model, "lora": None, "prune": None, "init": init, "run_dir": folder}
        after = run.model_copy(update=fields)
        (made / RUN_CONFIG).write_text(config.to_yaml(after))
        _save(after, params, made)
    found = {path: (one.rank, one.error) for path, one in factors.items()}
    return Compressed(before, _num_bytes(params), found)


def _check_settings(weights: Quantized | None, low_rank_error: float | None) -> None:
    problems = Problems()
    if weights is None and low_rank_error is None:
        problems.add("weights", "no compression is selected", "weights=int8 or int4, or low_rank_error=0.1")
    if low_rank_error is not None and not 0 < low_rank_error < 1:
        problems.add("low_rank_error", f"{low_rank_error} is not between 0 and 1", "0.1, a tenth of a kernel's norm")
    problems.raise_any(ConfigError, "the run cannot be compressed:")


def _plain_decoder(run: Run) -> DecoderModel:
    """The run's decoder, which is not compressed yet."""
    model = run.model
    if not isinstance(model, DecoderModel):
        raise ConfigError(f"model.kind = {model.kind}: only projections of meshpar's own decoders are compressed")
    if model.weights or model.low_rank:
        key = "weights" if model.weights else "low_rank"
        raise ConfigError(f"model.{key}: the run is compressed already; compress the original run")
    return model


def _in_factors(params: Mapping[str, jax.Array], factors: Mapping[str, Factors]) -> dict[str, jax.Array]:
    replaced = dict(params)
    for path, one in factors.items():
        dtype = params[f"{path}.kernel"].dtype
        replaced[f"{path}.kernel"] = jnp.asarray(one.first, dtype)
        replaced[f"{path}.expand.kernel"] = jnp.asarray(one.second, dtype)
    return replaced


def _num_bytes(params: Mapping[str, jax.Array]) -> int:
    return sum(x.nbytes for x in params.values())


def _save(run: Run, params: Mapping[str, jax.Array], folder: Path) -> None:
    """Writes the checkpoint of step 0, with these parameters and the first state of the optimizer."""
    prepared: Prepared = on_one_device(run)
    state = prepared.compile_init(given={f"params.{path}": x for path, x in params.items()})()
    about = replace(prepared.about, config=run.model_dump(mode="json"))
    with checkpoints(folder / FOLDER, about=about) as saved:
        saved.save(0, state)
