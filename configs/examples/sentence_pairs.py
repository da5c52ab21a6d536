"""Whether a sentence follows another, as in BERT: pairs on which the encoder of masked_tokens.py is fine-tuned."""

import numpy as np
from masked_tokens import BREAK, LENGTH, sentences


def rows(num: int = 1024, seed: int = 0) -> dict[str, np.ndarray]:
    """The halves of a sentence with a break between them; in half of the rows the second is one of another sentence."""
    draw = np.random.default_rng(seed)
    step = draw.integers(1, 3, size=(num, 1))
    first, other = sentences(draw, step, LENGTH), sentences(draw, step, LENGTH)
    follows = draw.integers(2, size=num)
    half = LENGTH // 2
    second = np.where(follows[:, None], first, other)[:, half + 1 :]
    return {"tokens": np.concatenate([first[:, :half], np.full((num, 1), BREAK), second], axis=1), "follows": follows}
