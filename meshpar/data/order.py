"""The order in which a run reads rows, and how it goes on when the batches are others than before.

The position in the data is the number of rows read, not of steps: a run that resumes with another batch size, other
weights of a mixture or shorter rows reads each row of an epoch that was not read, once. Where that is impossible it is
refused, with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from meshpar.data.round_robin import WeightedRoundRobin, whole_weights
from meshpar.data.weights import FROM_ONE_PART, Phase, WeightSchedule
from meshpar.errors import DataError, DataWarning, Problems

BATCHES = ("batch_size", "seq_len", "held_out_fraction", "held_out_rows", "documents_in_row", "if_changed")
"""The keys that a mixture has for all of its parts."""
ELSEWHERE = ("cache", "path", "workers", "held_out_rows", "held_out_path", "dims", "skip_corrupt")
"""Keys that may differ while the documents are the same: checksums tell whether the files are."""


@dataclass(frozen=True)
class Order:
    """Which row is read when.

    Args:
      first: the number of the row with which step 0 would begin, if all steps had had the batch size of now.
      since: the number of rows that were read when the parts got their weights.
      pieces: the number of rows into which each row of the shuffled order is cut.
      before: for each part, the rows that were read of it before `since`; empty if none was.
    """

    first: int = 0
    since: int = 0
    pieces: int = 1
    before: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"before": list(self.before)}

    def turns(self, phases: tuple[Phase, ...], batch_size: int, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each row int64[n] of all, from `since` on: its part, and the number of earlier rows of this part."""
        stretches = _stretches(self, phases, batch_size)
        which = np.searchsorted([stretch.start for stretch in stretches], at, side="right") - 1
        part, turn = np.zeros((2, len(at)), np.int64)
        for i in np.unique(which):
            here = which == i
            part[here], turn[here] = _round_robin(stretches[i].weights).of(at[here] - stretches[i].start)
            turn[here] += np.array(stretches[i].before)[part[here]]
        return part, turn

    def read_of_parts(self, phases: tuple[Phase, ...], batch_size: int, rows: int) -> tuple[int, ...]:
        """How many of the first `rows` rows are of each part."""
        last = [stretch for stretch in _stretches(self, phases, batch_size) if stretch.start <= rows][-1]
        return tuple(map(int, _round_robin(last.weights).counts(rows - last.start) + np.array(last.before)))


class _Stretch(NamedTuple):
    """Rows of the same weights, from row `start` on, and the rows that were read of each part before."""

    start: int
    weights: tuple[int, ...]
    before: tuple[int, ...]


@lru_cache(maxsize=4)
def _stretches(order: Order, phases: tuple[Phase, ...], batch_size: int) -> list[_Stretch]:
    """The phases that have rows from `order.since` on. A phase begins with the first row of its step."""
    starts = [max(order.since, order.first + phase.step * batch_size) for phase in phases]
    starts[0] = order.since
    stretches: list[_Stretch] = []
    before = np.array(order.before or [0] * len(phases[0].weights))
    for phase, start, end in zip(phases, starts, [*starts[1:], None], strict=True):
        if end is None or end > start:
            stretches.append(_Stretch(start, phase.weights, tuple(map(int, before))))
            before = before + (0 if end is None else _round_robin(phase.weights).counts(end - start))
    return stretches


@lru_cache(maxsize=128)
def _round_robin(weights: tuple[int, ...]) -> WeightedRoundRobin:
    return WeightedRoundRobin(weights)


def resumed(saved: Mapping[str, Any], was: Mapping[str, Any], now: Mapping[str, Any], step: int, seed: int) -> Order:
    """The order of a run that resumes at a step.

    Args:
      saved: the data position in the checkpoint, `meta["data"]`.
      was, now: the run's `data` in the checkpoint, and as it is, as JSON data.

    Raises:
      DataError: the rows that were not read cannot all be read once, and `if_changed` is `refuse`.

    Warns:
      DataWarning: the same, and `if_changed` is `allow`: reading goes on after as many tokens in the rows as they are.
    """
    order = _saved_order(saved.get("order"), len(_parts(was)))
    rows = saved["rows_read"] if saved["rows_read"] is not None else step * was["batch_size"]
    old, new = was.get("seq_len", 1), now.get("seq_len", 1)  # rows of arrays have none
    phases, phases_now = _phases(was), _phases(now)
    problems = Problems()
    if saved["seed"] != seed:
        problems.add("seed", f"was {saved['seed']}, is {seed}: it determines the order of the rows")
    for key, (before, after) in _differences(was, now).items():
        problems.add(f"data.{key}", f"was {before}, is {after}: it determines what the rows are")
    is_repacked = old != new and any(part["kind"] == "chat" for part in _parts(now))
    if is_repacked:
        what = f"was {old}, is {new}: conversations are packed in another way into rows of another length"
        problems.add("data.seq_len", what)
    kept = order
    moved = len(phases) > 1 and was["batch_size"] != now["batch_size"]  # steps, and so phases, begin at other rows
    if not is_repacked and (moved or (phases, old) != (phases_now, new)):
        read = order.read_of_parts(phases, was["batch_size"], rows)
        kept = _in_new_phase(order, rows, read, old, new, problems)
    if problems.found:
        _refuse_or_warn(problems, step, now["if_changed"] == "allow")
        rows = rows * old // new
        kept = Order()
    elif old != new:
        rows = kept.since  # which counts rows as they are now
    return Order(rows - step * now["batch_size"], kept.since, kept.pieces, kept.before)


def _saved_order(saved: Mapping[str, Any] | None, num_parts: int) -> Order:
    """The order in a checkpoint; that of steps in an old one."""
    if not saved:
        return Order()
    if len(saved["before"]) not in (0, num_parts):
        raise DataError(f"the checkpoint has the position of {len(saved['before'])} corpora, and {num_parts} corpora")
    return Order(saved["first"], saved["since"], saved["pieces"], tuple(saved["before"]))


def _in_new_phase(
    order: Order, rows: int, read: tuple[int, ...], old: int, new: int, problems: Problems
) -> Order:  # fmt: skip
    """The order from `rows` on, in which the parts have other weights, or the rows another length.

    Args:
      read: how many of the rows are of each part.
    """
    whole = old * order.pieces
    if whole % new:
        what = f"was {old}, is {new}: a new row would have tokens of rows that were read and of others"
        problems.add("data.seq_len", what, f"a length that divides {whole}, the length of the rows at the beginning")
    elif old != new and any(num * old % new for num in (rows, *read)):
        what = f"was {old}, is {new}: {rows} rows of {old} tokens were read, which end inside of a longer row"
        problems.add("data.seq_len", what, f"data.seq_len={old} until a multiple of {new // old} rows is read")
    return Order(0, rows * old // new, max(1, whole // new), tuple(num * old // new for num in read))


def _refuse_or_warn(problems: Problems, step: int, allowed: bool) -> None:
    heading = f"from step {step} on, rows would be read that were read before, and others would not be read:"
    if allowed:
        warnings.warn("\n".join([heading, *map(str, problems.found)]), DataWarning, stacklevel=4)
        return
    fix = "the values of the checkpoint resume exactly; data.if_changed=allow goes on after as many tokens as were read"
    problems.add("data.if_changed = refuse", "the run would not say that its data are not read evenly", fix)
    problems.raise_any(DataError, heading)


def _parts(data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [part["data"] for part in data["parts"]] if data["kind"] == "mixture" else [data]


def _phases(data: Mapping[str, Any]) -> tuple[Phase, ...]:
    if data["kind"] != "mixture":
        return FROM_ONE_PART
    if data.get("weights"):
        return TypeAdapter(WeightSchedule).validate_python(data["weights"]).phases
    return (Phase(0, whole_weights([part["weight"] for part in data["parts"]])),)


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> its two values, for each key that determines the documents or how they are split."""
    different = {}
    if was["held_out_fraction"] != now["held_out_fraction"]:
        different["held_out_fraction"] = (was["held_out_fraction"], now["held_out_fraction"])
    old, new = _parts(was), _parts(now)
    if len(old) != len(new):
        return different | {"parts": (f"{len(old)} corpora", f"{len(new)} corpora")}
    for i, (before, after) in enumerate(zip(old, new, strict=True)):
        where = f"parts.{i}.data." if now["kind"] == "mixture" else ""
        for key in before.keys() & after.keys():  # an older meshpar did not have all keys
            values = [_without_paths(part.get(key)) for part in (before, after)]
            if key not in (*BATCHES, *ELSEWHERE) and values[0] != values[1]:
                different[where + key] = (before.get(key), after.get(key))
    return dict(sorted(different.items()))


def _without_paths(value: Any) -> Any:
    return {key: x for key, x in value.items() if key not in ELSEWHERE} if isinstance(value, dict) else value
