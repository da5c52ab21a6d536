"""Speculative decoding: a drafter proposes several tokens, and the model checks all of them in one step.

The noise with which a token is sampled depends only on its row and position. So the logits at a position determine the
token that the model samples there, and a draft is accepted if it is that token. The first wrong draft is replaced by
the model's own token, and those after it are discarded. The answer is the same as without drafts, token for token,
greedy or sampled, whatever the drafter proposes. A smaller model samples with the same noise, so that it draws the same
token more often.

Source: Leviathan et al. 2023, arXiv:2211.17192 (speculative decoding); Daliri et al. 2025, arXiv:2408.07978 (a draft
that shares the noise, and an answer that does not depend on the drafter); Saxena 2023, "Prompt lookup decoding".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.nn.attention.cached import KVCache
from meshpar.serve.decoding import Decoding, Turn
from meshpar.serve.generator import Generator, Ids
from meshpar.serve.sampling import sample
from meshpar.train.program import compile_program, on_host, on_shards, shardings, structs, trace


class Drafter(Protocol):
    """Proposes tokens, in a compiled program."""

    @property
    def params(self) -> Any:
        """Its parameters, as structs."""

    @property
    def state(self) -> Any:
        """What it carries from turn to turn, as structs."""

    def begin(self, params: Any, prompts: Turn, first: Turn) -> Any:
        """The state after the prompts and the first turn."""

    def propose(self, params: Any, state: Any, turn: Turn) -> tuple[jax.Array, Any]:
        """Drafts int32[batch, num_drafts] of the tokens after a turn, and the new state."""
        ...

    def observe(self, state: Any, turn: Turn, tokens: jax.Array) -> Any:
        """The state after a turn has been checked.

        Args:
          tokens: int32[batch, num_drafts + 1]. The model's own tokens after the turn. The first of each row are in its
            answer; the others are overwritten by later turns.
        """


@dataclass(frozen=True)
class DraftModel:
    """A smaller model, with a cache of its own.

    Args:
      decoding: its settings, with the same rows, slots and sampling.
    """

    decoding: Decoding

    @property
    def params(self) -> Any:
        return structs(self.decoding.params)

    @property
    def state(self) -> Any:
        return structs(self.decoding.cache)

    def begin(self, params: Any, prompts: Turn, first: Turn) -> Any:
        return self.decoding.prefill(params, prompts)[1]

    def propose(self, params: Any, state: Any, turn: Turn) -> tuple[jax.Array, Any]:
        def draft(carry: tuple[Turn, Any], _: None) -> tuple[tuple[Turn, Any], jax.Array]:
            following, cache = self.decoding.decode(params, *carry)
            return (following, cache), following.tokens

        # The last iteration only stores the last draft: if it is accepted, later tokens attend to it.
        (_, cache), drafts = lax.scan(draft, (turn, state), length=self.decoding.num_drafts + 1)
        return drafts[:-1].T, cache

    def observe(self, state: Any, turn: Turn, tokens: jax.Array) -> Any:
        return state


@dataclass(frozen=True)
class PromptLookup:
    """The tokens that followed the last earlier occurrence of the newest `size` tokens of the row.

    Args:
      decoding: the model's settings.
      size: tokens that must occur again. Without an occurrence, the first tokens of the row are proposed.
    """

    decoding: Decoding
    size: int

    @property
    def params(self) -> Any:
        return ()

    @property
    def state(self) -> Any:
        return self.decoding.per_row(self.decoding.num_rows, self.decoding.num_slots)

    def begin(self, params: Any, prompts: Turn, first: Turn) -> Any:
        history = jnp.pad(prompts.tokens, ((0, 0), (0, self.decoding.num_slots - self.decoding.prompt_len)))
        return _written(history, first.positions, first.tokens[:, None])

    def propose(self, params: Any, state: Any, turn: Turn) -> tuple[jax.Array, Any]:
        propose = partial(_followers, size=self.size, num=self.decoding.num_drafts)
        return jax.vmap(propose)(state, turn.positions), state

    def observe(self, state: Any, turn: Turn, tokens: jax.Array) -> Any:
        return _written(state, turn.positions + 1, tokens)


def _written(history_BT: jax.Array, begin_B: jax.Array, tokens_BN: jax.Array) -> jax.Array:
    """Writes tokens to consecutive positions of each row."""
    return jax.vmap(lambda row, begin, new: lax.dynamic_update_slice(row, new, (begin,)))(
        history_BT, begin_B, tokens_BN
    )


def _followers(history_T: jax.Array, position: jax.Array, size: int, num: int) -> jax.Array:
    """The `num` tokens after the last earlier occurrence of the `size` tokens that end at a position.

    >>> _followers(jnp.asarray([1, 2, 3, 9, 1, 2, 4, 7, 1, 2, 0, 0]), jnp.int32(9), size=2, num=3)
    Array([4, 7, 1], dtype=int32)
    """
    ends = jnp.arange(len(history_T), dtype=jnp.int32)
    is_same = ends < position
    for back in range(size):
        is_same &= (jnp.roll(history_T, back) == history_T[position - back]) & (ends >= back)
    last = jnp.where(is_same, ends, -1).max()
    return lax.dynamic_slice(history_T, (last + 1,), (num,))


class Round(NamedTuple):
    """What a step of speculative decoding returns.

    Args:
      tokens: int32[batch, num_drafts + 1]. The model's own tokens; the first `accepted + 1` are in the answer.
      accepted: int32[batch]. How many drafts are.
      turn, cache, state: for the next step.
    """

    tokens: Any
    accepted: Any
    turn: Turn
    cache: Any
    state: Any


@dataclass(frozen=True)
class Speculation:
    """The two programs of speculative decoding.

    Args:
      decoding: the settings of the model, with `num_drafts`.
      drafter: proposes the drafts.
    """

    decoding: Decoding
    drafter: Drafter

    def compile_prefill(self) -> Callable[..., Any]:
        """(params, drafter's params, prompts) -> (the first turn, the cache, the drafter's state)."""

        def prefill(params: Any, draft_params: Any, prompts: Turn) -> tuple[Turn, KVCache, Any]:
            turn, cache = self.decoding.prefill(params, prompts)
            return turn, cache, self.drafter.begin(draft_params, prompts, turn)

        arguments = (structs(self.decoding.params), self.drafter.params, self.decoding.prompts)
        out = (self.decoding.turn, structs(self.decoding.cache), self.drafter.state)
        return compile_program(trace(prefill, arguments, shardings(out)))

    def compile_round(self) -> Callable[..., Any]:
        """(params, drafter's params, turn, cache, state) -> `Round`. Cache and state are donated."""
        decoding = self.decoding
        drafter = self.drafter
        held = (decoding.turn, structs(decoding.cache), drafter.state)
        tokens = decoding.per_row(decoding.num_rows, decoding.num_drafts + 1)
        out = Round(tokens, decoding.per_row(decoding.num_rows), *held)
        arguments = (structs(decoding.params), drafter.params, *held)
        return compile_program(trace(self._round, arguments, shardings(out), donate=(3, 4)))

    def _round(self, params: Any, draft_params: Any, turn: Turn, cache: KVCache, state: Any) -> Round:
        drafts, state = self.drafter.propose(draft_params, state, turn)
        tokens, cache = self._own_tokens(params, turn, drafts, cache)
        state = self.drafter.observe(state, turn, tokens)
        accepted = num_accepted(drafts, tokens)
        newest = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
        # Rows that have all their tokens stay at the last slots, while others go on.
        last = self.decoding.prompt_len + self.decoding.max_tokens - 1
        positions = jnp.minimum(turn.positions + accepted + 1, last)
        return Round(tokens, accepted, Turn(newest, positions), cache, state)

    def _own_tokens(self, params: Any, turn: Turn, drafts: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """The tokens that the model samples after a turn and after each draft, int32[batch, num_drafts + 1]."""
        decoding = self.decoding
        offsets = jnp.arange(decoding.num_drafts + 1, dtype=jnp.int32)
        rows = jnp.arange(decoding.num_rows, dtype=jnp.int32)
        positions = turn.positions[:, None] + offsets
        batch = {
            "tokens": jnp.concatenate([turn.tokens[:, None], drafts], axis=1),
            "positions": positions,
            "last": jnp.broadcast_to(offsets, positions.shape),
            "rows": rows,
        }
        logits, cache = decoding.continued_logits(params, batch, cache)

        def select(logits: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
            each = jnp.repeat(rows, positions.shape[1])
            flat = logits.reshape(-1, logits.shape[-1])
            chosen = sample(flat, each, positions.reshape(-1), decoding.sampling, decoding.model.vocab_size)
            return chosen.reshape(positions.shape)

        per_row = decoding.ctx.pspec("batch")
        in_specs = (decoding.ctx.pspec("batch", "seq", "vocab"), per_row, per_row)
        return on_shards(select, decoding.ctx, in_specs, per_row)(logits, rows, positions + 1), cache


def num_accepted(drafts_BN: jax.Array, tokens_BM: jax.Array) -> jax.Array:
    """How many first drafts of each row are the model's own tokens."""
    is_own = drafts_BN == tokens_BM[:, : drafts_BN.shape[1]]
    return jnp.cumprod(is_own.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)


@dataclass(kw_only=True)
class SpeculativeGenerator(Generator):
    """Answers batches of prompts by speculative decoding.

    Args:
      drafter: proposes tokens.
      restore_draft: structs with shardings -> the drafter's parameters.
      proposed, accepted: drafts of the last batch, in rows that were not finished.
    """

    drafter: Drafter
    restore_draft: Callable[[Any], Any] = lambda structs: structs
    proposed: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        speculation = Speculation(self.decoding, self.drafter)
        self.prefill = speculation.compile_prefill()
        self.round = speculation.compile_round()
        self.params = self.restore(structs(self.decoding.params))
        self.draft_params = self.restore_draft(self.drafter.params)

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else 0.0

    def lists(self, prompts: Sequence[Ids]) -> Iterator[list[list[int]]]:
        """The new tokens of each prompt for each step, at least one until it has all its tokens."""
        self.proposed = 0
        self.accepted = 0
        turn, cache, state = self.prefill(self.params, self.draft_params, self._placed(prompts))
        yield [[token] for token in on_host(turn.tokens)[: len(prompts)].tolist()]
        lengths = np.ones(len(prompts), np.int64)
        while (lengths < self.decoding.max_tokens).any():
            tokens, accepted, turn, cache, state = self.round(self.params, self.draft_params, turn, cache, state)
            tokens, accepted = (on_host(x)[: len(prompts)] for x in (tokens, accepted))
            room = np.maximum(self.decoding.max_tokens - lengths, 0)
            self.proposed += int(np.minimum(room, self.decoding.num_drafts).sum())
            self.accepted += int(np.minimum(room, accepted).sum())
            num = np.minimum(room, accepted + 1)
            lengths += num
            yield [row[:n].tolist() for row, n in zip(tokens, num, strict=True)]
