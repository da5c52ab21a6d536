"""Runs of rows of arrays, from configs as plain data."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar import Run, fit
from meshpar.experiment.prepare import prepare
from meshpar.interop import user_code

OWN = Path(__file__).with_name("own.py")
BASE: dict[str, Any] = {
    "model": {"kind": "import", "target": "tests.tasks.own:MLP"},
    "data": {"kind": "import", "target": "tests.tasks.own:items", "batch_size": 16, "held_out_fraction": 0.25},
    "loss": {"kind": "classify"},
    "optim": {"kind": "adamw", "lr": 1e-2},
    "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
    "rules": {"preset": ["fsdp", "megatron"], "unnamed": []},
    "num_steps": 4,
    "loggers": [],
}


def mapping(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """The base with other sections; the keys of a mapping are merged."""
    found = copy.deepcopy(BASE) | {"run_dir": str(run_dir)}
    for key, value in changes.items():
        is_merged = isinstance(value, dict) and isinstance(found.get(key), dict) and key != "mesh"
        found[key] = found[key] | value if is_merged else value
    return found


def run(run_dir: Path, **changes: Any) -> Run:
    return of(mapping(run_dir, **changes))


def of(mapping: dict[str, Any]) -> Run:
    user_code.name(OWN)
    made = Run.model_validate(mapping)
    named = ((made.model, "target"), (made.loss, "target"), (made.data, "target"), (made.data, "transform"))
    for section, key in named:
        if ":" in (target := getattr(section, key, None) or ""):
            user_code.permit(target, None)
    for callback in made.callbacks:
        user_code.permit(callback.target, None)
    return made


def trained(run_dir: Path, **changes: Any) -> Any:
    return fit(run(run_dir, **changes), json=True)


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


ONE = ({"data": 1}, ["replicated"])


def after_steps(made, num_devices=8, num_steps=3):
    """The parameters and statistics after some steps, and the sums of an evaluation."""
    prepared = prepare(made, made.mesh.build(jax.devices()[:num_devices]))
    state = prepared.compile_init()()
    step = prepared.compile_step()
    data, held_out = made.data.datasets(made.seed, prepared.bounds)
    rows = np.arange(made.data.batch_size)
    for index in range(num_steps):
        state, metrics = step(step.prepare(state), prepared.put(data.rows(index, rows)))
    state = step.finish(state)
    last = prepared.put(held_out.rows(len(held_out) - 1, rows))
    sums = prepared.compile_evaluation()(state.params, last, state.carried)
    return jax.device_get((state.params, state.carried, sums, metrics["loss"]))


def assert_close(expected: Any, found: Any, atol: float) -> None:
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=0)
