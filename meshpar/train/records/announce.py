"""What a training says to people before its first step and after its last."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshpar.mesh.layout import describe_sizes
from meshpar.train.data.corpus import Batching
from meshpar.train.training import Training


def start(training: Training) -> str:
    """Devices, processes, mesh, parameters, tokens a step."""
    assert isinstance(training.mesh, Mesh)
    sizes = dict(training.mesh.shape)
    parameters = sum(spec.size for spec in jax.tree.leaves(training.specs))
    tokens = max(int(np.prod(spec.shape[:2])) for spec in training.batch_specs.values())
    parts = [
        f"{devices(list(training.mesh.devices.flat))} in {_number(jax.process_count(), 'process')}",
        f"mesh {describe_sizes(sizes)}",
        _number(parameters, "parameter"),
        f"{_number(tokens, 'token')} a step",
    ]
    return "; ".join(parts)


def devices(of: list[Any]) -> str:
    """How many of which kind; several CPU devices of one process are simulated.

    >>> devices(jax.devices()[:1])
    '1 cpu device'
    """
    simulated = "simulated " if of[0].platform == "cpu" and len(of) > jax.process_count() else ""
    return _number(len(of), f"{simulated}{of[0].device_kind} device")


def end(run_dir: Path, step: int, generates: bool) -> str:
    """Where the checkpoint is, and what can be done with it."""
    folder = shlex.quote(str(run_dir))
    command = f"meshpar generate {folder} --prompt TEXT" if generates else f"meshpar checkpoint show {folder}"
    return f"trained to step {step}: the checkpoint is {run_dir}/checkpoints/{step}\nnext: {command}"


def nothing(run_dir: Path, step: int, changed: Mapping[str, list[Any]]) -> str:
    """Why nothing was trained: the run directory holds a run that has ended.

    >>> print(nothing(Path("runs/a"), 20, {"optim.lr": [0.1, 0.2]}))
    meshpar: nothing was trained: runs/a holds a run that ended at step 20
      changed since then: optim.lr was 0.1, is 0.2
      run_dir=... makes this a run of its own; num_steps=..., above 20, trains the old one further
    """
    lines = [f"meshpar: nothing was trained: {run_dir} holds a run that ended at step {step}"]
    if changed:
        news = "; ".join(f"{key} was {old}, is {new}" for key, (old, new) in changed.items())
        lines.append(f"  changed since then: {news}")
    lines.append(f"  run_dir=... makes this a run of its own; num_steps=..., above {step}, trains the old one further")
    return "\n".join(lines)


def source(data: Batching) -> str:
    """What batches are read from.

    >>> from meshpar.train.data import Jsonl, Mixture, Text
    >>> source(Mixture(parts=[{"weight": 1, "data": Jsonl(path="a")}, {"weight": 1, "data": Text(path="b")}]))
    'jsonl a, text b'
    """
    named: dict[str, None] = {}
    for _, corpus in data.sources:
        kind: Any = corpus.model_dump(include={"kind", "path"})
        named[f"{kind['kind']} {kind.get('path', '')}".strip()] = None
    return ", ".join(named)


def _number(count: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{plural if count != 1 else ''}"
