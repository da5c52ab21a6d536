"""Compares whole steps with attention in blocks and with the reference, interleaved in one process."""

from __future__ import annotations

from typing import Any

import compare
import measure


def of_256_tokens() -> dict[str, Any]:
    return _largest({"single": 2, "data": 16}, 256)


def of_2048_tokens() -> dict[str, Any]:
    return _largest({"single": 1}, 2048)


def _largest(rows: dict[str, int], seq_len: int) -> dict[str, Any]:
    """The largest ratio of all layouts, and the measurements of each.

    Args:
      rows: layout -> the number of rows of a batch.
    """
    found = {name: measure.in_process(f"measure_attention.ratios({name!r}, {rows[name]}, {seq_len})") for name in rows}
    return {"value": max(row["cpu"] for row in found.values()), "layouts": found}


def ratios(name: str, num_rows: int, seq_len: int, num_rounds: int = 9) -> dict[str, float]:
    """Ratios of CPU seconds, wall seconds and temporary bytes: a step in blocks over a step with the reference."""
    programs = {}
    temporaries = {}
    for kind in ("reference", "blocks"):
        changes = (f"model.attention={kind}", f"data.seq_len={seq_len}")
        run = compare.prepared(compare.LAYOUTS[name], num_rows, *changes)
        step = run.compile_step()
        programs[kind] = _stepping(run, step)
        temporaries[kind] = step.compiled.memory_analysis().temp_size_in_bytes
        programs[kind]()
    measured = compare.medians(compare.interleaved(programs, num_rounds))
    return {
        "cpu": measured["cpu_s"]["blocks"] / measured["cpu_s"]["reference"],
        "wall": measured["wall_s"]["blocks"] / measured["wall_s"]["reference"],
        "temporaries": temporaries["blocks"] / temporaries["reference"],
    }


def _stepping(run: Any, step: Any) -> Any:
    batch = run.put(run.run.data.train(run.run.seed)[0])

    def one(state: Any) -> tuple[Any, Any]:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return compare.stepping(one, step.prepare(run.compile_init()()))
