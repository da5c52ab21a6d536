"""What saves memory changes no number: offloading to the host, and stochastic rounding in any layout."""

from __future__ import annotations

import jax
import pytest

from meshpar.experiment.config import Offload, Precision
from meshpar.nn.remat import Remat
from meshpar.tree import flatten_with_paths
from tests.equivalence.conftest import on_one_device, outcome, prepared

CASES = [
    ("data2_fsdp2_tensor2", "manual"),
    *[pytest.param(*case, marks=pytest.mark.slow) for case in [("zero1", "manual"), ("zero3", "auto")]],
]


@pytest.mark.parametrize(("layout", "lowering"), CASES)
def test_an_offloaded_run_is_equal_to_one_device(layout, lowering):
    remat = Remat(save=("q", "k"), offload=("input", "attn", "gate"))
    run = prepared("llama", layout, lowering, 1, fields={"remat": remat}, offload=Offload(optimizer="host"))
    assert outcome(run).difference(on_one_device("llama")) < 1e-10
    kinds = {path: x.sharding.memory_kind for path, x in flatten_with_paths(run.compile_init()().opt_state).items()}
    assert kinds["0.mu.embedding"] == kinds["0.nu.blocks.attn.q.kernel"] == "pinned_host"
    assert kinds["0.count"] == "device"


PRECISION = {"params": "bfloat16", "compute": "float64"}


def test_stochastic_rounding_is_the_same_in_any_layout():
    """Control: another seed, or rounding to nearest, gives other parameters."""

    def params(layout, lowering, **more):
        got = outcome(prepared("gpt_gqa_tied", layout, lowering, 1, precision=Precision(**PRECISION | more)))
        return jax.tree.leaves(got.params)

    one = params(None, "auto", rounding="stochastic")
    many = params("data2_fsdp2_tensor2", "manual", rounding="stochastic")
    nearest = params(None, "auto", rounding="nearest")
    assert all((a == b).all() for a, b in zip(one, many, strict=True))
    assert any((a != b).any() for a, b in zip(one, nearest, strict=True))
