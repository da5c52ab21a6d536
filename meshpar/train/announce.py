"""The messages that a training prints before its first step and after its last."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from meshpar.data.chat.rendered import Rendered
from meshpar.data.corpus import Batching
from meshpar.data.rows.config import RowData
from meshpar.data.rows.spec import COUNTED
from meshpar.data.tokenizer import TokenizerFile
from meshpar.mesh.layout import describe_sizes
from meshpar.train.training import Training


def start(training: Training) -> str:
    """Devices, processes, mesh, parameters, and tokens per step."""
    assert isinstance(training.mesh, Mesh)
    is_of_tokens = COUNTED not in training.batch_specs
    dims = slice(2 if is_of_tokens else 1)
    each = max(math.prod(spec.shape[dims]) for spec in training.batch_specs.values())
    parts = [
        f"{devices(list(training.mesh.devices.flat))} in {_count(jax.process_count(), 'process')}",
        f"mesh {describe_sizes(dict(training.mesh.shape))}",
        _count(sum(spec.size for spec in jax.tree.leaves(training.specs)), "parameter"),
        f"{_count(each, 'token' if is_of_tokens else 'row')} a step",
    ]
    if local := training.ctx.local:
        num_slices = training.mesh.shape[local.axis]
        more = " or more" if local.growth else ""
        parts.append(f"{num_slices} slices along {local.axis}, {_count(local.every, 'step')}{more} a round")
    return "; ".join(parts)


def devices(found: list[Any]) -> str:
    """The number of devices and their kind. Several CPU devices in one process are simulated.

    >>> devices(jax.devices()[:1])
    '1 cpu device'
    """
    simulated = "simulated " if found[0].platform == "cpu" and len(found) > jax.process_count() else ""
    return _count(len(found), f"{simulated}{found[0].device_kind} device")


def end(run_dir: Path, step: int, generates: bool) -> str:
    """The path of the checkpoint, and a command that uses it."""
    folder = shlex.quote(str(run_dir))
    command = f"meshpar generate {folder} --prompt TEXT" if generates else f"meshpar checkpoint show {folder}"
    return f"trained to step {step}: the checkpoint is {run_dir}/checkpoints/{step}\nnext: {command}"


def nothing(run_dir: Path, step: int, changed: Mapping[str, list[Any]]) -> str:
    """Reports that nothing was trained, because the run directory contains a run that has ended.

    >>> print(nothing(Path("runs/a"), 20, {"optim.lr": [0.1, 0.2]}))
    meshpar: nothing was trained: runs/a holds a run that ended at step 20
      changed since then: optim.lr was 0.1, is 0.2
      run_dir=... starts a new run; num_steps=..., above 20, continues the old one
    """
    lines = [f"meshpar: nothing was trained: {run_dir} holds a run that ended at step {step}"]
    if changed:
        changes = "; ".join(f"{key} was {old}, is {new}" for key, (old, new) in changed.items())
        lines.append(f"  changed since then: {changes}")
    lines.append(f"  run_dir=... starts a new run; num_steps=..., above {step}, continues the old one")
    return "\n".join(lines)


def encoded_by(data: Batching | RowData) -> str:
    """Which tokenizer and template conversations have, to be added to `start`; empty for other data.

    >>> from meshpar.data import Chat
    >>> encoded_by(Chat(path="chats.jsonl", tokenizer="model/tokenizer.json"))
    '; tokenizer model/tokenizer.json'
    """
    corpora = [] if isinstance(data, RowData) else data.corpora
    tokenizers = [corpus.tokenizer for corpus in corpora if isinstance(corpus, Rendered)]
    names = dict.fromkeys(tokenizer.path for tokenizer in tokenizers if isinstance(tokenizer, TokenizerFile))
    return f"; tokenizer {', '.join(names)}" if names else ""


def source(data: Batching | RowData) -> str:
    """The kinds and paths of the data.

    >>> from meshpar.data import Jsonl, Mixture, Text
    >>> source(Mixture(parts=[{"weight": 1, "data": Jsonl(path="a")}, {"weight": 1, "data": Text(path="b")}]))
    'jsonl a, text b'
    """
    if isinstance(data, RowData):
        return data.label
    corpora = [corpus.model_dump(include={"kind", "path"}) for corpus in data.corpora]
    return ", ".join(dict.fromkeys(f"{corpus['kind']} {corpus.get('path', '')}".strip() for corpus in corpora))


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"
