"""Dotted paths in trees, such as `blocks.attn.q.kernel`, for errors, reports, globs and rules; sizes as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import jax


def path_name(path: Iterable[Any]) -> str:
    """A JAX key path as text, joined by dots."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def flatten_with_paths(tree: Any) -> dict[str, Any]:
    """Path -> leaf, in JAX's order.

    >>> flatten_with_paths({"b": {"q": 1}, "a": [2]})
    {'a.0': 2, 'b.q': 1}
    """
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` with the path as the first argument of `fn`."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: fn(path_name(path), *leaves), tree, *rest)


def matching(paths: Iterable[str], glob: str) -> list[str]:
    """The paths that a glob matches: `*` matches within a part, `**` also across dots.

    A glob need not match the last part of an NNX variable's path, `.value`.

    >>> matching(["blocks.attn.q.kernel", "head"], "blocks.**")
    ['blocks.attn.q.kernel']
    >>> matching(["blocks.attn.q.kernel", "blocks.mlp.kernel"], "blocks.*.kernel")
    ['blocks.mlp.kernel']
    """
    parts = {"**": ".*", "*": "[^.]*"}
    pattern = "".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", glob))
    return [path for path in paths if re.fullmatch(rf"{pattern}(\.value)?", path)]


def shortened(paths: Sequence[str], among: Iterable[str]) -> list[str]:
    """A shorter list of paths, for reports: a subtree whose paths are all listed becomes one glob.

    >>> shortened(["params.a.w", "params.a.b", "step"], ["params.a.w", "params.a.b", "params.head", "step"])
    ['params.a.**', 'step']
    """
    listed = set(paths)
    rest = [path for path in among if path not in listed]
    found = []
    for path in paths:
        parts = path.split(".")
        tops = [".".join(parts[:i]) + "." for i in range(1, len(parts))]
        whole = next((top for top in tops if not any(other.startswith(top) for other in rest)), None)
        found.append(f"{whole}**" if whole else path)
    return list(dict.fromkeys(found))


def human_bytes(size: float) -> str:
    """A number of bytes, with its unit.

    >>> human_bytes(3 * 2**20)
    '3.00 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def human_flops(flops: float) -> str:
    """A number of floating-point operations, with its unit.

    >>> human_flops(512), human_flops(1_234_567_890_123_456_789_000)
    ('512 FLOPs', '1235 EFLOPs')
    """
    for unit in ("", "K", "M", "G", "T", "P"):
        if flops < 1000:
            return f"{flops:.3g} {unit}FLOPs"
        flops /= 1000
    return f"{flops:.4g} EFLOPs"


def human_time(seconds: float) -> str:
    """A time, with its unit.

    >>> human_time(0.01234), human_time(12.345)
    ('12.3 ms', '12.35 s')
    """
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"


_UNITS = {"": 1, "B": 1} | {f"{prefix}iB": 2 ** (10 * i) for i, prefix in enumerate("KMGT", 1)}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|B|)$")


def parse_bytes(text: str | int) -> Fraction:
    """The number of bytes in a text such as `40MiB`.

    Exact and strict where `pydantic.ByteSize` rounds fractions, reads `8M` as 8,000,000, and ignores trailing text.

    Raises:
      ValueError: the text is not a number of bytes.

    >>> int(parse_bytes("1.5KiB"))
    1536
    """
    if match := _BYTES.match(str(text)):
        return Fraction(match[1]) * _UNITS[match[2]]
    raise ValueError(f"{text!r} is not a number of bytes; valid: 1000, 40MiB")
