"""Every reduction that does not round is equal to one device; one that rounds is not."""

from __future__ import annotations

from itertools import product

import pytest

from meshpar.collectives.algorithms import ALGORITHMS
from meshpar.collectives.reduction import Bfloat16, Reduce
from meshpar.mesh.layout import AxisSizes, MeshLayout
from meshpar.parallel import buckets
from tests.equivalence.conftest import on_one_device, outcome, prepared

WITHOUT_STORAGE = ("data8", "tensor4", "tensor4_sp")
SCATTERING = ("ring", "bidirectional_ring", "halving_doubling", "auto")
"""Algorithms that have a plan for a reduce-scatter."""
EVERY = [
    *product([*ALGORITHMS, "auto"], WITHOUT_STORAGE, [1]),
    *product(SCATTERING, ["zero1", "zero2", "zero3", "hsdp2x4", "data2_fsdp2_tensor2"], [1, 4]),
]
SAMPLE = [("bidirectional_ring", "data2_fsdp2_tensor2", 4)]
CASES = [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow) for case in EVERY]
SMALL = "3KiB"
"""Size of a bucket, in which several gradients fit, while large ones need several buckets."""


def difference(reduce: Reduce, layout: str, num_microbatches: int = 1, **settings) -> float:
    got = outcome(
        prepared("llama", layout, "manual", num_microbatches, parallel={"gradient_reduction": reduce}, **settings)
    )
    return got.difference(on_one_device("llama"))


@pytest.mark.parametrize(("algorithm", "layout", "num_microbatches"), CASES)
def test_a_declared_reduction_is_equal_to_one_device(algorithm, layout, num_microbatches):
    assert difference(Reduce(algorithm=algorithm, bucket_bytes=SMALL), layout, num_microbatches) < 1e-10


def test_a_reduction_inside_and_across_slices_is_equal_to_one_device():
    """Copies over data are inside a slice, those over replica in two: reduce-scatter, all-reduce, all-gather."""
    mesh = MeshLayout(data=2, fsdp=2, dcn=AxisSizes(replica=2))
    assert difference(Reduce(bucket_bytes=SMALL), "hsdp2x4", mesh=mesh) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3", "hsdp2x4", "data2_fsdp2_tensor2"])
def test_a_reduction_beside_an_overlap_of_fsdp_is_equal_to_one_device(layout):
    run = prepared(
        "llama", layout, "manual", 4,
        parallel={"gradient_reduction": Reduce(bucket_bytes=SMALL), "fsdp": {"overlap": "ring"}},
    )  # fmt: skip
    assert outcome(run).difference(on_one_device("llama")) < 1e-10


@pytest.mark.slow
def test_a_reduction_that_rounds_differs_from_one_device():
    assert difference(Reduce(across=Bfloat16()), "data8") > 1e-10


def test_planted_wrong_pieces_of_a_bucket_are_seen(monkeypatch):
    cut = buckets.buckets

    def shifted(sizes, bucket_size):
        return [
            [piece._replace(start=0, stop=piece.stop - piece.start) for piece in bucket]
            for bucket in cut(sizes, bucket_size)
        ]

    monkeypatch.setattr(buckets, "buckets", shifted)
    assert difference(Reduce(bucket_bytes=SMALL), "data8") > 1e-10
