"""No key of a run is without effect: its change shows in a program, in the data or in the loop, or is refused by name.

The list comes from the schema, see `walk`; CI tries a sample of it, and `-m slow` all of it, in each lowering and with
each kind of model.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from meshpar import MeshparError
from meshpar.experiment import config, validate
from meshpar.experiment.prepare import prepare
from meshpar.interop import user_code
from meshpar.optim import AdamW
from meshpar.optim.schedule import _Decay
from meshpar.train import token_loss
from tests.effect import outcome
from tests.effect.files import written
from tests.effect.walk import BASES, EXCEPTIONS, KEYS, change

OF_ONE_KIND = {"Llama": ["llama"], "GPT": ["gpt"], "Import": ["import"], "FamilyModel": ["family"],
               "EncoderModel": ["encoder"],
               "ExpertParallel": ["llama", "import"],
               "LossConfig.target": ["import", "llama", "gpt"]}  # fmt: skip
OF_ONE_KIND |= {name: ["rows"] for name in ("ImportedData", "Classify", "Regress", "MaskedTokens", "Contrastive")}
OF_ONE_KIND |= {name: ["images"] for name in ("Images", "Augment")}
OF_ONE_KIND |= {name: ["llama", "gpt"] for name in ("Preferences", "DPO", "ORPO", "Prompts", "GRPO")}
NUM_SAMPLED = 12


def kinds(name):
    """The kinds of model that have the key; first that in which it has an effect."""
    return OF_ONE_KIND.get(name, OF_ONE_KIND.get(name.split(".")[0], ["llama", "gpt", "import"]))


OWN = [(name, kinds(name)[0], "auto" if kinds(name)[0] == "import" else "manual") for name in KEYS]
"""Each key, with the kind of model and the lowering in which it has an effect."""
ALL = [(name, model, lowering) for name in KEYS for model in kinds(name) for lowering in ("manual", "auto")]
TRIED = [case for case in OWN if case[0] not in EXCEPTIONS]
ELSEWHERE = [case for case in ALL if case not in TRIED and case[0] not in EXCEPTIONS]
SAMPLED = random.Random(0).sample(TRIED, NUM_SAMPLED)


@pytest.fixture(scope="module", autouse=True)
def _files(tmp_path_factory):
    """The files that the runs name, in the working directory, and a model of the user's own."""
    folder = tmp_path_factory.mktemp("effect")
    written(folder)
    user_code.name(Path(__file__).with_name("own.py"))
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.chdir(folder)
        yield


def test_each_exception_is_a_key_and_has_a_reason():
    assert not EXCEPTIONS.keys() - {*KEYS}
    assert all(len(reason) > 20 for reason in EXCEPTIONS.values())
    assert len(KEYS) > 350 and len(EXCEPTIONS) <= 98


def test_each_run_is_read_before_and_after_the_change():
    """Or the change is in a value, and not in a section that has no such key."""
    for name, model, lowering in TRIED:
        one = change(name, model, lowering)
        assert one.before != one.after, name


@pytest.mark.parametrize("case", SAMPLED, ids="-".join)
def test_a_key_has_an_effect(case):
    assert outcome.outcome(change(*case)) in ("program", "data", "loop")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in TRIED if case not in SAMPLED], ids="-".join)
def test_each_key_has_an_effect(case):
    test_a_key_has_an_effect(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ELSEWHERE, ids="-".join)
def test_each_key_has_an_effect_or_is_refused_by_name_elsewhere(case):
    """In the other lowering, and with the other kinds of model."""
    found = outcome.outcome(change(*case))
    assert found in ("program", "data", "loop") or found.startswith("refused: "), found


IMPORTED = {
    "data.documents_in_row": (
        {"data": BASES["import"]["data"] | {"documents_in_row": "separate"}},
        "data.documents_in_row = separate\n    tests.effect.own:build is called with the tokens alone",
    ),
    "precision.cache": ({"precision": {"cache": "int8"}}, "precision.cache\n    only meshpar's own decoders can cache"),
    "parallel.context": (
        {"parallel": {"context": "ring"}},
        "parallel.context\n    ",
    ),
    "rules": (
        {"rules": ["pipeline"], "mesh": {"data": 2, "pipe": 4}},
        "mesh.pipe = 4\n    nothing in the model has the dim layers (preset pipeline) or stage (preset pipeline)",
    ),
}


@pytest.mark.parametrize("key", IMPORTED)
@pytest.mark.parametrize("lowering", ["manual", "auto"])
def test_an_imported_model_refuses_what_only_meshpars_own_can_use(key, lowering):
    """In both lowerings: a model for local shards has no layers of meshpar either."""
    changes, message = IMPORTED[key]
    run = BASES["import"] | {"lowering": lowering} | changes
    run["model"] = run["model"] | {"manual": lowering == "manual"}
    made = outcome.made(json.dumps(run))
    with pytest.raises(MeshparError) as error:
        prepare(made, made.mesh.abstract())
    assert message in str(error.value)


def test_learned_positions_refuse_the_base_of_rotary_ones():
    assert "model.rope_theta" in outcome.outcome(change("GPT.rope_theta", "gpt", "manual"))


# Controls ------------------------------------------------------------------------------------------------------------


def without_weights_of_losses(patch):
    right = token_loss.cross_entropy
    patch.setattr(token_loss, "cross_entropy", lambda logits, targets, size, *terms: right(logits, targets, size))


def with_the_default_of_b2(patch):
    right = AdamW.direction
    patch.setattr(AdamW, "direction", lambda self, dims: right(self.model_copy(update={"b2": 0.95}), dims))


def with_a_context_of_its_own(**fields):
    def plant(patch):
        right = config.Run.context
        patch.setattr(config.Run, "context", lambda self, mesh: replace(right(self, mesh), **fields))

    return plant


def without_an_end_of_schedules(patch):
    right = _Decay._after_warmup

    def after(self, now, num_steps):
        return right(self.model_copy(update={"final": 0.0}), now, num_steps)

    patch.setattr(_Decay, "_after_warmup", after)


def without_checks_of_strategies(patch):
    patch.setattr(validate, "check_strategies", lambda ctx, problems: None)


PLANTED = {
    "z_loss": ("LossConfig.z_loss", "llama", "manual", without_weights_of_losses),
    "b2": ("AdamW.b2", "llama", "manual", with_the_default_of_b2),
    "gradients": ("Precision.gradients", "llama", "manual", with_a_context_of_its_own(accum_dtype=None)),
    "num_microbatches": ("Run.num_microbatches", "gpt", "auto", with_a_context_of_its_own(num_microbatches=1)),
    "final": ("Cosine.final", "llama", "manual", without_an_end_of_schedules),
    "gradient_reduction": ("Run.parallel", "import", "auto", without_checks_of_strategies),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", PLANTED)
def test_control_an_option_without_effect_is_found(fault, monkeypatch):
    *case, plant = PLANTED[fault]
    outcome.forget()
    plant(monkeypatch)
    assert outcome.outcome(change(*case)).startswith("nothing")
    outcome.forget()
    monkeypatch.undo()
    found = outcome.outcome(change(*case))
    assert found == "program" or found.startswith("refused: "), found


def test_control_a_refusal_without_the_name_is_found(monkeypatch):
    outcome.forget()

    def refuse(run, mesh):
        if run.loss.z_loss:
            raise validate.ConfigError("this config is wrong")

    monkeypatch.setattr("meshpar.experiment.prepare.check", refuse)
    found = outcome.outcome(change("LossConfig.z_loss", "llama", "manual"))
    outcome.forget()
    assert found == "nothing: refused without its name: this config is wrong"
