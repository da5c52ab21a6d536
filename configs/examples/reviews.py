"""Reviews that praise or blame: a small BERT learns words from reviews alone, then their class from few with a label.

`rows` needs `tokenizers`. A pretrained folder has a tokenizer of its own: `AutoTokenizer.from_pretrained(folder)`.
"""

import numpy as np

PRAISE = [
    "superb", "touching", "witty", "bold", "lovely", "tender", "bright", "clever", "graceful", "gripping", "honest",
    "joyful", "lively", "moving", "perfect", "radiant", "rich", "sharp", "sincere", "splendid", "strong", "subtle",
    "vivid", "warm",
]  # fmt: skip
BLAME = [
    "awful", "bland", "boring", "cheap", "clumsy", "cold", "confused", "dreary", "dull", "empty", "feeble", "flat",
    "forced", "hollow", "lazy", "messy", "pompous", "shallow", "silly", "slow", "stale", "tedious", "weak", "wooden",
]  # fmt: skip
SUBJECTS = ["plot", "cast", "score", "ending", "pace", "camera", "dialogue", "humor"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "the", "was", "not", "and", *SUBJECTS, *PRAISE, *BLAME]
LENGTH = 24


def reviews(num: int, seed: int) -> tuple[list[str], np.ndarray]:
    """Texts and their classes, 1 for praise. A word of the other class comes with `not`."""
    draw = np.random.default_rng(seed)
    praises = draw.integers(2, size=num)
    return [" and ".join(clause(draw, one) for _ in range(draw.integers(2, 5))) for one in praises], praises


def clause(draw: np.random.Generator, praises: int) -> str:
    is_denied = draw.random() < 0.4
    word = draw.choice(PRAISE if praises != is_denied else BLAME)
    return f"the {draw.choice(SUBJECTS)} was {'not ' if is_denied else ''}{word}"


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(name, SPECIAL.index(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    made.enable_padding(length=LENGTH, pad_id=0)
    made.enable_truncation(LENGTH)
    return made


def rows(num: int = 4096, seed: int = 0) -> dict[str, np.ndarray]:
    texts, praises = reviews(num, seed)
    tokens = np.array([one.ids for one in tokenizer().encode_batch(texts)], np.int32)
    return {"tokens": tokens, "label": praises}
