"""Prints the bytes that a planned model is estimated to hold over those compiled for a machine: NAME TARGET."""

from __future__ import annotations

import sys

from meshpar.experiment import actions
from meshpar.experiment.prepare import prepare
from meshpar.mesh import process
from meshpar.planning.estimate import work_of
from tests.program.test_plan_of_any_model import PIPES, run_of

if __name__ == "__main__":
    name, target = sys.argv[1:]
    process.compile_only()
    run = run_of(name, **PIPES)
    work = work_of(prepare(run, run.mesh.abstract(platform="gpu")))
    print((work.states_bytes + work.step_bytes) / actions.inspect(run, target).inspection.memory.total)
