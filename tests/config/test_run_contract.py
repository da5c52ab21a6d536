"""`contract` in a config: both forms of a limit."""

from __future__ import annotations

from meshpar.config import to_yaml
from meshpar.experiment.config import load
from meshpar.inspection.contract import Allowed
from tests.config.test_configs import CONFIGS

CONTRACT = "contract={all_to_all: 0, all_gather: {axes: [fsdp], per_layer: 2}, bytes_per_axis: {tensor: traced * 1.01}}"


def test_a_contract_comes_back_from_its_own_yaml(tmp_path):
    run = load(CONFIGS[0], [CONTRACT])
    assert run.contract is not None
    assert run.contract.all_to_all == Allowed(times=0)
    assert (run.contract.all_gather, run.contract.all_reduce) == (Allowed(axes=("fsdp",), per_layer=2), None)
    (tmp_path / "again.yaml").write_text(to_yaml(run))
    assert load(tmp_path / "again.yaml") == run
