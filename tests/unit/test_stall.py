"""A stalling source of data is named, at intervals that double, by a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshpar.train.loop import stall as stall_module
from meshpar.train.loop.stall import Stall
from tests.unit.test_loop import Numbers, run


def test_warnings_come_after_30_s_and_when_the_wait_has_doubled():
    now = [1000.0]
    stall = Stall("jsonl corpus", clock=lambda: now[0])
    warnings = {}
    with stall.waiting(44):
        for second in range(250):
            now[0] = 1000.0 + second
            if text := stall.warning():
                warnings[second] = text
    assert list(warnings) == [30, 60, 120, 240]
    assert warnings[60].startswith("step 44 has waited 60 s for a batch, since ")
    assert warnings[60].endswith(": data from jsonl corpus stalls")
    now[0] += 1000
    assert stall.warning() is None


def test_control_a_source_that_is_only_slow_is_not_named():
    now = [0.0]
    stall = Stall("jsonl corpus", clock=lambda: now[0])
    for step in range(100):
        with stall.waiting(step):
            now[0] += 29
            assert stall.warning() is None


@dataclass
class Stalling(Numbers):
    """A data set that yields batch 5, which is step 6's, only after the warning."""

    warned: threading.Event = field(default_factory=threading.Event)

    def batches(self, start: int = 0, rows: Any = None) -> Iterator[dict[str, np.ndarray]]:
        for index in range(start, self.length):
            if index == 5:
                assert self.warned.wait(60)
            yield self.batch(index)


def test_the_loop_warns_while_it_waits_and_then_goes_on(tmp_path, monkeypatch):
    data = Stalling()
    warnings = []

    def say(text: str) -> None:
        warnings.append(text)
        if "step 6 has waited" in text:  # with this clock, a look may fall into the wait of any step
            data.warned.set()

    now = iter(range(0, 10**9, 40))  # each look at the clock takes 40 s
    monkeypatch.setattr(stall_module, "say", say)
    monkeypatch.setattr(stall_module, "LOOK_S", 0.001)
    monkeypatch.setattr("meshpar.train.loop.loop.Stall", lambda source: Stall(source, clock=lambda: float(next(now))))
    assert run(tmp_path, train=data, source="jsonl corpus").step == 10
    assert any("step 6 has waited" in text and "data from jsonl corpus stalls" in text for text in warnings)
