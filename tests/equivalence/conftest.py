"""A run in any layout, and its outcome: losses, gradients, norms, and parameters after three steps, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import lax

from meshpar.data import Synthetic
from meshpar.experiment.config import Precision, Run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.mesh.layout import MeshLayout
from meshpar.mesh.varying import varies_over
from meshpar.models import GPT, Llama
from meshpar.nn.decoder import Decoder
from meshpar.nn.experts import Balance, Experts
from meshpar.nn.lora import LoRA
from meshpar.nn.rotary import Llama3
from meshpar.optim import AdamW
from meshpar.optim.freeze import Freeze
from meshpar.sharding.rules import AxisRules
from meshpar.verification.trial import QUICK
from tests.comparison import largest_difference
from tests.layouts import LAYOUTS

ROWS = 32
SEQ = 16
NUM_STEPS = 3
FLOAT64 = Precision(params="float64", compute="float64")
SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 29,
    "pad_vocab_to_multiple": 8,
}
DROPLESS = Experts(
    num=8, per_token=2, intermediate_size=12, shared=1, balance=Balance(weight=0.1, load="last_step"), z_loss=0.01
)
CAPACITY = Experts(
    num=12,
    per_token=3,
    intermediate_size=12,
    router="sigmoid",
    groups=4,
    groups_per_token=2,
    scale=2.0,
    dispatch="capacity",
    capacity_factor=1.0,
    balance="bias",
)
SOME_LAYERS = Experts(
    num=4, per_token=2, intermediate_size=8, first_dense=2, every=2, balance=Balance(weight=0.1), z_loss=0.01
)
MODELS = {
    "llama": Llama(**SIZES, num_kv_heads=4, remat="dots"),
    "llama_gqa_tied_dropout": Llama(
        **SIZES, num_kv_heads=2, tie_embeddings=True, dropout=0.2, remat={"save": ["q", "k", "v", "attn", "residual"]}
    ),
    "gpt_dropout_remat": GPT(**SIZES, max_seq_len=SEQ, dropout=0.2, remat="full"),
    "gpt_gqa_tied": GPT(**SIZES, num_kv_heads=2, max_seq_len=SEQ, tie_embeddings=True),
    "llama_gqa_options": Llama(
        **SIZES,
        num_kv_heads=2,
        attn_bias="qkv",
        mlp_bias=True,
        qk_norm=True,
        window=5,
        global_layers=(1,),
        head_dim=8,
        rotary_fraction=0.5,
        remat="dots",
        rope_scaling=Llama3(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8),
    ),
    "llama_experts": Llama(**SIZES, experts=DROPLESS, remat="dots"),
    "llama_experts_capacity": Llama(**SIZES, experts=CAPACITY),
    "llama_experts_some_layers": Llama(
        **SIZES | {"num_layers": 6}, qk_norm="all_heads", experts=SOME_LAYERS, remat="dots"
    ),
    "llama_experts_lora": Llama(**SIZES, experts=DROPLESS),
    "llama_lora": Llama(**SIZES),
    "llama_dora": Llama(**SIZES),
    "llama_frozen": Llama(**SIZES),
    "llama_frozen_layers": Llama(**SIZES | {"num_layers": 4}),
    "llama_lora_layers": Llama(**SIZES | {"num_layers": 4}),
}


ADAPT = {
    "llama_lora_layers": LoRA(rank=2, paths=("blocks.attn.q", "blocks.mlp.down"), use_dora=True),
    "llama_lora": LoRA(rank=2, paths=("blocks.attn.*", "blocks.mlp.down")),
    "llama_dora": LoRA(
        rank=2,
        paths=("blocks.attn.*", "blocks.mlp.down"),
        rank_pattern={"blocks.mlp.*": 3},
        alpha_pattern={"blocks.attn.q": 5},
        use_rslora=True,
        use_dora=True,
    ),
    "llama_experts_lora": LoRA(rank=2, paths=("blocks.attn.q", "blocks.mlp.experts.*", "blocks.mlp.shared.down")),
}
LAST_TWO = (Freeze(layers="0:2"), Freeze(paths="blocks.mlp.**", layers="-1:"))
"""The last two layers are trained, without the MLP of the last one."""
FREEZE = {
    "llama_frozen": (Freeze(paths=("blocks.attn.*.kernel", "blocks.mlp.up.*", "embedding")),),
    "llama_frozen_layers": (*LAST_TWO, Freeze(paths="head")),
    "llama_lora_layers": LAST_TWO,
}


@dataclass(frozen=True)
class Outcome:
    """The numbers that two layouts must agree on.

    Args:
      gradients: of the first step, after clipping. Adam's first moment is then (1 - b1) times these.
    """

    losses: np.ndarray
    norms: np.ndarray
    gradients: Any
    params: Any

    def difference(self, other: Outcome) -> float:
        """The largest absolute difference of any number from the other outcome's."""
        return largest_difference(vars(self), vars(other))


def prepared(model: str, layout: str | None, lowering: str, num_microbatches: int, **settings: Any) -> Prepared:
    """A run in a layout, or on one device without one. The setting `fields` changes fields of the model."""
    sizes, presets = LAYOUTS[layout] if layout else ({}, ["replicated"])
    if "gqa" in model and sizes.get("tensor") == 4:  # two key heads cannot be sharded over four devices
        rules = AxisRules(preset=tuple(presets), kv_heads=())
    else:
        rules = AxisRules(preset=tuple(presets))
    rules = settings.pop("rules", rules)
    mesh = settings.pop("mesh", MeshLayout(**sizes))
    run = Run(
        model=MODELS[model].model_copy(update=settings.pop("fields", {})),
        data=Synthetic(batch_size=ROWS, seq_len=SEQ, vocab_size=SIZES["vocab_size"]),
        optim=AdamW(lr=1e-2),
        mesh=mesh,
        rules=rules,
        lowering=lowering,
        precision=settings.pop("precision", FLOAT64),
        num_steps=NUM_STEPS,
        num_microbatches=num_microbatches,
        lora=ADAPT.get(model),
        freeze=FREEZE.get(model, ()),
        run_dir="unused",
        **settings,
    )
    return prepare(run, mesh.build(jax.devices()[: mesh.requested()]))


def batches() -> list[dict[str, np.ndarray]]:
    """Random tokens; some targets do not count, more of them in later rows, and each row has two documents."""
    rng = np.random.default_rng(0)
    column = np.arange(SEQ)
    whole = np.ones((ROWS, SEQ), np.int32)
    drawn = []
    for _ in range(NUM_STEPS):
        targets = rng.integers(0, SIZES["vocab_size"], (ROWS, SEQ))
        targets[rng.random((ROWS, SEQ)) < np.linspace(0, 0.9, ROWS)[:, None]] = -1
        drawn.append(
            {
                "tokens": rng.integers(0, SIZES["vocab_size"], (ROWS, SEQ)),
                "targets": targets,
                "segments": whole + (column >= 9),
                "positions": whole * np.where(column >= 9, column - 9, column),
            }
        )
    return [{name: array.astype(np.int32) for name, array in batch.items()} for batch in drawn]


@lru_cache
def first_state(model: Decoder, lora: LoRA | None, freeze: tuple[Freeze, ...], precision: Precision = FLOAT64) -> Any:
    """One device's initial state, from which all layouts start. `test_layouts.py` compares it with theirs."""
    run = prepared("llama", None, "auto", 1, precision=precision).run
    run = run.model_copy(update={"model": model, "lora": lora, "freeze": freeze})
    return jax.device_get(prepare(run, run.mesh.build(jax.devices()[:1])).compile_init(QUICK)())


def outcome(run: Prepared) -> Outcome:
    """Trains for three steps."""
    step = run.compile_step(QUICK)
    shardings = jax.tree.map(lambda struct: struct.sharding, run.placement.structs)
    state = jax.device_put(first_state(run.run.model, run.run.lora, run.run.freeze, run.run.precision), shardings)
    metrics = []
    gradients: Any = None
    for batch in batches():
        state, measured = step(state, run.put(batch))
        metrics.append(jax.device_get(measured))
        if gradients is None:
            moments = jax.device_get(optax.tree.get(state.opt_state, "mu"))
            gradients = jax.tree.map(lambda moment: moment / (1 - run.run.optim.b1), moments)
    losses, norms = (np.array([m[name] for m in metrics]) for name in ("loss", "grad_norm"))
    return Outcome(losses, norms, gradients, jax.device_get(state.params))


@lru_cache
def on_one_device(model: str) -> Outcome:
    return outcome(prepared(model, None, "auto", 1))


@pytest.fixture(autouse=True)
def _float64(float64):
    """Every test of this folder computes in float64."""


def without_backward(x, axes):
    """What types x as varying over these axes, without the sum of its gradients: a fault to plant."""
    new = tuple(axis for axis in axes if axis not in varies_over(x))
    return lax.stop_gradient(x) + lax.pcast(0 * x, new, to="varying") if new else x
