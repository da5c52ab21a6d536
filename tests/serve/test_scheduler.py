"""The scheduler against a cache that remembers what was written: each row reads its own tokens, and nothing leaks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.serve import scheduler as scheduling
from meshpar.serve.pages import PagePool
from meshpar.serve.scheduler import Capacity, Chunk, Plan, QueueFullError, Request, Row, Scheduler

SMALL = Capacity(num_shards=2, slots=3, pages=9, page_size=2, max_len=12, chunk=3, max_queue=99)


class RememberedCache:
    """Stands for an engine. A slot of a page holds all tokens up to its own, on which keys and values depend."""

    def __init__(self, capacity: Capacity):
        self.capacity = capacity
        self.slots: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def run(self, plan: Plan) -> tuple[list[int], list[int]]:
        for chunk in plan.chunks:
            if chunk:
                self.compute(chunk.row, len(chunk.tokens))
        for row in plan.rows:
            if row:
                self.compute(row, 1)
        return [sum(chunk.row.tokens) % 5 if chunk else 0 for chunk in plan.chunks], [
            sum(row.tokens) % 5 if row else 0 for row in plan.rows
        ]

    def compute(self, row: Row, num: int) -> None:
        """Reads what is said to be cached, and writes the next tokens."""
        for position in range(row.num_cached):
            assert self.slots[self.slot(row, position)] == tuple(row.tokens[: position + 1]), "a foreign token"
        for position in range(row.num_cached, row.num_cached + num):
            self.slots[self.slot(row, position)] = tuple(row.tokens[: position + 1])

    def slot(self, row: Row, position: int) -> tuple[int, int, int]:
        page, place = divmod(position, self.capacity.page_size)
        return row.slot // self.capacity.slots, row.pages[page], place


def run(requests: list[Request], cancelled: set[int], capacity: Capacity = SMALL) -> tuple[Scheduler, dict[int, int]]:
    """Answers requests, some of which are cancelled after a turn. Returns the number of tokens of each."""
    scheduler = Scheduler(capacity)
    cache = RememberedCache(capacity)
    counts = dict.fromkeys(range(len(requests)), 0)
    numbers = {request: number for number, request in enumerate(requests)}
    scheduler.submit(requests)
    turn = 0
    while not scheduler.is_idle:
        plan = scheduler.plan()
        assert not plan.is_empty, "requests wait, and nothing is computed"
        computed = cache.run(plan)
        if turn in cancelled:
            scheduler.end(requests[turn % len(requests)])
        for request, token in scheduler.advance(plan, *computed):
            assert 0 <= token < 5
            counts[numbers[request]] += 1
            if counts[numbers[request]] == request.max_tokens:
                scheduler.end(request)
        turn += 1
    return scheduler, counts


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
@given(requests_, st.sets(st.integers(0, 20)))
def test_each_row_reads_its_own_tokens_and_nothing_leaks(requests, cancelled):
    scheduler, counts = run(requests, cancelled)
    for pool in scheduler.pools:
        assert pool.num_held == 0
        assert pool.num_available == SMALL.pages
    for number, request in enumerate(requests):
        assert counts[number] == request.max_tokens or number in {turn % len(requests) for turn in cancelled}


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
        scheduler.advance(plan, [3], [0])
        scheduler.end(request)


def test_the_pages_of_an_answer_are_reused_by_the_next_turn_of_a_chat():
    scheduler = Scheduler(Capacity(slots=1, pages=9, page_size=2, max_len=12, chunk=8))
    request = Request(prompt=[1, 2, 3], max_tokens=3)
    scheduler.submit([request])
    for token in (4, 5, 6):
        scheduler.advance(scheduler.plan(), [token], [token])
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
        scheduler.advance(plan, [9, 9], [9] * 4)
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
        run(
            [Request(prompt=drawn.choices([0, 1], [1, 4], k=n), max_tokens=most) for n, most in lengths],
            {2, 5},
            TIGHT,
        )


def planted_digest_of_one_page(tokens: Any, page_size: int) -> Any:
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
        Scheduler, "_chunk",
        lambda scheduler, shard: next((Chunk(row, row.request.prompt[1:2]) for row in scheduler.rows if row), None),
    ),
}  # fmt: skip


def test_control_the_requests_of_the_planted_faults_are_answered():
    run_many()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, KeyError)):
        run_many()
