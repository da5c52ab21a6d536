"""The scheduler against a cache that remembers what was written: each row reads its own tokens, and nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.serve import scheduler as scheduling
from meshpar.serve.drafts import Drafter, accepted
from meshpar.serve.pages import PagePool
from meshpar.serve.scheduler import Capacity, Chunk, Computed, QueueFullError, Request, Row, Scheduler, TurnPlan

SMALL = Capacity(num_shards=2, slots=3, pages=9, page_size=2, max_len=12, chunk=3, max_queue=99)


class RememberedCache:
    """Stands for an engine. A slot of a page holds all tokens up to its own, on which keys and values depend.

    Args:
      drafter: proposes tokens, which are written to pages before they are checked.
    """

    def __init__(self, capacity: Capacity, drafter: Drafter | None = None):
        self.capacity = capacity
        self.drafter = drafter
        self.slots: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def run(self, plan: TurnPlan) -> Computed:
        for chunk in plan.chunks:
            if chunk:
                self.compute(chunk.row, chunk.row.tokens, len(chunk.tokens))
        first = [following(chunk.row.tokens) if chunk else 0 for chunk in plan.chunks]
        drafts = self.drafter.propose(plan.rows) if self.drafter else [[] for _ in plan.rows]
        checked = [self.check(row, new) if row else [] for row, new in zip(plan.rows, drafts, strict=True)]
        return Computed(first, checked, sum(map(len, drafts)))

    def check(self, row: Row, drafts: list[int]) -> list[int]:
        tokens = [*row.tokens, *drafts]
        self.compute(row, tokens, 1 + len(drafts))
        return accepted(drafts, [following(tokens[: len(row.tokens) + i]) for i in range(1 + len(drafts))])

    def compute(self, row: Row, tokens: list[int], num: int) -> None:
        """Reads what is said to be cached, and writes the next tokens."""
        for position in range(row.num_cached):
            assert self.slots[self.slot(row, position)] == tuple(row.tokens[: position + 1]), "a foreign token"
        for position in range(row.num_cached, row.num_cached + num):
            self.slots[self.slot(row, position)] = tuple(tokens[: position + 1])

    def slot(self, row: Row, position: int) -> tuple[int, int, int]:
        page, place = divmod(position, self.capacity.page_size)
        return row.slot // self.capacity.slots, row.pages[page], place


def following(tokens: list[int]) -> int:
    """The token of an answer."""
    return sum(tokens) % 5


class Guesses:
    """A drafter whose first drafts are right: a random number of them."""

    num_drafts = 4

    def __init__(self, seed: int):
        self.drawn = random.Random(seed)

    def prefill(self, chunks: Sequence[Chunk | None]) -> None:
        pass

    def propose(self, rows: Sequence[Row | None]) -> list[list[int]]:
        return [self.guess(row) if row else [] for row in rows]

    def guess(self, row: Row) -> list[int]:
        num_right = self.drawn.randint(0, 5)
        tokens = list(row.tokens)
        for i in range(min(self.num_drafts, row.num_missing - 1)):
            tokens.append(following(tokens) if i < num_right else 9)
        return tokens[len(row.tokens) :]


def run(
    requests: list[Request], cancelled: set[int], capacity: Capacity = SMALL, drafter: Drafter | None = None
) -> tuple[Scheduler, dict[int, list[int]]]:
    """Answers requests, some of which are cancelled after a turn. Returns the tokens of each."""
    scheduler = Scheduler(capacity)
    cache = RememberedCache(capacity, drafter)
    answers: dict[int, list[int]] = {number: [] for number in range(len(requests))}
    numbers = {request: number for number, request in enumerate(requests)}
    scheduler.submit(requests)
    turn = 0
    while not scheduler.is_idle:
        plan = scheduler.plan()
        assert not plan.is_empty, "requests wait, and nothing is computed"
        computed = cache.run(plan)
        if turn in cancelled:
            scheduler.end(requests[turn % len(requests)])
        for request, token, _ in scheduler.advance(plan, computed):
            assert 0 <= token < 5
            answer = answers[numbers[request]]
            answer.append(token)
            if len(answer) == request.max_tokens:
                scheduler.end(request)
        turn += 1
    return scheduler, answers


# Few different tokens, so that many prompts have the same beginning.
requests_ = st.lists(
    st.builds(
        lambda prompt, max_tokens: Request(prompt=prompt, max_tokens=max_tokens),
        st.lists(st.integers(0, 1), min_size=1, max_size=8),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(requests_, st.sets(st.integers(0, 20)), st.none() | st.builds(Guesses, st.integers(0, 99)))
def test_each_row_reads_its_own_tokens_and_nothing_leaks(requests, cancelled, drafter):
    scheduler, answers = run(requests, cancelled, drafter=drafter)
    for pool in scheduler.pools:
        assert pool.num_held == 0
        assert pool.num_available == SMALL.pages
    for number, request in enumerate(requests):
        expected = list(request.prompt)
        for _ in range(request.max_tokens):
            expected.append(following(expected))
        is_cancelled = number in {turn % len(requests) for turn in cancelled}
        assert answers[number] == expected[len(request.prompt) :] or is_cancelled


def test_accepted_drafts_shorten_an_answer_by_their_turns():
    request = Request(prompt=[1], max_tokens=9)
    scheduler = Scheduler(SMALL)
    cache = RememberedCache(SMALL, Guesses(0))
    cache.drafter.drawn.randint = lambda least, most: most
    scheduler.submit([request])
    lengths = [len(scheduler.advance(plan := scheduler.plan(), cache.run(plan))) for _ in range(3)]
    assert lengths == [1, 5, 3]


def test_a_prefix_is_computed_once():
    prompt = [1, 0, 1, 1, 0, 1, 1]
    scheduler = Scheduler(Capacity(slots=1, pages=9, page_size=2, max_len=12, chunk=8))
    for expected in (0, 6):
        request = Request(prompt=prompt, max_tokens=1)
        scheduler.submit([request])
        plan = scheduler.plan()
        chunk = plan.chunks[0]
        assert chunk is not None
        assert (chunk.row.num_reused, list(chunk.tokens)) == (expected, prompt[expected:])
        scheduler.advance(plan, Computed([3], [[]]))
        scheduler.end(request)


def test_the_pages_of_an_answer_are_reused_by_the_next_turn_of_a_chat():
    scheduler = Scheduler(Capacity(slots=1, pages=9, page_size=2, max_len=12, chunk=8))
    request = Request(prompt=[1, 2, 3], max_tokens=3)
    scheduler.submit([request])
    for token in (4, 5, 6):
        scheduler.advance(scheduler.plan(), Computed([token], [[token]]))
    scheduler.end(request)
    scheduler.submit([Request(prompt=[1, 2, 3, 4, 5, 6, 7], max_tokens=1)])
    chunk = scheduler.plan().chunks[0]
    assert chunk is not None
    assert list(chunk.tokens) == [5, 6, 7]  # 5 has keys and values, in a page that is not full


def test_requests_begin_in_order_and_wait_for_pages():
    scheduler = Scheduler(Capacity(slots=3, pages=6, page_size=2, max_len=12, chunk=8))
    large, larger, small = (Request(prompt=[i], max_tokens=n) for i, n in enumerate((7, 9, 1)))
    scheduler.submit([large, larger, small])
    scheduler.plan()
    assert list(scheduler.queue) == [larger, small]  # the small one would fit, and the larger one would wait for ever
    scheduler.end(large)
    scheduler.plan()
    assert not scheduler.queue


def test_prompts_of_a_shard_are_computed_one_after_the_other():
    scheduler = Scheduler(Capacity(num_shards=2, slots=2, pages=9, page_size=2, max_len=12, chunk=2))
    requests = [Request(prompt=[i, i, i], max_tokens=2) for i in range(4)]
    scheduler.submit(requests)
    seen = []
    for _ in range(4):
        plan = scheduler.plan()
        seen.append([list(chunk.tokens) if chunk else None for chunk in plan.chunks])
        scheduler.advance(plan, Computed([9, 9], [[9]] * 4))
    assert seen == [[[0, 0], [1, 1]], [[0], [1]], [[2, 2], [3, 3]], [[2], [3]]]


def test_a_queue_accepts_all_of_a_request_or_none():
    scheduler = Scheduler(Capacity(max_queue=3))
    scheduler.submit([Request(prompt=[1], max_tokens=1)] * 2)
    with pytest.raises(QueueFullError):
        scheduler.submit([Request(prompt=[1], max_tokens=1)] * 2)
    assert len(scheduler.queue) == 2


# Planted faults -----------------------------------------------------------------------------------------------------


TIGHT = Capacity(slots=3, pages=7, page_size=2, max_len=12, chunk=3, max_queue=99)


def run_many() -> None:
    """Requests that share pages, end at different times, and are followed by others that need those pages."""
    for seed in range(60):
        drawn = random.Random(seed)
        lengths = [(drawn.randint(1, 8), drawn.randint(1, 4)) for _ in range(12)]
        requests = [Request(prompt=drawn.choices([0, 1], [1, 4], k=n), max_tokens=most) for n, most in lengths]
        run(requests, {2, 5}, TIGHT, Guesses(seed) if seed % 2 else None)


def planted_digest_of_one_page(tokens: Any, page_size: int, adapter: int = 0) -> Any:
    for begin in range(0, 99, page_size):
        yield bytes(tokens[begin : begin + page_size])


def planted_release_of_all(pool: PagePool, pages: list[int]) -> None:
    """Forgets that other rows hold the pages too."""
    for page in pages:
        pool._holders[page] = 1
    RELEASE(pool, pages)


def planted_page_that_is_still_found(pool: PagePool) -> int:
    """Forgets to remove the prefix of a page that another row will fill."""
    return next(iter(pool._empty or pool._released))


RELEASE = PagePool.release
FAULTS = {
    "digests of single pages": (scheduling, "digests_of", planted_digest_of_one_page),
    "a release of others' pages": (PagePool, "release", planted_release_of_all),
    "a page that is still found": (PagePool, "_next", planted_page_that_is_still_found),
    "a chunk of another row": (
        Scheduler, "_chunks",
        lambda scheduler, shard: [next((Chunk(row, row.request.prompt[1:2]) for row in scheduler.rows if row), None)],
    ),
}  # fmt: skip


def test_control_the_requests_of_the_planted_faults_are_answered():
    run_many()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, KeyError)):
        run_many()
