"""LoRA, DoRA, rank-stabilized LoRA and patterns train as PEFT and torch train them, and PEFT loads what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax import lax

import meshpar
from meshpar import convert
from meshpar.interop.open_folder import open_folder
from meshpar.nn import dora
from tests.interop.test_peft import OF_THE_LIBRARY, OURS, PATTERNS, base, continued, logits_of_peft, our_logits

__all__ = ["base"]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, OF_THE_LIBRARY]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dora": ({"use_dora": True}, {"use_dora": True}),
    "rslora and patterns": (PATTERNS, OURS),
    "all": ({"use_dora": True} | PATTERNS, {"use_dora": True} | OURS),
}
"""The keys of PEFT, and ours."""
ADAMW = {"kind": "adamw", "lr": 0.02, "b2": 0.999, "weight_decay": 0.0, "clip_norm": None}


def library_adapter(base: Path, folder: Path, keys: dict[str, Any]) -> None:
    """An adapter as the library saves it, whose matrices are no zeros."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    how = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **keys)
    model = peft.get_peft_model(plain, how)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


def their_losses(base: Path, adapter: Path, batches: list[Any]) -> list[float]:
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=ADAMW["lr"], betas=(0.9, 0.999), eps=1e-8, weight_decay=0)
    losses = []
    for batch in batches:
        tokens, targets = (torch.tensor(batch[name], dtype=torch.long) for name in ("tokens", "targets"))
        logits = model(tokens).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("case", CASES)
def test_the_first_losses_and_the_logits_of_what_is_written_are_those_of_the_library(case, base, tmp_path):
    theirs, ours = CASES[case]
    library_adapter(base, tmp_path / "first", theirs)
    data = {"kind": "synthetic", "batch_size": 8, "seq_len": 8, "vocab_size": 32, "documents_in_row": "joined"}
    run = continued(base, tmp_path / "first", tmp_path / "run", optim=ADAMW, num_steps=5, **ours)
    run = meshpar.Run.model_validate(run.model_dump() | {"data": data})
    meshpar.fit(run, json=True)
    records = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    batches = [run.data.train(seed=0)[step] for step in range(5)]
    want = their_losses(base, tmp_path / "first", batches)
    assert losses[0] - losses[-1] > 1e-3, "they learn"
    np.testing.assert_allclose(losses, want, rtol=0, atol=1e-5)

    convert.to_peft(tmp_path / "run", tmp_path / "adapter")
    convert.to_hf(tmp_path / "run", tmp_path / "merged")
    tokens = np.arange(12).reshape(2, 6)
    found = logits_of_peft(tmp_path / "adapter", tokens)
    assert abs(found - our_logits(base, tokens)).max() > 1e-2
    np.testing.assert_allclose(our_logits(tmp_path / "merged", tokens), found, rtol=0, atol=1e-4)
    np.testing.assert_allclose(our_logits(tmp_path / "adapter", tokens), found, rtol=0, atol=1e-4)


def test_planted_magnitudes_with_a_gradient_through_the_norms_are_seen(base, tmp_path, monkeypatch):
    """PEFT and the paper hold the norms constant in the backward."""

    def stretch(kernel, update, magnitude, inputs, axes=()):
        own, whole = (lax.sqrt(dora._squares(one, inputs, axes)) for one in (kernel, kernel + update))
        return (own + magnitude) / whole

    monkeypatch.setattr(dora, "stretch", stretch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_the_first_losses_and_the_logits_of_what_is_written_are_those_of_the_library("dora", base, tmp_path)


def test_dora_of_a_matrix_with_several_parts_is_written_for_all_its_outputs(tmp_path):
    """q, k and v of GPT-2 are one matrix: k is not adapted, and keeps its norms."""
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 4, "n_inner": 24, "vocab_size": 32, "n_positions": 8}
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "base")
    lora = {"paths": ["blocks.attn.q", "blocks.attn.v", "blocks.mlp.up"], "rank_pattern": {"blocks.attn.v": 2}}
    run = continued(tmp_path / "base", None, tmp_path / "run", optim=ADAMW, num_steps=3, use_dora=True, **lora)
    meshpar.fit(run, json=True)
    convert.to_peft(tmp_path / "run", tmp_path / "adapter")
    convert.to_hf(tmp_path / "run", tmp_path / "merged")
    tokens = np.arange(12).reshape(2, 6)
    found = logits_of_peft(tmp_path / "adapter", tokens)
    assert abs(found - our_logits(tmp_path / "base", tokens)).max() > 1e-3
    np.testing.assert_allclose(our_logits(tmp_path / "merged", tokens), found, rtol=0, atol=1e-4)
    assert open_folder(tmp_path / "adapter").model == open_folder(tmp_path / "base").model
