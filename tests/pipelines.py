"""Pipelined runs of small models, with any schedule, on any mesh."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from meshpar.data import Synthetic
from meshpar.experiment.config import Precision, Run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.mesh.layout import MeshLayout
from meshpar.models import GPT, Llama
from meshpar.optim import AdamW
from meshpar.parallel.pipeline.get_schedule import get_schedule
from meshpar.sharding.rules import AxisRules
from meshpar.verification.trial import KINDS, Trial

ROWS = 48
SEQ = 8
VOCAB = 29
SIZES = {
    "hidden_size": 16,
    "num_heads": 4,
    "intermediate_size": 32,
    "vocab_size": VOCAB,
    "pad_vocab_to_multiple": 8,
    "dropout": 0.2,
}
EXPERTS = {
    "num": 4, "per_token": 2, "intermediate_size": 8, "balance": {"weight": 0.1, "load": "last_step"}, "z_loss": 0.01,
}  # fmt: skip
MODELS = {
    "llama": lambda layers, **more: Llama(num_layers=layers, **SIZES | more),
    "tied": lambda layers, **more: Llama(num_layers=layers, tie_embeddings=True, **SIZES | more),
    "gpt": lambda layers, **more: GPT(num_layers=layers, max_seq_len=SEQ, tie_embeddings=True, **SIZES | more),
}
MODELS |= {
    "first_dense": lambda layers, **more: MODELS["llama"](layers, experts=EXPERTS | {"first_dense": 2}, **more),
    "every_second": lambda layers, **more: MODELS["llama"](layers, experts=EXPERTS | {"every": 2}, **more),
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
    """A run on `mesh`, which is a name in `MESHES` or (sizes, presets); without a mesh, a run on one device."""
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
    """Random tokens for two steps: some targets do not count, and each row has two documents."""
    rng = np.random.default_rng(0)
    columns = np.broadcast_to(np.arange(SEQ), (ROWS, SEQ))
    drawn = []
    for _ in range(2):
        targets = rng.integers(0, vocab_size, (ROWS, SEQ))
        targets[rng.random((ROWS, SEQ)) < np.linspace(0, 0.9, ROWS)[:, None]] = -1
        drawn.append(
            {
                "tokens": rng.integers(0, vocab_size, (ROWS, SEQ)),
                "targets": targets,
                "segments": np.where(columns >= 5, 2, 1),
                "positions": np.where(columns >= 5, columns - 5, columns),
            }
        )
    return [{name: array.astype(np.int32) for name, array in batch.items()} for batch in drawn]


@lru_cache
def first_state(model: str, layers: int) -> Any:
    """The state from which all meshes start, as one device initializes it."""
    return jax.device_get(prepared(MODELS[model](layers), None).compile_init()())


@lru_cache
def on_one_device(model: str, layers: int) -> list[Any]:
    """Losses, gradients, norms and parameters of two steps."""
    trial = Trial(prepared(MODELS[model](layers), None))
    return trial.run(jax.device_put(first_state(model, layers)), batches())[1]


def difference(run: Prepared, model: str, layers: int) -> float:
    """The largest absolute difference of any number from one device's, NaN if one is NaN.

    Padded layers are compared with zeros.
    """

    def place(x: np.ndarray, struct: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(padded(np.asarray(x), struct.shape), struct.sharding)

    expected = on_one_device(model, layers)
    state = jax.tree.map(place, first_state(model, layers), run.placement.structs)
    _, results = Trial(run).run(state, batches())
    differences = [
        np.abs(np.asarray(found) - padded(np.asarray(wanted), found.shape)).max()
        for a, b in zip(results, expected, strict=True) for kind in KINDS
        for found, wanted in zip(getattr(a, kind).values(), getattr(b, kind).values(), strict=True)
    ]  # fmt: skip
    return float(np.max(differences))


def padded(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`x` with zeros appended to each dim until it has `shape`."""
    grown = np.zeros(shape, x.dtype)
    grown[tuple(slice(0, size) for size in x.shape)] = x
    return grown
