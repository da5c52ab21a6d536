"""Text generated from Hugging Face folders, read in place or converted first."""

from __future__ import annotations

import numpy as np
import pytest

from meshpar import generate
from meshpar.convert import from_hf
from tests.interop.pretrained import made, saved

NUM = 6
PROMPTS = [[5, 17, 3], [9, 2, 2, 40, 77]]
MESH = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "rules=[fsdp,megatron]")


def expected_tokens(kind: str) -> list[list[int]]:
    import torch

    model = made(kind)
    outputs = [
        model.generate(torch.tensor([prompt]), max_new_tokens=NUM, do_sample=False, pad_token_id=0)[0].tolist()
        for prompt in PROMPTS
    ]
    return [output[len(prompt) :] for output, prompt in zip(outputs, PROMPTS, strict=True)]


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_folder_generates_the_tokens_of_transformers(kind, tmp_path):
    folder = saved(kind, tmp_path / "expected_tokens")
    expected = expected_tokens(kind)
    answers = generate(folder, PROMPTS, max_tokens=NUM, overrides=MESH)
    for answer, tokens in zip(answers.completions, expected, strict=True):
        assert answer.tokens == tokens, "the folder names no end id"
        assert answer.text == " ".join(map(str, tokens)), "nor a tokenizer"
    assert len({token for tokens in expected for token in tokens}) > 1  # not one token repeated


@pytest.mark.slow
def test_a_tokenizer_opens_prompts_by_its_own_template(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder = saved("qwen3", tmp_path / "theirs")
    library = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1, "go": 5, "on": 17}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(folder / "tokenizer.json"))
    bare = generate(folder, "go on", max_tokens=NUM, overrides=MESH)
    same = generate(folder, [[5, 17]], max_tokens=NUM, overrides=MESH)
    assert bare.completions[0].tokens == same.completions[0].tokens

    library.add_special_tokens(["<s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    library.save(str(folder / "tokenizer.json"))
    opened = generate(folder, "go on", max_tokens=NUM, overrides=MESH)
    same = generate(folder, [[0, 5, 17]], max_tokens=NUM, overrides=MESH)
    assert opened.completions[0].tokens == same.completions[0].tokens
    assert not np.array_equal(opened.completions[0].tokens, bare.completions[0].tokens)

    from_hf(folder, tmp_path / "run", MESH)
    converted = generate(tmp_path / "run", "go on", max_tokens=NUM)
    assert converted.completions[0].tokens == opened.completions[0].tokens
