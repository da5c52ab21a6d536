"""Runs in stages: small models, any schedule, any mesh around it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from meshpar.experiment.config import Precision, Run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.mesh.layout import MeshLayout
from meshpar.models import GPT, Llama
from meshpar.optim import AdamW
from meshpar.parallel.pipeline.get_schedule import get_schedule
from meshpar.sharding.rules import AxisRules
from meshpar.train.data import Synthetic
from meshpar.verification.trial import KINDS, Trial

ROWS, SEQ, VOCAB = 48, 8, 29
SIZES = {
    "hidden_size": 16,
    "num_heads": 4,
    "intermediate_size": 32,
    "vocab_size": VOCAB,
    "pad_vocab_to_multiple": 8,
    "dropout": 0.2,
}
MODELS = {
    "llama": lambda layers, **more: Llama(num_layers=layers, **SIZES | more),
    "tied": lambda layers, **more: Llama(num_layers=layers, tie_embeddings=True, **SIZES | more),
    "gpt": lambda layers, **more: GPT(num_layers=layers, max_seq_len=SEQ, tie_embeddings=True, **SIZES | more),
}
MESHES = {
    "pipe2": ({"pipe": 2}, ["pipeline"]),
    "pipe4": ({"pipe": 4}, ["pipeline"]),
    "pipe8": ({"pipe": 8}, ["pipeline"]),
    "data2_tensor2": ({"pipe": 2, "data": 2, "tensor": 2}, ["pipeline", "megatron"]),
    "fsdp2_tensor2_sp": ({"pipe": 2, "fsdp": 2, "tensor": 2}, ["pipeline", "fsdp", "megatron_sp"]),
    "fsdp4": ({"pipe": 2, "fsdp": 4}, ["pipeline", "fsdp"]),
    "zero1": ({"pipe": 2, "fsdp": 4}, ["pipeline", "zero1"]),
    "zero2": ({"pipe": 2, "fsdp": 4}, ["pipeline", "zero2"]),
    "hsdp": ({"pipe": 2, "replica": 2, "fsdp": 2}, ["pipeline", "hsdp"]),
    "zero2_tensor2": ({"pipe": 2, "fsdp": 2, "tensor": 2}, ["pipeline", "zero2", "megatron"]),
}


def prepared(
    model: Any, mesh: Any, schedule: Any = None, *, rules: Any = None, rows: int = ROWS, seq: int = SEQ,
    precision: str = "float64", optim: Any = None, parallel: Any = None, **more: Any,
) -> Prepared:  # fmt: skip
    """A run on as many of the devices as its mesh has, one of `MESHES` or (sizes, presets); without a mesh, on one."""
    sizes, presets = MESHES[mesh] if isinstance(mesh, str) else mesh or ({}, ["replicated"])
    layout = MeshLayout(**sizes)
    run = Run(
        model=model,
        data=Synthetic(batch_size=rows, seq_len=seq, vocab_size=model.vocab_size),
        optim=optim or AdamW(lr=1e-2),
        mesh=layout,
        rules=AxisRules(preset=tuple(presets), **(rules or {})),
        precision=Precision(params=precision, compute=precision),
        num_steps=2,
        run_dir="unused",
        parallel={"pipeline": schedule} | (parallel or {}),
        **more,
    )
    return prepare(run, layout.build(jax.devices()[: layout.requested()]))


def scheduled(kind: str, mesh: str, num_microbatches: int, **more: Any) -> Any:
    return get_schedule(kind, MESHES[mesh][0]["pipe"], num_microbatches).model_copy(update=more)


def batches(vocab_size: int = VOCAB) -> list[dict[str, np.ndarray]]:
    """Two steps of random tokens with holes that do not count, and two documents a row."""
    rng, column = np.random.default_rng(0), np.arange(SEQ)
    drawn = []
    for _ in range(2):
        targets = rng.integers(0, vocab_size, (ROWS, SEQ))
        targets[rng.random((ROWS, SEQ)) < np.linspace(0, 0.9, ROWS)[:, None]] = -1
        two = np.ones((ROWS, 1), np.int64) * column
        drawn.append(
            {
                "tokens": rng.integers(0, vocab_size, (ROWS, SEQ)),
                "targets": targets,
                "segments": np.where(two >= 5, 2, 1),
                "positions": np.where(two >= 5, two - 5, two),
            }
        )
    return [{name: array.astype(np.int32) for name, array in batch.items()} for batch in drawn]


def taken(run: Prepared) -> list[Any]:
    """Losses, gradients, norms and parameters of two steps."""
    trial = Trial(run)
    return trial.run(trial.start(), batches())[1]


@lru_cache
def on_one_device(model: str, layers: int) -> list[Any]:
    return taken(prepared(MODELS[model](layers), None))


def difference(run: Prepared, model: str, layers: int) -> float:
    """The largest absolute difference of any number from one device's, where padded layers are zeros."""
    return max(
        float(np.abs(np.asarray(mine) - padded(np.asarray(theirs), mine.shape)).max())
        for a, b in zip(taken(run), on_one_device(model, layers), strict=True) for kind in KINDS
        for mine, theirs in zip(getattr(a, kind).values(), getattr(b, kind).values(), strict=True)
    )  # fmt: skip


def padded(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """With zeros behind, where layers are padded."""
    grown = np.zeros(shape, x.dtype)
    grown[tuple(slice(0, size) for size in x.shape)] = x
    return grown
