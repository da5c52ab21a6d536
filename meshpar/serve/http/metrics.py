"""The metrics of a server, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from meshpar.serve.answer import Finish
from meshpar.serve.scheduler import Scheduler
from meshpar.serve.service import Observer

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics(Observer):
    """Counts tokens, answers and drafts. The state of the scheduler is read at each scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first = self._histogram("time_to_first_token_seconds", "From a request to its first token.")
        self._next = self._histogram("time_between_tokens_seconds", "From a token of an answer to the next one.")
        self._tokens = Counter("meshpar_serve_tokens", "Tokens of answers.", registry=self.registry)
        self._drafts = Counter("meshpar_serve_drafts", "Drafts that were checked.", registry=self.registry)
        self._accepted = Counter(
            "meshpar_serve_accepted_drafts", "Drafts that the model accepted.", registry=self.registry
        )
        self._answers = Counter(
            "meshpar_serve_answers", "Answers that have ended, by the reason.", ["finish"], registry=self.registry
        )

    def watch(self, scheduler: Scheduler) -> None:
        """Adds metrics of the scheduler: its queue, its slots and its pages."""
        pools = scheduler.pools
        self._gauge("queued_requests", "Requests in the queue.", lambda: len(scheduler.queue))
        self._gauge("running_requests", "Requests in slots.", lambda: sum(row is not None for row in scheduler.rows))
        self._gauge("pages", "Pages of the cache.", lambda: sum(pool.num_pages for pool in pools))
        self._gauge("held_pages", "Pages that requests hold.", lambda: sum(pool.num_held for pool in pools))
        self._gauge(
            "reusable_pages", "Pages with a prefix that no request holds.",
            lambda: sum(pool.num_reusable for pool in pools),
        )  # fmt: skip

    def text(self) -> bytes:
        """All metrics, in Prometheus' format."""
        return generate_latest(self.registry)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)
        self._tokens.inc()

    def next_token(self, seconds: float) -> None:
        self._next.observe(seconds)
        self._tokens.inc()

    def checked(self, num_drafts: int, num_accepted: int) -> None:
        self._drafts.inc(num_drafts)
        self._accepted.inc(num_accepted)

    def ended(self, finish: Finish | Literal["cancelled"]) -> None:
        self._answers.labels(finish).inc()

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"meshpar_serve_{name}", meaning, buckets=SECONDS, registry=self.registry)

    def _gauge(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        Gauge(f"meshpar_serve_{name}", meaning, registry=self.registry).set_function(read)
