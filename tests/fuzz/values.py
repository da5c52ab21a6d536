"""Values and texts that a config or a command line may hold by mistake or by malice."""

from __future__ import annotations

import random
from typing import Any

INTEGERS = (
    0, -1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 64, 100, 1000, 2**15, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1,
    2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**20, -(2**31), -(2**63), 10**30,
)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-8, 1e-320, 1e30, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
OURS = (
    "llama", "gpt", "import", "fsdp", "FSDP", "tensor", "data", "pipe", "context", "expert", "replica", "batch", "seq",
    "embed", "heads", "kv_heads", "mlp", "vocab", "layers", "stage", "bfloat16", "float32", "float64", "float16",
    "int8", "exact", "onebit", "powersgd", "manual", "auto", "cosine", "wsd", "linear", "constant", "adamw", "lion",
    "sgd", "muon", "adafactor", "1f1b", "zbv", "zb_h1", "gpipe", "interleaved", "synthetic", "text", "jsonl",
    "parquet", "arrow", "numpy", "mixture", "bytes", "ring", "none", "full", "zero1", "megatron", "megatron_sp",
    "pipeline", "hsdp", "replicated", "traced", "40MiB", "-1GiB", "params.**", "blocks.*.kernel",
)  # fmt: skip
"""Words that some config or option accepts."""
ODD = (
    "", " ", "a", "null", "true", "no", "~", "-", "--", "=", ":", "a:b", "a.b", "a.b:c", "os:system", "**", "*", "[",
    "[!", "?", "\\", "../x", "../../etc/passwd", "/", "/dev/zero", "/dev/stdin", "/proc/self/mem", "/etc", ".", "..",
    "config.yaml", "quickstart.yaml", "nowhere/x", "x" * 300, "x/" * 300, "\x1b]0;owned\x07", "\u202e", "\n", "a\nb",
    "\t", "größe", "模型", "🦙", "\ufeff",
    "\ufffe", "\x85", "1e5", "1_000", "0x10", "0o7", "1:30", "2026-11-22", "1e999999",
    "9" * 400, "traced * 1.01",
)  # fmt: skip
TEXTS = (*ODD, *OURS)


def scalar(rng: random.Random) -> Any:
    return rng.choice((*INTEGERS, *FLOATS, *TEXTS, *TEXTS, None, True, False))


def nested(depth: int, as_list: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if as_list else {"a": value}
    return value


def value(rng: random.Random) -> Any:
    """Anything that YAML can hold."""
    form = rng.randrange(12)
    if form < 7:
        return scalar(rng)
    if form < 9:
        return [scalar(rng) for _ in range(rng.randrange(4))]
    if form < 11:
        keys = ("kind", "path", "target", "preset", "every", "a", "paths", rng.choice(TEXTS))
        return {rng.choice(keys): scalar(rng) for _ in range(rng.randrange(4))}
    return nested(rng.choice((3, 31, 40, 200)), rng.random() < 0.5)


def small(rng: random.Random, old: Any) -> Any:
    """A value of the same type, which passes the checks of types and reaches the later ones."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        near = (old + 1, max(old - 1, 0), old * 2, old * 3, old // 2)
        return rng.choice((0, 1, 2, 3, 4, 6, 7, 8, 16, 2**20, 2**31 - 1, *near))
    if isinstance(old, float):
        return rng.choice((0.0, 0.1, 0.5, 1.0, 1e-8, 1e8, old * 2, -old))
    if isinstance(old, str):
        return rng.choice(TEXTS)
    if isinstance(old, list):
        return [rng.choice(OURS) for _ in range(rng.randrange(4))]
    return value(rng)
