"""Rounds on eight devices equal a NumPy reference in float64, for every method; faults are seen."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from meshpar.config import to_yaml
from meshpar.errors import ConfigError
from meshpar.federated import Clients, Federated, Privacy, federation, fit, load
from meshpar.federated import cohort as cohort_file
from meshpar.federated import round as round_file
from meshpar.federated.methods import Scaffold
from meshpar.federated.secure import mask
from meshpar.inspection.program.hlo import collectives_of, total_sent_bytes
from meshpar.records.file import FILE, read
from meshpar.train.loop.signals import Interrupted
from meshpar.verification.trial import QUICK
from tests.federated.oracle import Reference, matrix

SMALL = {
    "data": {"kind": "clusters", "num_examples": 300, "num_features": 5, "num_classes": 4, "held_out": 50},
    "clients": {"num": 30, "split": {"kind": "dirichlet", "alpha": 0.5}, "size_spread": 0.7},
    "local": {"lr": 0.2, "epochs": 2, "batch_size": 4},
    "clients_per_round": 13,
    "num_rounds": 3,
    "dropout": 0.2,
    "stragglers": {"rate": 0.3, "work": 0.6},
    "mesh": {"data": 8},
    "clients_at_once": 1,
    "dtype": "float64",
    "run_dir": "run",
}
CASES = {
    "scaffold": {"method": "scaffold"},
    "fedadam": {"method": "fedadam"},
    "fedavg": {},
    "fedprox": {"method": {"kind": "fedprox", "mu": 0.5}},
    "uniform weights": {"weights": "uniform", "clients_at_once": 32},
    "slow clients dropped": {"stragglers": {"rate": 0.4, "late": "drop"}},
    "private": {"privacy": {"clip_norm": 0.3, "noise_multiplier": 0.5}},
    "one device": {"method": "scaffold", "mesh": {"data": 1}},
}


def config_of(**settings):
    return Federated(**{**SMALL, **settings})


def noise_of(config, params, number):
    """The noise of a round: the same normal numbers, in the order of Flax's parameters."""
    if not config.privacy:
        return 0.0
    _, key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), number))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    drawn = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    scale = config.privacy.noise_multiplier * config.privacy.clip_norm / config.clients_per_round
    return scale * matrix(jax.tree.unflatten(structure, drawn))


def batches(trained, order, client):
    """The batches of a client, as the order of its examples says."""
    found = [trained.examples.some(trained.owned[client][step[step >= 0]]) for step in order]
    return [(batch.x, batch.y) for batch in found if len(batch.y)]


def difference(config):
    """The largest difference of a parameter from the reference's, over all rounds."""
    trained, _ = federation(config, config.mesh.build(jax.devices()[: config.mesh.data]))
    server = trained.init()
    reference = Reference(config, matrix(server.params))
    found = []
    for played in trained.play(server, QUICK):
        cohort = played.cohort
        clients = {
            client: (len(trained.owned[client]), batches(trained, order, client), is_sent)
            for client, order, is_sent in zip(cohort.clients.tolist(), cohort.order, cohort.sent, strict=True)
            if client >= 0
        }
        reference.play(clients, noise_of(config, server.params, played.number))
        found.append(np.abs(matrix(played.server.params) - reference.w).max())
    assert len(found) == config.num_rounds
    return max(found)


def slowly(cases, num_quick):
    return [case if i < num_quick else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(cases)]


@pytest.mark.parametrize("case", slowly(CASES, 1))
def test_a_method_equals_the_reference(case, float64):
    assert difference(config_of(**CASES[case])) <= 1e-10


@pytest.mark.slow
def test_a_secure_sum_differs_by_its_rounding(float64):
    config = config_of(secure_sum={"range": 4.0}, clients_at_once=32)
    assert difference(config) <= config.num_rounds * config.clients_per_round * 4.0 / 2**31 * 4


def equal_weights(draw, size):
    return (size > 0) / (size > 0).sum()


def stale_control(self, params, server, mean, changes):
    new, _ = super(Scaffold, self).update(params, server, mean, changes)
    return new, server


def longer_ring(key, place, num_clients, like):
    return mask(key, place, num_clients + 1, like)


PLANTS = {
    "weights of clients are equal": ("fedavg", cohort_file.Draw, "_weight", equal_weights),
    "the server's control variate stays": ("scaffold", Scaffold, "update", stale_control),
    "masks do not cancel": ("secure", round_file, "mask", longer_ring),
}  # fmt: skip


@pytest.mark.parametrize("plant", slowly(PLANTS, 1))
def test_a_planted_fault_is_seen(plant, float64, monkeypatch):
    case, owner, name, fault = PLANTS[plant]
    monkeypatch.setattr(owner, name, fault)
    assert difference(config_of(**({"secure_sum": {}} if case == "secure" else CASES[case]))) > 1e-4


# Drop-outs, bytes and privacy ---------------------------------------------------------------------------------------


def first_round(**settings):
    trained, _ = federation(config_of(num_rounds=1, stragglers=None, **settings))
    [played] = trained.play(trained.init(), QUICK)
    return played


def test_a_client_that_drops_out_changes_the_mean_and_nothing_else(float64):
    everyone = first_round(dropout=0.0)
    fewer = first_round(dropout=0.3)
    is_lost = everyone.cohort.sent & ~fewer.cohort.sent
    assert 0 < is_lost.sum() < 13
    for name in ("clients", "x", "y", "order", "is_slow"):
        np.testing.assert_array_equal(getattr(everyone.cohort, name), getattr(fewer.cohort, name))
    for name in ("loss", "norm"):
        np.testing.assert_array_equal(getattr(everyone.results, name), getattr(fewer.results, name))
    left = np.where(is_lost, 0, everyone.cohort.weight)
    np.testing.assert_allclose(fewer.cohort.weight, left / left.sum(), rtol=1e-14)
    assert np.abs(matrix(everyone.server.params) - matrix(fewer.server.params)).max() > 1e-4


@pytest.mark.slow
def test_a_round_without_any_update_changes_nothing(float64):
    trained, _ = federation(config_of(num_rounds=1, dropout=1.0, method="fedadam"))
    server = trained.init()
    [played] = trained.play(server, QUICK)
    assert all(after is before for after, before in zip(*map(jax.tree.leaves, (played.server, server)), strict=True))


SUMS = [({"secure_sum": {}}, 2), ({}, 1), ({"method": "scaffold"}, 2)]


@pytest.mark.parametrize("case", slowly(SUMS, 1), ids=str)
def test_a_round_sends_the_model_once_for_each_sum(case):
    """Under a secure sum, the masks of lost clients too; with SCAFFOLD, the change of the control variates."""
    settings, times = case
    trained, _ = federation(config_of(dtype="float32", **settings))
    found = collectives_of(trained.compile(QUICK).compiled, trained.mesh)
    model_bytes = (5 + 1) * 4 * 4
    assert total_sent_bytes(found) == times * 2 * 7 * model_bytes // 8
    assert {one.kind for one in found} == {"all_reduce"}


def test_a_message_of_a_secure_sum_is_masked_and_all_masks_cancel():
    like = {"w": np.zeros((50, 20), np.float32)}
    masks = [np.asarray(mask(jax.random.key(3), np.int32(place), 5, like)["w"]) for place in range(5)]
    assert all(abs(one.mean() / 2**31 - 1) < 0.1 and len(np.unique(one)) > 990 for one in masks)
    assert not np.add.reduce(masks, dtype=np.uint32).any()


def test_epsilon_falls_with_noise_and_rises_with_rounds():
    pytest.importorskip("dp_accounting")

    def epsilon(noise, num_clients, per_round, num_rounds):
        return Privacy(clip_norm=1.0, noise_multiplier=noise).epsilon(num_clients, per_round, num_rounds)

    # Without sampling the Gaussian mechanism has a closed form: Rényi divergence a / (2 s^2), converted at its best a.
    sigma = 4.0 / 2
    orders = np.arange(1.01, 60, 0.01)
    log_delta = np.log(1e-5)
    by_order = orders / (2 * sigma**2) + np.log1p(-1 / orders) - (log_delta + np.log(orders)) / (orders - 1)
    assert epsilon(4.0, 100, 100, 1) == pytest.approx(by_order.min(), rel=0.02)
    assert epsilon(4.0, 1000, 20, 50) < epsilon(2.0, 1000, 20, 50) < epsilon(2.0, 1000, 20, 200)


# Data and configs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.1, 100.0])
def test_every_example_has_one_client_and_a_small_alpha_few_classes(alpha):
    labels = np.random.default_rng(0).integers(10, size=2000)
    owned = Clients(num=50, split={"kind": "dirichlet", "alpha": alpha}, size_spread=1.0).divide(labels)
    np.testing.assert_array_equal(np.sort(np.concatenate(owned)), np.arange(2000))
    sizes = np.array([len(own) for own in owned])
    assert sizes.min() >= 1
    assert sizes.max() > 4 * np.median(sizes)
    largest = np.mean([np.bincount(labels[own]).max() / len(own) for own in owned if len(own) >= 20])
    assert (largest > 0.5) == (alpha < 1)


WRONG = {
    "clients_per_round": ({"clients_per_round": 31}, "clients_per_round=31, but clients.num=30"),
    "another axis": ({"mesh": {"data": 2, "tensor": 2}}, "mesh.tensor: clients are sharded over data alone"),
    "privacy by size": (
        {"privacy": {"clip_norm": 1.0, "noise_multiplier": 1.0}, "weights": "examples"}, "set weights=uniform",
    ),
    "private scaffold": (
        {"privacy": {"clip_norm": 1.0, "noise_multiplier": 1.0}, "method": "scaffold"}, "control variates get no noise",
    ),
    "a secret of one": ({"secure_sum": {}, "clients_per_round": 1}, "secure_sum needs two clients"),
    "an unknown method": ({"method": "fedsgd"}, "no kind is called"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_contradicts_itself_is_refused(case):
    settings, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        config_of(**settings)


def test_privacy_without_its_accountant_is_refused_before_the_first_round(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    config = config_of(privacy={"clip_norm": 1.0, "noise_multiplier": 1.0}, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"pip install 'meshpar\[privacy\]'"):
        fit(config)
    assert not (tmp_path / "run").exists()


def test_more_clients_than_examples_are_refused():
    with pytest.raises(ConfigError, match="40 clients cannot share 30 examples"):
        Clients(num=40).divide(np.zeros(30, int))


# The command --------------------------------------------------------------------------------------------------------

CONFIG = Path(__file__).parents[2] / "configs" / "federated" / "digits.yaml"


def test_the_shipped_config_comes_back_from_its_own_yaml(tmp_path):
    (tmp_path / "again.yaml").write_text(to_yaml(load(CONFIG)))
    assert load(tmp_path / "again.yaml") == load(CONFIG)


def test_the_command_records_rounds_and_clients_and_stores_the_parameters(command, tmp_path):
    run_dir = tmp_path / "run"
    small = ["num_rounds=4", "eval_every=2", "mesh.data=8", "clients={num: 40}", "model=[]", f"run_dir={run_dir}"]
    done = command("federated", CONFIG, *small, "--no-cache")
    assert done.code == 0, done.err
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kinds = ["run", *(["train", "train", "evaluation"] * 2), "checkpoint", "clients", "summary"]
    assert [record["kind"] for record in records] == kinds
    accuracy = [record["accuracy"] for record in records if record["kind"] == "evaluation"]
    assert 0.5 < accuracy[0] < accuracy[1]
    of_clients = records[-2]
    assert sum(of_clients["examples"]) == 1797 - 360
    assert sum(of_clients["rounds"]) == 4 * 20
    assert "worst tenth" in done.out
    assert set(np.load(run_dir / "params.npz")) == {"Dense_0.kernel", "Dense_0.bias"}
    assert command("plot", run_dir).out.split() == [str(run_dir / f"curves{end}.png") for end in ("", "-clients")]


# A loop with checkpoints --------------------------------------------------------------------------------------------


def test_a_run_that_is_interrupted_goes_on_to_the_same_bits(monkeypatch, tmp_path):
    """Also the control variates of the clients, and how often each took part."""
    settings = {"method": "scaffold", "num_rounds": 4, "eval_every": 2, "dtype": "float32"}
    unbroken = fit(config_of(**settings, run_dir=tmp_path / "unbroken"))
    draw = cohort_file.Draw.cohort

    def ending(self, round_, num):
        if round_ == 3 and not (tmp_path / "resumes").exists():
            signal.raise_signal(signal.SIGTERM)
        return draw(self, round_, num)

    monkeypatch.setattr(cohort_file.Draw, "cohort", ending)
    broken = config_of(**settings, run_dir=tmp_path / "broken")
    with pytest.raises(Interrupted, match="SIGTERM at step 2"):
        fit(broken, signals=True)
    (tmp_path / "resumes").touch()
    resumed = fit(broken)
    assert jax.tree.all(jax.tree.map(np.array_equal, unbroken, resumed))
    of_clients = [
        [record for record in read(tmp_path / name / FILE) if record["kind"] == "clients"]
        for name in ("unbroken", "broken")
    ]
    assert of_clients[0] == of_clients[1]


def test_a_run_is_not_resumed_with_other_clients(tmp_path):
    settings = {"num_rounds": 1, "dtype": "float32", "run_dir": tmp_path / "run"}
    fit(config_of(**settings))
    with pytest.raises(ConfigError, match=r"clients.num\n *was 30 in .*, and is 29"):
        fit(config_of(**settings | {"num_rounds": 2, "clients": SMALL["clients"] | {"num": 29}}))
    fit(config_of(**settings | {"num_rounds": 2, "clients_at_once": 8}))
