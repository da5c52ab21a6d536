"""Greedy tokens equal those of `transformers`, with prompts of different lengths in one batch on a mesh."""

from __future__ import annotations

import numpy as np
import pytest

from meshpar.models import Llama
from tests import serving
from tests.serving import MAX_TOKENS, PROMPTS, generated

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 3,
}


@pytest.fixture(scope="module")
def reference():
    """A Llama of transformers with random weights, in float64."""
    import torch

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.4, eos_token_id=None, bos_token_id=None,
        pad_token_id=0, rms_norm_eps=1e-5,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


def greedy_tokens(model) -> np.ndarray:
    """The greedy tokens of transformers, one prompt at a time."""
    import torch

    def answer(prompt):
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
        return made[0, len(prompt) :].numpy()

    return np.stack([answer(prompt) for prompt in PROMPTS])


def converted(model) -> dict:
    """The weights of transformers, which store outputs first, heads as one dim and layers apart, as meshpar's."""
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}

    def stack(name, *shape):
        layers = [weights[f"model.layers.{i}.{name}.weight"].T for i in range(3)]
        return np.stack([layer.reshape(shape) if shape else layer for layer in layers])

    attn = {"q": (16, 4, 4), "k": (16, 2, 4), "v": (16, 2, 4), "o": (4, 4, 16)}
    return {
        "embedding": weights["model.embed_tokens.weight"],
        "head": weights["lm_head.weight"].T,
        "norm": {"scale": weights["model.norm.weight"]},
        "blocks": {
            "attn": {name: {"kernel": stack(f"self_attn.{name}_proj", *shape)} for name, shape in attn.items()},
            "mlp": {name: {"kernel": stack(f"mlp.{name}_proj")} for name in ("gate", "up", "down")},
            "attn_norm": {"scale": stack("input_layernorm")},
            "mlp_norm": {"scale": stack("post_attention_layernorm")},
        },
    }


@pytest.mark.parametrize(
    ("layout", "lowering"),
    [pytest.param("tensor4", "auto", marks=pytest.mark.slow), ("data2_fsdp2_tensor2", "manual")],
)
def test_greedy_tokens_equal_those_of_transformers(reference, layout, lowering, monkeypatch, float64):
    monkeypatch.setitem(serving.MODELS, "gqa of transformers", Llama(**SIZES))
    monkeypatch.setattr(serving, "params", lambda model: converted(reference))
    want = greedy_tokens(reference)
    assert (generated("gqa of transformers", layout, lowering) == want).all()
    assert len(np.unique(want)) > 10  # not one token repeated
