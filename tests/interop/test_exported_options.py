"""A model with any options is exported so that transformers computes its logits, or it is not exported."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.errors import CheckpointError, ConfigError
from meshpar.interop.architectures import write as write_config
from meshpar.interop.export import export
from meshpar.interop.huggingface import open_pretrained
from meshpar.interop.layout import layer_shapes
from meshpar.models import GPT, Llama
from meshpar.models.decoder import DecoderModel
from meshpar.tree import flatten_with_paths
from tests.interop.pretrained import VOCAB, loaded, logits
from tests.interop.test_huggingface import TOKENS, our_logits, specs

LLAMA3 = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_seq_len": 16}
OPTIONS: dict[str, list[Any]] = {
    "attn_bias": ["none", "none", "qkv", "all"],
    "mlp_bias": [False, False, True],
    "qk_norm": [False, False, True, "all_heads"],
    "rotary_fraction": [1.0, 1.0, 1.0, 0.5],
    "rope_scaling": [None, None, {"kind": "linear", "factor": 4.0}, LLAMA3],
    "rope_theta": [1e4, 100.0],
    "window": [None, 5],
    "global_layers": [(), (), (0,), (0, 1)],
    "num_kv_heads": [None, 2],
    "head_dim": [None, 8, 16],
    "hidden_size": [32, 32, 36],
    "num_heads": [4, 4, 6],
    "norm_eps": [1e-5, 1e-2],
    "tie_embeddings": [False, True],
    "experts": [
        None, None, {"num": 4, "per_token": 2, "intermediate_size": 24},
        {"num": 4, "per_token": 3, "intermediate_size": 64, "normalize": False},
        {"num": 4, "per_token": 1, "intermediate_size": 24, "normalize": False, "first_dense": 1},
        {"num": 4, "per_token": 2, "intermediate_size": 24, "shared": 1},
    ],
}  # fmt: skip
BASE = {
    "vocab_size": VOCAB,
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 64,
    "max_seq_len": 64,
}


def drawn(number: int) -> Llama | None:
    """A model with some options; None if they do not fit each other."""
    generator = random.Random(number)
    some = generator.sample(sorted(OPTIONS), generator.randint(1, 5))
    try:
        return Llama(**BASE | {name: generator.choice(OPTIONS[name]) for name in some})
    except ConfigError:
        return None


def arrays_of(model: DecoderModel) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    shapes = {path: spec.shape for path, spec in flatten_with_paths(specs(model)).items()}
    noise = {path: generator.normal(size=shape).astype("float32") * 0.15 for path, shape in shapes.items()}
    return {path: jnp.asarray(1 + x if path.endswith("scale") else x) for path, x in noise.items()}


def check(model: DecoderModel, folder: Path) -> bool:
    """Exports a model, and compares the logits; returns whether it was exported."""
    arrays = arrays_of(model)
    if write_config(model) is None:
        with pytest.raises(CheckpointError, match="none of the supported architectures"):
            export(folder, model, arrays)
        return False
    export(folder, model, arrays)
    want = our_logits(model, arrays)
    np.testing.assert_allclose(logits(loaded(folder), TOKENS), want, rtol=0, atol=2e-5)
    again = open_pretrained(folder)
    assert layer_shapes(again.model) == layer_shapes(model)
    return True


def numbers(begin: int, end: int) -> list[int]:
    return [number for number in range(begin, end) if drawn(number)]


@pytest.mark.parametrize(
    "number", [*numbers(0, 4), *(pytest.param(n, marks=pytest.mark.slow) for n in numbers(4, 300))]
)
def test_options_are_exported_with_their_logits_or_refused(number, tmp_path):
    model = drawn(number)
    assert model
    check(model, tmp_path / "out")


EXPORTED = {
    "a window in all layers": {"window": 5},
    "a window in some layers": {"window": 5, "global_layers": (1,)},
    "a window in some layers, qkv biases": {"window": 5, "global_layers": (1,), "attn_bias": "qkv"},
    "partial rotation": {"rotary_fraction": 0.5},
    "experts and a window": {"window": 5, "experts": {"num": 4, "per_token": 2, "intermediate_size": 64}},
}
REFUSED = {
    "a window and biases of all projections": {"window": 5, "attn_bias": "all"},
    "a window, partial rotation and qkv biases": {"window": 5, "rotary_fraction": 0.5, "attn_bias": "qkv"},
    "scaled partial rotation": {"rotary_fraction": 0.5, "rope_scaling": {"kind": "linear", "factor": 4.0}},
    "mlp biases and a window": {"window": 5, "mlp_bias": True},
    "shared experts": {"experts": {"num": 4, "per_token": 2, "intermediate_size": 24, "shared": 1}},
}


@pytest.mark.parametrize("case", EXPORTED)
def test_what_an_architecture_has_is_exported(case, tmp_path):
    assert check(Llama(**BASE | EXPORTED[case]), tmp_path / "out")


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_architecture_has_is_refused(case, tmp_path):
    assert not check(Llama(**BASE | REFUSED[case]), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True])
def test_gpt_is_exported(tie, tmp_path):
    assert check(GPT(**BASE | {"tie_embeddings": tie}), tmp_path / "out")
