"""A model that answers: its two programs, its parameters, and the loop between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from meshpar.errors import ConfigError, Problems
from meshpar.serve.answer import Answer, Finish
from meshpar.serve.decoding import Decoding, Turn
from meshpar.train.state import structs

Ids = Sequence[int]


class Piece(NamedTuple):
    """What an answer grows by.

    Args:
      row: which prompt it answers.
      text: may be empty.
      finish: why the answer ends with it; None if it goes on.
    """

    row: int
    text: str
    finish: Finish | None


@dataclass
class Clock:
    """Seconds that a batch took; `decode_s` is for all tokens but the first of each row."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_turns: int = 0

    def tick(self, seconds: float) -> None:
        if self.num_turns:
            self.decode_s += seconds
        else:
            self.prefill_s += seconds
        self.num_turns += 1


@dataclass
class Generator:
    """Answers batches of prompts, with programs that are compiled once.

    Args:
      decoding: model, mesh and sizes.
      restore: structs with shardings -> the parameters.
    """

    decoding: Decoding
    restore: Callable[[Any], Any]
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.prefill, self.decode = self.decoding.compile_prefill(), self.decoding.compile_decode()
        self.params = self.restore(structs(self.decoding.params))

    def turns(self, prompts: Sequence[Ids]) -> Iterator[np.ndarray]:
        """The tokens that are chosen in each turn, int32[prompts]; `max_tokens` turns.

        A turn is read while the next is computed.
        """
        turn, cache = self.prefill(self.params, self._placed(prompts))
        for _ in range(self.decoding.max_tokens - 1):
            following, cache = self.decode(self.params, turn, cache)
            yield np.asarray(turn.tokens)[: len(prompts)]
            turn = following
        yield np.asarray(turn.tokens)[: len(prompts)]

    def stream(self, prompts: Sequence[Ids], answers: Sequence[Answer]) -> Iterator[Piece]:
        """Fills the answers, and gives each token's text as it comes."""
        self.clock, start = Clock(), time.perf_counter()
        with closing(self.turns(prompts)) as turns:  # pyright: ignore
            for tokens in turns:
                self.clock.tick(time.perf_counter() - start)
                for row, (answer, token) in enumerate(zip(answers, tokens.tolist(), strict=True)):
                    if answer.finish is None:
                        yield Piece(row, answer.add(token), answer.finish)
                if all(answer.finish for answer in answers):
                    return
                start = time.perf_counter()

    def _placed(self, prompts: Sequence[Ids]) -> Turn:
        """Padded behind, to the length of the longest prompt and with rows of one token."""
        self._check(prompts)
        shape = (self.decoding.num_rows, self.decoding.prompt_len)
        tokens, lengths = np.zeros(shape, np.int32), np.ones(shape[0], np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        put = lambda array, struct: jax.device_put(array, struct.sharding)
        return jax.tree.map(put, Turn(tokens, lengths), self.decoding.prompts)

    def _check(self, prompts: Sequence[Ids]) -> None:
        problems, most = Problems(), self.decoding.prompt_len
        if len(prompts) > self.decoding.num_rows:
            problems.add("prompts", f"there are {len(prompts)}, and the cache has {self.decoding.num_rows} rows")
        for number, prompt in enumerate(prompts, 1):
            if not 0 < len(prompt) <= most:
                problems.add(f"prompt {number}", f"{len(prompt)} tokens, and the cache takes 1 to {most}")
        problems.raise_any(ConfigError, "the prompts do not fit what was compiled:")
