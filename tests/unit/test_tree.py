"""Paths through trees, globs, and sizes in bytes."""

from __future__ import annotations

import pytest

from meshpar.tree import flatten_with_paths, human_bytes, map_with_path, matching

PATHS = ["blocks.attn.q.kernel", "blocks.attn.q.bias", "blocks.mlp.up.kernel", "head"]


def test_paths_are_dotted_through_dicts_lists_and_named_fields():
    tree = {"a": [1, {"b": 2}], "c": (3,)}
    assert flatten_with_paths(tree) == {"a.0": 1, "a.1.b": 2, "c.0": 3}
    assert map_with_path(lambda path, x, y: f"{path}={x + y}", tree, tree)["a"][1] == {"b": "a.1.b=4"}


@pytest.mark.parametrize(
    ("glob", "found"),
    [
        ("head", ["head"]),
        ("*", ["head"]),
        ("**", PATHS),
        ("blocks.*.*.kernel", [PATHS[0], PATHS[2]]),
        ("**.kernel", [PATHS[0], PATHS[2]]),
        ("blocks.attn.q.k", []),
        ("blocksXattn.q.kernel", []),  # a dot matches only a dot
    ],
)
def test_a_star_stops_at_a_dot(glob, found):
    assert matching(PATHS, glob) == found


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1.5 * 2**20, "1.50 MiB"), (5000 * 2**30, "5000.00 GiB")],
)
def test_bytes_are_printed_with_a_binary_unit(size, text):
    assert human_bytes(size) == text
