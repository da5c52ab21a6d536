"""Pairs of answers to sums, of which the polite one is chosen, and the tokenizer and template of a small model.

`python prefer_polite.py` writes them into the folder `polite`.
"""

import json
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

POLITE = ["Gladly: it is {}.", "With pleasure, that makes {}.", "Of course! The sum is {}.", "Thanks for asking: {}."]
CURT = ["{}, obviously.", "Look it up: {}.", "Why ask me? It is {}.", "{}. Next."]
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def pairs(most: int = 16) -> list[dict[str, str]]:
    """A pair for each sum of two numbers below `most`, in changing words."""
    sums = enumerate(product(range(most), range(most)))
    return [
        {
            "prompt": f"What is {a} + {b}?",
            "chosen": POLITE[(i * 7 + a) % 4].format(a + b),
            "rejected": CURT[(i * 5 + b) % 4].format(a + b),
        }
        for i, (a, b) in sums
    ]


def write(folder: Path, most: int = 16) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(pair) for pair in pairs(most)]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    special, alphabet = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(lines, trainer)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    write(Path("polite"))
