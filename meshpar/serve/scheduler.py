"""Decides which requests the programs compute: a queue, the slots of the batch, and the pages of the cache.

It is plain Python, without arrays. A slot is a row of the compiled decode step. The first request of the queue begins
when there is a free slot, and enough free pages for its prompt and its longest answer. So no running request ever waits
for pages. A prompt is computed in chunks, one in each turn, between the decode steps of the other rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Any, NamedTuple

from meshpar.serve.pages import PagePool, digests_of


class QueueFullError(Exception):
    """The queue has no room for a request."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The sizes of the batch and of the cache. Each shard of the batch has rows and pages of its own.

    Args:
      num_shards: shards of the batch.
      slots: rows of a shard that are decoded together.
      pages: pages of a shard.
      page_size: tokens of a page.
      max_len: most tokens of a prompt and its answer together.
      chunk: tokens of a prompt that are computed in a turn.
      all_prompts: whether a turn computes a chunk of each prompt that is not complete; else, in each shard, of one.
      max_queue: most requests in the queue.
    """

    num_shards: int = 1
    slots: int = 16
    pages: int = 1024
    page_size: int = 16
    max_len: int = 1024
    chunk: int = 128
    all_prompts: bool = False
    max_queue: int = 256

    @classmethod
    def of_rows(
        cls, num_shards: int, num_rows: int, max_len: int, page_size: int | None = None, **more: Any
    ) -> Capacity:
        """With enough pages for rows of the longest length.

        Args:
          num_rows: rounded up to a multiple of the shards.
          page_size: None for one page a row.
          more: the other fields.
        """
        slots = -(-num_rows // num_shards)
        page_size = page_size or max_len
        pages = slots * -(-max_len // page_size)
        return cls(num_shards=num_shards, slots=slots, pages=pages, page_size=page_size, max_len=max_len, **more)

    @property
    def num_rows(self) -> int:
        """Rows of the decode step."""
        return self.num_shards * self.slots

    @property
    def num_chunks(self) -> int:
        """Chunks of a turn."""
        return self.num_rows if self.all_prompts else self.num_shards

    @property
    def pages_of_row(self) -> int:
        """Pages of the longest row."""
        return self.num_pages(self.max_len)

    def num_pages(self, num_tokens: int) -> int:
        """How many pages so many tokens need."""
        return -(-num_tokens // self.page_size)


@dataclass(eq=False, kw_only=True)
class Request:
    """A prompt to answer.

    Args:
      prompt: token ids, at least one.
      max_tokens: most tokens of the answer; with 0, one is computed and thrown away, as where a prompt is scored.
      sampling: how tokens are sampled, which the scheduler passes on.
      index: the index among the prompts with the same seed.
      adjustment: what is added to logits; passed on too.
      constraint: limits the tokens of the answer by those before; passed on too.
      scores: whether each token of the answer is scored.
      scores_prompt: whether those of the prompt are too. Then no page of another request is reused for it.
      adapter: the number of the adapter that computes it, whose pages no other adapter reuses; 0 for the model itself.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Any = None
    index: int = 0
    adjustment: Any = None
    constraint: Any = None
    scores: bool = False
    scores_prompt: bool = False
    adapter: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.prompt) + max(1, self.max_tokens)


@dataclass(eq=False)
class Row:
    """A request in a slot.

    Args:
      number: rows are numbered in the order in which they begin.
      pages: the pages of its tokens, in order.
      tokens: the prompt, and the answer so far.
      num_cached: how many of the tokens have keys and values in the cache.
      num_reused: how many tokens of the prompt were in the cache before the row began.
      digests: yields the digest of each page when it becomes full.
      prompt_scores: of the tokens of the prompt after the first, if they are asked for.
    """

    number: int
    request: Request
    slot: int
    pages: list[int]
    tokens: list[int]
    num_cached: int
    num_reused: int
    digests: Iterator[bytes]
    prompt_scores: list[Any] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        """The answer so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def is_decoding(self) -> bool:
        """Whether the whole prompt has been computed."""
        return self.num_cached >= len(self.request.prompt)

    @property
    def num_missing(self) -> int:
        """How many tokens can still be added to the answer."""
        return self.request.num_tokens - len(self.tokens)


class Chunk(NamedTuple):
    """The tokens of a prompt that are computed in a turn."""

    row: Row
    tokens: Sequence[int]


class TurnPlan(NamedTuple):
    """What the programs compute in one turn.

    Args:
      chunks: for each shard of the batch the chunk of a prompt that is computed, or None; with `all_prompts` for each
        slot.
      rows: for each slot the row that is decoded, or None.
    """

    chunks: tuple[Chunk | None, ...]
    rows: tuple[Row | None, ...]

    @property
    def is_empty(self) -> bool:
        return not any(self.chunks) and not any(self.rows)


class Computed(NamedTuple):
    """What the programs computed in one turn.

    Args:
      first: for each chunk the token after it, which is the first of an answer if the prompt ends there.
      following: for each slot the next tokens of its row: one, and more if drafts were accepted.
      num_drafts: the drafts that were checked.
      chunk_scores: index of a chunk -> the scores of the tokens after its own, if they are asked for.
      scores: slot -> the scores of its next tokens, if they are asked for.
    """

    first: Sequence[int]
    following: Sequence[Sequence[int]]
    num_drafts: int = 0
    chunk_scores: Mapping[int, Sequence[Any]] = {}
    scores: Mapping[int, Sequence[Any]] = {}

    @property
    def num_accepted(self) -> int:
        """The drafts that were accepted."""
        return sum(len(tokens) - 1 for tokens in self.following if tokens)


class Sampled(NamedTuple):
    """The next token of a request, and its score if it is asked for."""

    request: Request
    token: int
    score: Any = None


@dataclass
class Scheduler:
    """The requests of a server.

    Args:
      capacity: the sizes of the programs.

    >>> scheduler = Scheduler(Capacity(slots=1, pages=4, page_size=2, max_len=8, chunk=2))
    >>> request = Request(prompt=[5, 6, 7], max_tokens=2)
    >>> scheduler.submit([request])
    >>> for _ in range(3):
    ...     plan = scheduler.plan()
    ...     print([list(chunk.tokens) for chunk in plan.chunks if chunk], [row.tokens for row in plan.rows if row])
    ...     sampled = scheduler.advance(plan, Computed(first=[8], following=[[9]]))
    [[5, 6]] []
    [[7]] []
    [] [[5, 6, 7, 8]]
    >>> scheduler.end(request)
    >>> scheduler.pools[0].num_held
    0
    """

    capacity: Capacity
    queue: deque[Request] = field(default_factory=deque)

    def __post_init__(self) -> None:
        capacity = self.capacity
        assert capacity.pages >= capacity.pages_of_row, "a request of max_len tokens would wait for ever"
        self.pools = [PagePool(capacity.pages) for _ in range(capacity.num_shards)]
        self.rows: list[Row | None] = [None] * capacity.num_rows
        self._numbers = count()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.queue and not any(self.rows)

    def submit(self, requests: Sequence[Request]) -> None:
        """Adds requests to the queue, all or none.

        Raises:
          QueueFullError: they do not fit into the queue.
        """
        assert all(request.num_tokens <= self.capacity.max_len for request in requests), "a request is too long"
        if len(self.queue) + len(requests) > self.capacity.max_queue:
            raise QueueFullError
        self.queue.extend(requests)

    def end(self, request: Request) -> None:
        """Ends a request, complete or not: releases its slot and its pages, or removes it from the queue.

        It may be called while a turn is computed, which then writes to pages that no request holds.
        """
        row = self.row_of(request)
        if row is not None:
            self.rows[row.slot] = None
            self._pool(row.slot).release(row.pages)
        elif request in self.queue:
            self.queue.remove(request)

    def row_of(self, request: Request) -> Row | None:
        """The row of a running request."""
        return next((row for row in self.rows if row is not None and row.request is request), None)

    def plan(self) -> TurnPlan:
        """Begins the requests for which there is room, and selects what the next turn computes."""
        while self.queue and self._begin(self.queue[0]):
            self.queue.popleft()
        decoded = tuple(row if row is not None and row.is_decoding else None for row in self.rows)
        return TurnPlan(tuple(chain.from_iterable(map(self._chunks, range(self.capacity.num_shards)))), decoded)

    def advance(self, plan: TurnPlan, computed: Computed) -> list[Sampled]:
        """Adds the tokens that a turn computed to their rows. Rows that were ended during the turn are skipped."""
        sampled: list[Sampled] = []
        for i, (chunk, token) in enumerate(zip(plan.chunks, computed.first, strict=True)):
            if chunk and self._is_current(chunk.row):
                self._cached(chunk.row, len(chunk.tokens))
                scores = list(computed.chunk_scores.get(i, ()))
                if chunk.row.is_decoding:
                    sampled.append(self._add(chunk.row, token, scores.pop() if scores else None))
                if chunk.row.request.scores_prompt:
                    chunk.row.prompt_scores.extend(scores)
        for slot, (row, tokens) in enumerate(zip(plan.rows, computed.following, strict=True)):
            if row and self._is_current(row):
                scores = computed.scores.get(slot) or [None] * len(tokens)
                for token, score in zip(tokens, scores, strict=True):  # an accepted draft has keys and values already
                    self._cached(row, 1)
                    sampled.append(self._add(row, token, score))
        return sampled

    def answered(self, compute: Callable[[TurnPlan], Computed]) -> Iterator[Sampled]:
        """Computes turns until no request is left. Yields each token of a request that has not ended."""
        while not self.is_idle:
            plan = self.plan()
            for sampled in self.advance(plan, compute(plan)):
                if self.row_of(sampled.request):
                    yield sampled

    def _begin(self, request: Request) -> bool:
        """Reserves a slot and pages, if there are enough.

        Shards are tried in the order of how much of the prompt they have in their cache, then of their free pages.
        """
        slots = self._free_slots()
        if not slots:
            return False
        size = self.capacity.page_size
        # The last token of a prompt is always computed: the first token of the answer is sampled from its logits.
        num_reusable = 0 if request.scores_prompt else (len(request.prompt) - 1) // size
        digests = list(islice(digests_of(request.prompt, size, request.adapter), num_reusable))

        def preference(slot: int) -> tuple[int, int]:
            pool = self._pool(slot)
            return len(pool.match(digests)), pool.num_available

        for slot in sorted(slots, key=preference, reverse=True):
            num_reused, _ = preference(slot)
            pages = self._pool(slot).reserve(digests, self.capacity.num_pages(request.num_tokens))
            if pages is not None:
                tokens = list(request.prompt)
                following = islice(digests_of(tokens, size, request.adapter), num_reused, None)
                reused = num_reused * size
                self.rows[slot] = Row(next(self._numbers), request, slot, pages, tokens, reused, reused, following)
                return True
        return False

    def _free_slots(self) -> list[int]:
        """The first free slot of each shard that has one."""
        slots = self.capacity.slots
        shards = (range(begin, begin + slots) for begin in range(0, len(self.rows), slots))
        found = (next((slot for slot in shard if self.rows[slot] is None), None) for shard in shards)
        return [slot for slot in found if slot is not None]

    def _chunks(self, shard: int) -> list[Chunk | None]:
        """The next chunks of a shard: of the first row whose prompt is not complete, or of all of them."""
        slots = self.capacity.slots
        missing = [row and (None if row.is_decoding else row) for row in self.rows[shard * slots : (shard + 1) * slots]]
        if not self.capacity.all_prompts:
            missing = [min(filter(None, missing), key=lambda row: row.number, default=None)]
        size = self.capacity.chunk
        return [row and Chunk(row, row.request.prompt[row.num_cached : row.num_cached + size]) for row in missing]

    def _cached(self, row: Row, num_tokens: int) -> None:
        """Counts tokens as cached, and registers the pages that became full."""
        size = self.capacity.page_size
        before = row.num_cached // size
        row.num_cached += num_tokens
        for page in row.pages[before : row.num_cached // size]:
            self._pool(row.slot).register(page, next(row.digests))

    def _add(self, row: Row, token: int, score: Any) -> Sampled:
        row.tokens.append(token)
        return Sampled(row.request, token, score)

    def _is_current(self, row: Row) -> bool:
        return self.rows[row.slot] is row

    def _pool(self, slot: int) -> PagePool:
        return self.pools[slot // self.capacity.slots]
