"""Encoders: transformers' numbers, the same bits on the way back, and one device's steps on each mesh."""

from __future__ import annotations

import copy
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from meshpar import CheckpointError, ConfigError, Run
from meshpar.errors import Problems
from meshpar.experiment.prepare import prepare
from meshpar.interop import user_code
from meshpar.interop.encoder_config import encoder_options
from meshpar.interop.encoder_model import EncoderModel, EncoderPretrained
from meshpar.interop.export import export
from meshpar.interop.open_folder import open_folder
from meshpar.models.config_classes import CONFIG_CLASSES
from meshpar.models.encoders import ENCODERS
from meshpar.models.encoders.family import Wanted
from meshpar.verification.trial import Trial
from tests.interop.encoders import ALL, CASES, END, HEADS, VOCAB, computed_by, config_of, inputs, saved
from tests.interop.modules import built, opened

IN_CI = [("roberta-pad", "classify"), ("modernbert-biases", "masked_tokens"),
         ("vit-wide", "classify"), ("clip", "pairs")]  # fmt: skip


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("highest"):
        yield


def computed(model: Any, given: dict[str, np.ndarray]) -> Any:
    return jax.jit(lambda model, given: model(**given))(model, {name: jnp.asarray(x) for name, x in given.items()})


def pad_of(config: dict[str, Any]) -> int | None:
    return None if config["model_type"] == "clip" else config.get("pad_token_id")


def check(folder: Path, reference: Any, atol: float = 1e-4) -> EncoderPretrained:
    """Compares what a folder's model computes with what transformers' does."""
    pretrained, params = opened(folder)
    assert isinstance(pretrained, EncoderPretrained)
    config = config_of(folder)
    given = inputs(config)
    want = computed_by(reference, given, pad_of(config))
    found = computed(built(pretrained.model.options, params), given)
    if "text_embeds" in want:
        picture, text, scale = found
        normed = [x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (picture, text)]
        np.testing.assert_allclose(normed[0], want["image_embeds"], rtol=0, atol=atol)
        np.testing.assert_allclose(normed[1], want["text_embeds"], rtol=0, atol=atol)
        np.testing.assert_allclose(scale * normed[0] @ normed[1].T, want["logits_per_image"], rtol=0, atol=10 * atol)
    elif "logits" in want:
        np.testing.assert_allclose(found, want["logits"], rtol=0, atol=atol)
        assert np.abs(want["logits"] - want["logits"][::-1]).max() > 1e-2
    else:
        np.testing.assert_allclose(found.hidden, want["last_hidden_state"], rtol=0, atol=atol)
        if "pooler_output" in want:
            np.testing.assert_allclose(found.pooled, want["pooler_output"], rtol=0, atol=atol)
    return pretrained


@pytest.mark.parametrize(
    ("case", "head"), [pytest.param(*one, marks=[] if one in IN_CI else [pytest.mark.slow]) for one in ALL]
)
def test_what_is_computed_is_transformers_and_the_same_bits_are_written(case, head, tmp_path):
    reference = saved(case, head, tmp_path / "read")
    pretrained = check(tmp_path / "read", reference)
    _, params = opened(tmp_path / "read")
    export(tmp_path / "written", pretrained.model, params, tmp_path / "read")
    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("read", "written"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(x, after[name]) and x.shape == after[name].shape for name, x in before.items())
    assert config_of(tmp_path / "written") == config_of(tmp_path / "read")


def test_control_a_wrong_option_is_seen(tmp_path):
    reference = saved("modernbert", "masked_tokens", tmp_path)
    config = config_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"local_attention": 6}))
    with pytest.raises(AssertionError):
        check(tmp_path, reference)


# Keys --------------------------------------------------------------------------------------------------------------


def options_of(config: dict[str, Any], head: str, problems: Problems | None = None) -> Any:
    return encoder_options(config, Wanted(head), "config.json", Problems() if problems is None else problems)  # pyright: ignore


@pytest.mark.parametrize("kind", HEADS)
def test_a_missing_key_has_the_default_of_its_own_class(kind):
    """Read from a config with only its sizes, and from the one that transformers makes of it: the same options."""
    completed = transformers.AutoConfig.for_model(**CASES[kind]).to_dict()
    problems = Problems()
    for head in HEADS[kind]:
        assert options_of(CASES[kind], head, problems) == options_of(completed, head, problems), problems.found
    assert not problems.found


@pytest.mark.parametrize("name", ["text_config", "vision_config"])
def test_the_second_name_of_a_tower_counts_as_in_transformers(name):
    """Published files of CLIP have both; the second one resets each key that it leaves out."""
    config = CASES["clip"] | {f"{name}_dict": {"hidden_size": 64, "num_attention_heads": 4}}
    completed = transformers.AutoConfig.for_model(**copy.deepcopy(config)).to_dict()  # it changes what it gets
    assert options_of(config, "pairs") == options_of(completed, "pairs") != options_of(CASES["clip"], "pairs")


OTHER = {bool: lambda x: not x, float: lambda x: x + 0.25, int: lambda x: x + 1, str: lambda x: "relu"}
WALKED = {kind: {"": kind} for kind in ("bert", "roberta", "modernbert", "vit")}
WALKED["clip"] = {"": "clip"} | ENCODERS["clip"].parts
"""Kind -> its config's own keys, and those of its parts -> their class."""


def other_values() -> list[Any]:
    """Kind, head, part and key of each option with a value of one of these types."""
    found = []
    for kind, parts in WALKED.items():
        for part, called in parts.items():
            for key, default in CONFIG_CLASSES[called].defaults.items():
                if type(default) in OTHER and not key.startswith(("output_", "return_")):
                    found += [(kind, head, part, key) for head in HEADS[kind]]
    in_ci = ("vit", "hidden", "", "pooler_act")
    return [pytest.param(*one, marks=[] if one == in_ci else [pytest.mark.slow]) for one in found]


@pytest.mark.parametrize(("kind", "head", "part", "key"), other_values())
def test_another_value_of_a_key_is_read_as_transformers_reads_it_or_is_refused(kind, head, part, key, tmp_path):
    config = CASES[kind][part] if part else CASES[kind]
    default = config.get(key, CONFIG_CLASSES[WALKED[kind][part]].defaults[key])
    change: dict[str, Any] = {key: OTHER[type(default)](default)}
    if key in ("hidden_size", "num_attention_heads"):
        change = {"hidden_size": 48, "num_attention_heads": 6}
    change = {part: config | change} if part else change
    if options_of(CASES[kind] | change, head) is None:
        return
    check(tmp_path, saved(kind, head, tmp_path, **change))


@pytest.mark.parametrize(
    ("kind", "head", "changes", "where", "what"),
    [
        ("bert", "hidden", {"is_decoder": True}, "is_decoder", "only false is supported"),
        ("bert", "hidden", {"add_cross_attention": True}, "add_cross_attention", "only false"),
        ("bert", "hidden", {"position_embedding_type": "relative_key"}, "position_embedding_type", "no such key"),
        ("bert", "hidden", {"hidden_act": "gelou"}, "hidden_act", "did you mean gelu"),
        ("bert", "hidden", {"hidden_size": 34}, "hidden_size", "no multiple of the 4 heads"),
        ("bert", "classify", {"hidden_dropout_prob": 1.5}, "hidden_dropout_prob", "not a rate"),
        ("bert", "masked_tokens", {"tie_word_embeddings": False}, "tie_word_embeddings", "is the embedding here"),
        ("roberta", "hidden", {"pad_token_id": None}, "pad_token_id", "positions begin after it"),
        ("modernbert", "classify", {"classifier_pooling": "max"}, "classifier_pooling", "'max' is not supported"),
        ("modernbert", "hidden", {"layer_types": ["full_attention"]}, "layer_types", "3 entries"),
        ("vit", "hidden", {"patch_size": 9}, "patch_size", "larger than the picture"),
        ("vit", "hidden", {"num_hidden_layers": 10**9}, "num_hidden_layers", "not a whole number"),
        ("clip", "pairs", {"vision_config": {"image_size": [8, 8]}}, "vision_config.image_size", "not a whole number"),
        ("clip", "pairs", {"text_config": {"hiden_act": "relu"}}, "text_config.hiden_act", "did you mean hidden_act"),
        ("clip", "pairs", {"text_config": 3}, "text_config", "not a mapping"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_its_key(kind, head, changes, where, what):
    problems = Problems()
    assert options_of(CASES[kind] | changes, head, problems) is None
    found = {problem.where: f"{problem.what} {problem.fix}" for problem in problems.found}
    assert what in found[f"config.json: {where}"], found


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ({"config": CASES["vit"], "head": "masked_tokens"}, "vit has no head masked_tokens; one of classify"),
        ({"config": CASES["bert"], "head": "masked_tokens", "num_labels": 3}, "is of the head classify"),
        ({"config": CASES["bert"], "head": "classify", "pooling": "cls"}, "is of the head pairs"),
        ({"config": CASES["bert"] | {"architectures": ["BertForTokenClassification"]}}, "BertForTokenClassification"),
        ({"config": {"model_type": "gemma"}}, "is no encoder"),
    ],
)
def test_a_model_lists_its_problems(model, what):
    with pytest.raises(ConfigError, match=what):
        EncoderModel(**model)


# Heads -------------------------------------------------------------------------------------------------------------


def test_a_folder_of_another_head_gives_its_tower_and_says_what_it_leaves_out(tmp_path):
    saved("bert", "masked_tokens", tmp_path)
    pretrained = open_folder(tmp_path)
    model = EncoderModel(config=pretrained.config, head="classify", num_labels=3)
    fitted = pretrained.fitted(model)
    assert {path for path in fitted.paths if path.startswith("head")} == set()
    assert len([path for path in fitted.paths if path.startswith("tower")]) == 37
    assert {name.split(".")[0] for name in fitted.left_out} == {"cls"}


def test_an_adapter_is_added_to_the_tower_under_another_head_too(tmp_path):
    saved("bert", "classify", tmp_path / "base")
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "../base", "r": 1, "lora_alpha": 1}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    module, matrices = "bert.encoder.layer.0.attention.self.query", {"A": (1, 32), "B": (32, 1)}
    ones = {f"base_model.model.{module}.lora_{x}.weight": np.ones(shape, "f") for x, shape in matrices.items()}
    save_file(ones, folder / "adapter_model.safetensors")
    plain, adapted = (open_folder(one) for one in (tmp_path / "base", folder))
    fitted = adapted.fitted(EncoderModel(config=plain.config, num_labels=5))
    name = f"{module}.weight"
    np.testing.assert_allclose(fitted.tensors[name].read(), plain.tensors[name].read() + 1, rtol=1e-6)


def test_classes_of_another_number_are_left_out_and_the_pooler_is_read(tmp_path):
    saved("bert", "classify", tmp_path)
    pretrained = open_folder(tmp_path)
    fitted = pretrained.fitted(EncoderModel(config=pretrained.config, num_labels=5))
    assert fitted.left_out == ("classifier.bias", "classifier.weight")
    heads = {path for path in fitted.paths if path.startswith("head")}
    assert heads == {"head.transform.dense.kernel.value", "head.transform.dense.bias.value"}


def test_a_tower_of_other_sizes_than_the_runs_is_refused(tmp_path):
    saved("bert", "classify", tmp_path)
    other = EncoderModel(config=config_of(tmp_path) | {"layer_norm_eps": 0.1})
    with pytest.raises(ConfigError, match=r"model.config differs from .*config.json: layer_norm_eps; leave"):
        open_folder(tmp_path).fitted(other)


def test_names_of_the_first_versions_are_read_and_unknown_or_missing_tensors_are_not(tmp_path):
    reference = saved("bert", "masked_tokens", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    old = {"weight": "gamma", "bias": "beta"}
    named = {re.sub(r"LayerNorm\.(\w+)$", lambda m: f"LayerNorm.{old[m[1]]}", name): x for name, x in tensors.items()}
    table = tensors["bert.embeddings.word_embeddings.weight"]
    copies = {"cls.predictions.decoder.weight": table.copy(), "cls.seq_relationship.bias": np.zeros(2, "f"),
              "bert.embeddings.position_ids": np.arange(32)[None]}  # fmt: skip
    save_file(named | copies, path)
    assert {*check(tmp_path, reference).left_out} == {*copies}
    save_file(
        {"bert.other": table.copy()} | {x: y for x, y in tensors.items() if "layer.1.output.dense" not in x}, path
    )
    with pytest.raises(CheckpointError) as error:
        open_folder(tmp_path)
    assert "bert.other\n    is in model.safetensors, but is no parameter" in str(error.value)
    assert "bert.encoder.layer.1.output.dense.weight\n    is missing" in str(error.value)


def test_padding_changes_no_token(tmp_path):
    """And its control: without a mask it does."""
    saved("modernbert", "hidden", tmp_path)
    pretrained, params = opened(tmp_path)
    model = built(pretrained.model.options, params)
    tokens = inputs(CASES["modernbert"])["tokens"][2:, :7]
    padded = np.pad(tokens, ((0, 0), (0, 5)))
    alone, found = (computed(model, {"tokens": x}).hidden[:, :7] for x in (tokens, padded))
    np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5)
    unmasked = computed(model, {"tokens": padded, "mask": np.ones_like(padded)}).hidden[:, :7]
    assert np.abs(unmasked - alone).max() > 1e-2


# Meshes ------------------------------------------------------------------------------------------------------------

MESHES: dict[str, tuple[dict[str, int], list[str]]] = {
    "data2_fsdp2_tensor2": ({"data": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron"]),
    "fsdp8": ({"fsdp": 8}, ["fsdp"]),
    "data4_tensor2": ({"data": 4, "tensor": 2}, ["megatron"]),
}
MASKED = {"kind": "masked_tokens", "mask_id": 4, "vocab_size": VOCAB}
TRAINED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("classify", "texts", {}, {"kind": "classify"}),
    "roberta": ("masked_tokens", "texts", {"label": False, "pad": 1}, MASKED | {"pad_id": 1}),
    "modernbert": ("classify", "texts", {}, {"kind": "classify"}),
    "vit": ("classify", "pictures", {}, {"kind": "classify"}),
    "clip": ("pairs", "pictures", {"label": False, "end": END}, {"kind": "contrastive"}),
    "bert-pairs": ("pairs", "texts", {"label": False, "pairs": True}, {"kind": "contrastive"}),
}
DROPOUT = {"bert": {"hidden_dropout_prob": 0.2}, "modernbert": {"mlp_dropout": 0.1, "attention_dropout": 0.1},
           "vit": {"attention_probs_dropout_prob": 0.1}}  # fmt: skip
MESH_SAMPLE = ("bert", "data2_fsdp2_tensor2")
FEWER: dict[str, Any] = {"num_hidden_layers": 1}
LAYERS = {"modernbert": {"num_hidden_layers": 2},
          "clip": {name: CASES["clip"][name] | FEWER for name in ("text_config", "vision_config")}}  # fmt: skip
"""Of the steps on meshes, which take long to compile."""


def training(case: str, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A run as plain data."""
    head, rows, arguments, loss = TRAINED[case]
    kind = case.partition("-")[0]
    return {
        "model": {"kind": "encoder", "head": head,
                  "config": CASES[kind] | LAYERS.get(kind, FEWER) | DROPOUT.get(kind, {})},
        "data": {"kind": "import", "target": f"tests.interop.encoder_rows:{rows}", "arguments": arguments,
                 "batch_size": 16},
        "loss": loss, "optim": {"kind": "sgd", "lr": 0.1}, "num_steps": 3, "run_dir": str(run_dir), "loggers": [],
    } | changes  # fmt: skip


def made(mapping: dict[str, Any]) -> Run:
    user_code.name(Path(__file__).with_name("encoder_rows.py"))
    run = Run.model_validate(mapping)
    user_code.permit(mapping["data"]["target"], None)
    return run


@lru_cache
def on_one_device(case: str) -> Any:
    return stepped(case, {}, ["replicated"])


def stepped(case: str, sizes: dict[str, int], presets: list[str], **changes: Any) -> Any:
    """The loss, gradients and parameters of a step."""
    mapping = training(case, Path("no"), mesh=sizes, rules={"preset": presets}, **changes)
    run = made(mapping | {"precision": {"params": "float64", "compute": "float64"}})
    prepared = prepare(run, run.mesh.build(jax.devices()[: run.mesh.requested() or 1]))
    data, _ = run.data.datasets(run.seed, prepared.bounds)  # pyright: ignore[reportAttributeAccessIssue]
    trial = Trial(prepared)
    return trial.run(trial.start(), [data.rows(i, np.arange(16)) for i in range(1)])[1]


def mesh_cases() -> list[Any]:
    return [
        pytest.param(case, mesh, marks=[] if (case, mesh) == MESH_SAMPLE else [pytest.mark.slow])
        for case in TRAINED
        for mesh in MESHES
    ]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("case", "mesh"), mesh_cases())
def test_a_step_on_a_mesh_is_that_of_one_device_with_dropout_too(case, mesh):
    assert far(on_one_device(case), stepped(case, *MESHES[mesh])) < 1e-10


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_control_other_dropout_is_seen():
    assert far(on_one_device("bert"), stepped("bert", *MESHES["fsdp8"], seed=1)) > 1e-6


def far(want: Any, found: Any) -> float:
    """The largest difference of all quantities of all steps."""
    one, other = (jax.tree.leaves([vars(step) for step in steps]) for steps in (want, found))
    return max(float(np.abs(x - y).max()) for x, y in zip(one, other, strict=True))
