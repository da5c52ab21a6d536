"""A small chat model's folder: a byte-level tokenizer, a ChatML template with and without marks, conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
UNMARKED = CHATML.replace("{%- generation %}{{", "{{-").replace("{% endgeneration %}", "")
CITIES = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Peru": "Lima", "Cuba": "Havana", "Iran": "Tehran"}


def conversation(country: str, city: str, number: int = 0) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": f"You are guide {number}."},
            {"role": "user", "content": f"What is the capital of {country}?"},
            {"role": "assistant", "content": f"It is {city}."},
            {"role": "user", "content": "Thanks, naïve guide!"},
            {"role": "assistant", "content": f"  {country} is glad.\n"},
        ]
    }


def conversations(number: int) -> list[dict[str, Any]]:
    cities = [*CITIES.items()]
    return [conversation(*cities[i % len(cities)], number=i) for i in range(number)]


def write_lines(path: Path, values: list[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def write_tokenizer(folder: Path, template: str | None = CHATML, special: list[str] = SPECIAL) -> Path:
    """A tokenizer and a template, as a model's folder has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, show_progress=False, initial_alphabet=alphabet
    )
    library.train_from_iterator([json.dumps(conversations(6)), "system user assistant"], trainer)
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[-1], "bos_token": special[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
