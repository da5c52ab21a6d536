"""Answers prompts: runs the programs for prefill and decoding, and streams the answers."""

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
from meshpar.train.program import on_host
from meshpar.train.state import shardings, structs

Ids = Sequence[int]


class Piece(NamedTuple):
    """The next piece of an answer.

    Args:
      row: index of the prompt.
      text: may be empty.
      finish: why the answer ends with this piece; None if it continues.
      num_tokens: tokens of the answer up to here, if they are counted.
    """

    row: int
    text: str
    finish: Finish | None
    num_tokens: int = 0


@dataclass
class Generator:
    """Answers batches of prompts, with programs that are compiled once.

    Args:
      decoding: model, mesh and sizes.
      restore: structs with shardings -> the parameters.
      turn_s: seconds of each turn of the last batch; the first turn is the prefill.
    """

    decoding: Decoding
    restore: Callable[[Any], Any]
    turn_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefill = self.decoding.compile_prefill()
        self.decode = self.decoding.compile_decode()
        self.params = self.restore(structs(self.decoding.params))

    @property
    def acceptance(self) -> float | None:
        """The fraction of drafts that were accepted in the last batch; None without drafts."""
        return None

    def turns(self, prompts: Sequence[Ids]) -> Iterator[np.ndarray]:
        """The tokens of each of `max_tokens` turns, int32[prompts]. A turn is read while the next is computed."""
        turn, cache = self.prefill(self.params, self._placed(prompts))
        for _ in range(self.decoding.max_tokens - 1):
            following, cache = self.decode(self.params, turn, cache)
            yield on_host(turn.tokens)[: len(prompts)]
            turn = following
        yield on_host(turn.tokens)[: len(prompts)]

    def lists(self, prompts: Sequence[Ids]) -> Iterator[list[list[int]]]:
        """The new tokens of each prompt, for each turn."""
        for tokens in self.turns(prompts):
            yield [[token] for token in tokens.tolist()]

    def stream(self, prompts: Sequence[Ids], answers: Sequence[Answer]) -> Iterator[Piece]:
        """Fills the answers; yields a piece for each token."""
        self.turn_s = []
        start = time.perf_counter()
        with closing(self.lists(prompts)) as turns:  # pyright: ignore
            for of_rows in turns:
                self.turn_s.append(time.perf_counter() - start)
                for row, (answer, tokens) in enumerate(zip(answers, of_rows, strict=True)):
                    for token in tokens:
                        if answer.finish is None:
                            yield Piece(row, answer.add(token), answer.finish)
                if all(answer.finish for answer in answers):
                    return
                start = time.perf_counter()

    def _placed(self, prompts: Sequence[Ids]) -> Turn:
        """Pads prompts at their end, and the batch with rows of one token."""
        self._check(prompts)
        tokens = np.zeros((self.decoding.num_rows, self.decoding.prompt_len), np.int32)
        lengths = np.ones(self.decoding.num_rows, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        return jax.device_put(Turn(tokens, lengths), shardings(self.decoding.prompts))

    def _check(self, prompts: Sequence[Ids]) -> None:
        problems = Problems()
        longest = self.decoding.prompt_len
        if len(prompts) > self.decoding.num_rows:
            problems.add("prompts", f"there are {len(prompts)}, and the cache has {self.decoding.num_rows} rows")
        for number, prompt in enumerate(prompts, 1):
            if not 0 < len(prompt) <= longest:
                problems.add(f"prompt {number}", f"has {len(prompt)} tokens, and the cache holds 1 to {longest}")
        problems.raise_any(ConfigError, "the prompts do not fit the compiled program:")
