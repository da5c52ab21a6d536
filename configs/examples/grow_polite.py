"""A small model that is polite in a third of its answers, and what GRPO needs to make it polite in nearly all.

`python grow_polite.py` writes conversations, prompts, and the tokenizer and template of a small model into `grown`.
The function `politeness` is the reward.
"""

import json
from pathlib import Path

from prefer_polite import POLITE, pairs, write

SIGNS = tuple(words.partition(" ")[0] for words in POLITE)


def politeness(answers, lines):
    """1 for an answer that begins as a polite one does and ends after one sentence or two, else 0."""
    return [float(answer.startswith(SIGNS) and len(answer) < 40) for answer in answers]


def conversations(most: int) -> list[dict[str, str]]:
    """Of three answers one is polite."""
    return [
        {"prompt": pair["prompt"], "completion": pair["chosen" if i % 3 == 0 else "rejected"]}
        for i, pair in enumerate(pairs(most))
    ]


def write_all(folder: Path, most: int = 16) -> None:
    write(folder, most)
    lines = [json.dumps(one) for one in conversations(most)]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    prompts = [json.dumps({"prompt": pair["prompt"]}) for pair in pairs(most)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")


if __name__ == "__main__":
    write_all(Path("grown"))
