"""Negative controls of the suite: each of these faults is planted, and seen."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from meshpar.nn import layers
from meshpar.parallel import data
from meshpar.partition import loss, moved
from meshpar.train import gradients
from tests.equivalence.conftest import on_one_device, outcome, prepared, without_backward


def difference(layout):
    return outcome(prepared("llama", layout, "manual", 1)).difference(on_one_device("llama"))


@pytest.fixture(autouse=True, scope="module")
def _references():
    """The references are computed before any fault is planted."""
    with jax.enable_x64(True):
        on_one_device("llama"), on_one_device("gpt_dropout_remat")


def test_a_dropped_reduction_is_a_type_error(monkeypatch):
    monkeypatch.setattr(data, "reduce_gradients", lambda grads, *_, **__: (grads, {}))
    with pytest.raises(ValueError, match="out_specs"):
        difference("data8")


def test_a_mean_in_place_of_a_sum_is_seen(monkeypatch):
    summed = data.sum_gradient
    monkeypatch.setattr(data, "sum_gradient", lambda grad, axes: summed(grad, axes) / 8)
    assert difference("data8") > 1e-2


def test_a_loss_averaged_by_device_is_seen(monkeypatch):
    """The mean of the devices' means differs, because devices have different numbers of targets that count."""
    accumulate = gradients._accumulate

    def by_device(*args):
        got, grads = accumulate(*args)

        def mean(x):
            return x / got.count.astype(x.dtype)

        return replace(got, loss=mean(got.loss), count=got.count // got.count), jax.tree.map(mean, grads)

    monkeypatch.setattr(gradients, "_accumulate", by_device)
    assert difference("data8") > 1e-4


def test_a_rule_that_the_layers_do_not_follow_is_seen(monkeypatch):
    of = loss.parameter_layout
    monkeypatch.setattr(loss, "parameter_layout", lambda ctx, x, dims, *more: of(ctx, x, ("embed",) * x.ndim, *more))
    with pytest.raises((ValueError, TypeError)):
        difference("tensor4")


def test_a_region_entered_without_its_backward_sum_is_seen(monkeypatch):
    monkeypatch.setattr(moved, "varying", without_backward)
    assert difference("tensor4") > 1e-3


def test_a_dropout_of_rows_numbered_by_device_is_seen(monkeypatch):
    dropped = layers._dropped

    def by_device(x, rows, *more):
        return dropped(x, jax.numpy.arange(len(rows), dtype=rows.dtype), *more)

    monkeypatch.setattr(layers, "_dropped", by_device)
    got = outcome(prepared("gpt_dropout_remat", "data8", "manual", 1))
    assert got.difference(on_one_device("gpt_dropout_remat")) > 1e-4
