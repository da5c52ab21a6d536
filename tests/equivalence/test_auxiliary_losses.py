"""Auxiliary losses of layers: on every layout and in every pipeline, their sums and gradients are one device's."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
import pytest

from meshpar.experiment.prepare import Prepared
from meshpar.models import Llama
from meshpar.nn.layers import SwiGLU
from meshpar.parallel.outputs import Auxiliary
from meshpar.parallel.pipeline.split import Split
from meshpar.parallel.precision import wide
from meshpar.train.gradients import Gradients
from meshpar.train.step import with_rows
from meshpar.tree import flatten_with_paths
from meshpar.verification.trial import QUICK
from tests.comparison import largest_difference
from tests.layouts import LAYOUTS
from tests.pipelines import SIZES, batches, padded, prepared, scheduled


class MeanSquare(SwiGLU):
    """Adds the mean square of its hidden activations, over the microbatch's tokens on all devices, to the loss."""

    def __call__(self, x_BSD: Any) -> Any:
        h_BSM = jax.nn.silu(self.gate(x_BSD)) * self.up(x_BSD)
        mean, largest = (wide(h_BSM) ** 2).mean(), abs(wide(h_BSM)).mean()
        return self.down(h_BSM), Auxiliary({"hidden": 0.5 * mean}, {"hidden_abs": largest})


class OfOwnRows(SwiGLU):
    """The same with a planted fault: the mean is over some of the rows."""

    def __call__(self, x_BSD: Any) -> Any:
        h_BSM = jax.nn.silu(self.gate(x_BSD)) * self.up(x_BSD)
        mean = (wide(h_BSM[: len(h_BSM) // 2]) ** 2).mean()
        return self.down(h_BSM), Auxiliary({"hidden": 0.5 * mean}, {"hidden_abs": mean})


class WithMeanSquare(Llama):
    mlp = MeanSquare


class WithOfOwnRows(Llama):
    mlp = OfOwnRows


def model(layers=4, kind: Any = WithMeanSquare, **more):
    return kind(num_layers=layers, **SIZES | more)


def gradients(run: Prepared) -> Gradients:
    """The gradients of the first step."""
    state = run.compile_init(QUICK)()
    args = (state.params, with_rows(run.put(batches()[0])), state.step, state.carried)
    return jax.device_get(jax.jit(run.gradients).lower(*args).compile(QUICK)(*args))


@lru_cache
def on_one_device(num_microbatches: int, layers: int = 4) -> Gradients:
    """The microbatches have the same rows as those of the runs on several devices."""
    return gradients(prepared(model(layers), None, num_microbatches=num_microbatches))


def difference(got: Gradients, reference: Gradients) -> float:
    """The largest absolute difference of loss, norm, metrics and gradients."""
    expected = flatten_with_paths(vars(reference))
    found = flatten_with_paths(vars(got))
    assert found.keys() == expected.keys()
    return largest_difference(
        found, {path: padded(np.asarray(expected[path]), np.shape(found[path])) for path in found}
    )


@pytest.fixture(autouse=True)
def _float64(float64):
    """Every test of this module computes in float64."""


def test_auxiliary_losses_are_added_to_the_loss_and_reported():
    got = on_one_device(1)
    plain = gradients(prepared(model(kind=Llama), None))
    assert set(got.metrics) == {"hidden", "hidden_abs"}
    assert not plain.metrics
    assert got.metrics["hidden"] > 1e-4
    assert abs(got.loss - plain.loss - got.metrics["hidden"]) < 1e-12


def test_an_evaluation_reports_auxiliary_losses_and_does_not_add_them():
    losses = []
    for kind in (WithMeanSquare, Llama):
        run = prepared(model(kind=kind), None)
        sums = jax.device_get(run.compile_evaluation()(run.compile_init(QUICK)().params, run.put(batches()[0]), {}))
        losses.append(sums["loss"])
        reported = {name: value / sums["tokens"] for name, value in sums.items() if name.startswith("hidden")}
        assert set(reported) == ({"hidden", "hidden_abs"} if kind is WithMeanSquare else set())
    assert losses[0] == losses[1]


ON_LAYOUTS = [
    ("data8", "manual", 1),
    ("zero2", "manual", 3),
    ("data2_fsdp2_tensor2", "manual", 3),
    ("zero3", "auto", 3),
    ("tensor4_sp", "manual", 1),
    ("tensor4", "auto", 1),
]


@pytest.mark.parametrize(
    ("layout", "lowering", "num_microbatches"),
    [pytest.param(*case, marks=[] if 1 < i < 4 else pytest.mark.slow) for i, case in enumerate(ON_LAYOUTS)],
)
def test_auxiliary_losses_are_equal_to_one_device(layout, lowering, num_microbatches):
    run = prepared(model(remat="dots"), LAYOUTS[layout], lowering=lowering, num_microbatches=num_microbatches)
    assert difference(gradients(run), on_one_device(num_microbatches)) < 1e-10


PIPELINES = [
    ("1f1b", "data2_tensor2", 4, 1, 4, "none"),
    ("zb_h1", "fsdp2_tensor2_sp", 4, 1, 4, "dots"),
    ("1f1b", "pipe4", 4, 3, 7, "none"),
    ("zbv", "fsdp4", 4, 1, 4, "full"),
    ("interleaved", "zero1", 4, 1, 4, "none"),
    ("zb_h2", "zero2_tensor2", 4, 1, 4, "dots"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "mesh", "num_microbatches", "parts", "layers", "remat"),
    [pytest.param(*case, marks=[] if i < 2 else pytest.mark.slow) for i, case in enumerate(PIPELINES)],
)
def test_auxiliary_losses_in_stages_are_equal_to_one_device(kind, mesh, num_microbatches, parts, layers, remat):
    padding = {"pad_layers_to_multiple": 4} if layers == 7 else {}
    schedule = scheduled(kind, mesh, num_microbatches)
    run = prepared(model(layers, remat=remat, **padding), mesh, schedule, num_microbatches=parts)
    assert difference(gradients(run), on_one_device(num_microbatches * parts, layers)) < 1e-10


def test_an_evaluation_of_auxiliary_losses_in_stages_is_equal_to_one_device():
    evaluations = []
    for mesh, schedule in ((None, None), ("data2_tensor2", scheduled("1f1b", "data2_tensor2", 4))):
        run = prepared(model(), mesh, schedule, num_microbatches=1)
        params = run.compile_init(QUICK)().params
        batch = run.put(batches()[0])
        evaluations.append(jax.device_get(run.compile_evaluation()(params, batch, {})))
    assert evaluations[0].keys() == evaluations[1].keys()
    assert abs(evaluations[0]["loss"] - evaluations[1]["loss"]) < 1e-10
    # One device takes the mean of all rows, stages take the mean of four microbatches' means, weighted by targets.
    assert abs(evaluations[0]["hidden"] / evaluations[1]["hidden"] - 1) < 0.1


# Planted faults ------------------------------------------------------------------------------------------------


def test_planted_a_mean_over_a_devices_own_rows_is_seen():
    run = prepared(model(kind=WithOfOwnRows), LAYOUTS["data8"])
    assert difference(gradients(run), on_one_device(1)) > 1e-6


def test_planted_a_backward_without_the_weight_of_auxiliary_losses_is_seen(monkeypatch):
    run = prepared(model(), "pipe2", scheduled("1f1b", "pipe2", 4))
    backward = Split.input_gradient
    right = gradients(run)
    assert difference(right, on_one_device(4)) < 1e-10

    def weightless(self, params, residuals, dy, dlosses, rest):
        return backward(self, params, residuals, dy, jax.tree.map(lambda x: 0 * x, dlosses), rest)

    monkeypatch.setattr(Split, "input_gradient", weightless)
    wrong = gradients(run)
    assert difference(wrong, right) > 1e-6
    assert abs(wrong.loss - right.loss) < 1e-12  # the loss alone would not show it
