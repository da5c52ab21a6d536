"""A bare word where a kind is expected: `optim.schedule=cosine`; and what a mapping looks like where one is missing."""

from __future__ import annotations

import jsonschema
import pytest

from meshpar import Run
from meshpar.config import schema
from meshpar.config.annotations import chosen, is_sequence, kinds, reachable
from meshpar.config.shorthand import expand
from meshpar.errors import ConfigError
from tests.config.keys import PLAIN

SECTIONS = [
    (model, name, kind)
    for model in sorted(reachable(Run), key=lambda model: model.__name__)
    for name, field in model.model_fields.items()
    if not is_sequence(field.annotation)
    for kind in kinds(field.annotation)
]


@pytest.mark.parametrize(("model", "name", "kind"), SECTIONS, ids=str)
def test_a_word_is_a_kind_unless_it_stands_for_another_key(model, name, kind):
    annotation = model.model_fields[name].annotation
    short = getattr(chosen(annotation, kind), "shorthand", None)
    expected = {"kind": kind} if short in (None, "kind") else expand(annotation, {"kind": "file", "path": kind})
    if short not in (None, "kind", "path"):
        pytest.skip(f"a bare value is {short}")
    assert expand(annotation, kind) == expected


def load(*overrides: str) -> Run:
    from meshpar.config.loading import build

    return build(Run, PLAIN, "config.yaml", overrides)


def test_words_on_the_command_line_keep_the_other_keys():
    run = load("optim.schedule=wsd", "optim.schedule.decay_steps=3", "optim.schedule.warmup_steps=2", "data=stdlib")
    assert (run.optim.schedule.kind, run.optim.schedule.warmup_steps, run.data.kind) == ("wsd", 2, "stdlib")
    run = load("parallel.pipeline=1f1b", "parallel.pipeline.num_microbatches=4")
    assert run.parallel.pipeline == load("parallel.pipeline={kind: 1f1b, num_microbatches: 4}").parallel.pipeline
    assert Run(**PLAIN | {"optim": {"kind": "adamw", "lr": 1e-2, "schedule": "cosine"}}).optim.schedule.kind == "cosine"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("parallel.pipeline=1f1b", "parallel.pipeline.num_microbatches (command line)\n    required, but missing"),
        ("parallel.pipeline=1f2b", "no kind is called '1f2b'\n    did you mean 1f1b? There are gpipe, 1f1b"),
        ("parallel=fsdp", "expected a mapping, got 'fsdp'\n    {tensor: ..., ...}; its keys are tensor, fsdp, context"),
        ("data=3", "expected a mapping, got 3\n    {kind: text, ...}; there are text, stdlib, synthetic"),
        ("mesh=8", "expected a mapping, got 8\n    {replica: ..., ...}; its keys are replica, data, fsdp"),
    ],
)
def test_a_word_that_is_no_kind_is_answered_with_the_form(override, told):
    with pytest.raises(ConfigError) as refused:
        load(override)
    assert told in str(refused.value)


def test_an_editor_accepts_the_word():
    described = schema(Run)
    jsonschema.validate(PLAIN | {"data": "synthetic", "optim": "adamw", "parallel": {"pipeline": "1f1b"}}, described)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(PLAIN | {"data": "synthetc"}, described)
