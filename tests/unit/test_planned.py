"""What a step holds and gathers on purpose, by the rules of its run."""

from __future__ import annotations

import pytest

from meshpar.experiment.config import Run
from meshpar.experiment.prepare import prepare
from meshpar.inspection.findings.planned import planned_by
from meshpar.train.error_feedback import SLICES
from tests.config.keys import PLAIN


@pytest.mark.parametrize("rules", ["replicated", "fsdp"])
def test_the_dim_of_slices_has_no_rule(rules):
    """Each device holds its own slice of an array of local updates: the dim is no dim of the model."""
    local = {"local": {"axis": "data", "every": 2}}
    run = Run(**PLAIN | {"parallel": local, "mesh": {"data": 4, "fsdp": 2}, "rules": rules})
    prepared = prepare(run)
    placement = prepared.placement
    planned = planned_by(prepared.ctx, placement.sharded, placement.opt_state, placement.carried[SLICES])
    of_slices = {path: axes for path, axes in planned.gathered.items() if path.startswith("state.carried.slices.")}
    assert of_slices
    stored = {("fsdp",) if "embed" in planned.dims[path] and rules == "fsdp" else () for path in of_slices}
    assert set(of_slices.values()) <= stored | {()}
    assert all(planned.dims[path][0] == "slices" for path in of_slices)
