"""Runs a command line in this process, and returns what a user would see."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from meshpar import cli

CONFIG = """\
model: {kind: llama, num_layers: 2, hidden_size: 16, num_heads: 2, intermediate_size: 32, vocab_size: 64}
data: {kind: synthetic, vocab_size: 64, batch_size: 8, seq_len: 16}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: 2, fsdp: 2, tensor: 2}
rules: [fsdp, megatron]
num_steps: 2
"""
"""A run of two steps on eight devices."""


class Said(NamedTuple):
    code: int
    out: str
    err: str


def exit_code(*words: object) -> int:
    """Runs `meshpar WORDS` and returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["meshpar", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)
