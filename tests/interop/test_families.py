"""Families of decoders: transformers' logits, the same bits on the way back, and one device's steps on each mesh."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

from meshpar import AxisRules, MeshLayout, convert
from meshpar.data import Synthetic
from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.experiment.config import Precision, Run
from meshpar.experiment.prepare import prepare
from meshpar.interop import architectures
from meshpar.interop.export import export
from meshpar.interop.family_config import options_of
from meshpar.interop.family_model import FamilyModel
from meshpar.interop.open_folder import open_folder
from meshpar.models.config_classes import CONFIG_CLASSES
from meshpar.models.families import FAMILIES, REFUSED
from meshpar.models.families.decoder import FamilyDecoder
from meshpar.optim import SGD
from meshpar.verification.trial import Trial
from tests.interop.families import BASE, CASES, OWN, PUBLISHED
from tests.interop.modules import built, opened
from tests.interop.pretrained import loaded, logits, saved_with

ROWS, SEQ, VOCAB = 2, 24, 96
TOKENS = np.random.default_rng(0).integers(2, VOCAB, (ROWS, SEQ))
IN_CI = (
    "gemma3_text",
    "cohere-norms",
    "falcon-groups",
    "bloom",
    "deepseek_v3",
    "gpt_oss",
    "phi3-longrope",
    "opt-after",
)


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("highest"):
        yield


def as_read(config: dict[str, Any]) -> dict[str, Any]:
    """The config whose model transformers has: that of Kimi K2 is DeepSeek V3's."""
    return config | ({"model_type": "deepseek_v3"} if config["model_type"] == "kimi_k2" else {})


def saved(case: str, folder: Path) -> tuple[Path, np.ndarray]:
    """A folder of random weights, and the logits of transformers."""
    want = wanted(as_read(CASES[case]), folder)
    (folder / "config.json").write_text(json.dumps(CASES[case]))
    return folder, want


def wanted(config: dict[str, Any], folder: Path) -> np.ndarray:
    """The logits of transformers with random weights, which are saved."""
    saved_with(config, folder)
    if config.get("alibi"):  # transformers adds it twice in its eager attention, and once in the default one
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    else:
        model = loaded(folder)
    return logits(model, TOKENS)


def computed(model: FamilyDecoder) -> np.ndarray:
    return np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(TOKENS, jnp.int32)))


def decoded(model: FamilyDecoder) -> np.ndarray:
    """The logits of one token after another."""
    step = jax.jit(lambda model, token, cache: model.decode(token, cache))
    cache, found = model.init_cache(ROWS, SEQ), []
    for token in TOKENS.T:
        one, cache = step(model, jnp.asarray(token[:, None], jnp.int32), cache)
        found.append(one)
    return np.concatenate(found, axis=1)


def sample(names: Any, in_ci: Any) -> list[Any]:
    return [pytest.param(name, marks=[] if name in in_ci else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("case", sample(CASES, IN_CI))
def test_logits_are_those_of_transformers_and_the_same_bits_are_written(case, tmp_path):
    folder, want = saved(case, tmp_path / "read")
    pretrained, params = opened(folder)
    model = built(pretrained.model.options, params)
    found = computed(model)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-4)
    assert np.abs(want - want[::-1]).max() > 1e-2
    if case in (*IN_CI[:5], *BASE):
        np.testing.assert_allclose(decoded(model), found, rtol=0, atol=1e-4)
    export(tmp_path / "written", pretrained.model, params, folder)
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "written"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(x, after[name]) and x.shape == after[name].shape for name, x in before.items())
    assert json.loads((tmp_path / "written/config.json").read_text()) == CASES[case] | {"torch_dtype": "float32"}


def test_control_a_wrong_option_is_seen(tmp_path):
    folder, want = saved("gemma2", tmp_path)
    _, params = opened(folder)
    config = CASES["gemma2"] | {"attn_logit_softcapping": 0.1}
    options = options_of(config, "", Problems())
    assert options is not None
    assert np.abs(computed(built(options, params)) - want).max() > 1e-3


def test_documents_of_a_row_do_not_attend_to_each_other(tmp_path):
    pretrained, params = opened(saved("gemma3_text", tmp_path)[0])
    model = built(pretrained.model.options, params)
    cut = 10
    places = np.r_[:cut, : SEQ - cut]
    segments = np.r_[[1] * cut, [2] * (SEQ - cut)]
    packed = [jnp.asarray(np.broadcast_to(x, (ROWS, SEQ)), jnp.int32) for x in (TOKENS, segments, places)]
    call = jax.jit(lambda model, *arrays: model(*arrays))
    alone = [np.asarray(call(model, jnp.asarray(x, jnp.int32))) for x in np.split(TOKENS, [cut], axis=1)]
    np.testing.assert_allclose(call(model, *packed), np.concatenate(alone, axis=1), rtol=0, atol=1e-5)


# Keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in BASE if kind not in ("kimi_k2", *OWN)])
def test_a_missing_key_has_the_default_of_its_own_class(kind, tmp_path):
    """Read from a file without the key, and from the file as transformers completes it: the same options."""
    config = CASES[kind]
    for key in config.keys() - {"model_type", "layer_types", "max_position_embeddings", "n_positions"}:
        left = {name: value for name, value in config.items() if name != key}
        if key in ("hidden_size", "n_embd", "num_attention_heads", "n_head", "num_hidden_layers", "sliding_window"):
            left |= {"head_dim": 8} if "head_dim" in config else {}
            left.pop("layer_types", None)
            left.pop("no_rope_layers", None)
        (tmp_path / "config.json").write_text(json.dumps(left))
        try:
            completed = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
        except Exception:  # sizes that do not fit are refused by both
            assert options_of(left, "", Problems()) is None or key in ("num_attention_heads", "hidden_size")
            continue
        problems, again = Problems(), Problems()
        assert options_of(left, "", problems) == options_of(completed, "", again), (key, problems.found, again.found)


OTHER = {bool: lambda x: not x, float: lambda x: x + 0.25, str: lambda x: "relu"}


def other_values() -> list[tuple[str, str]]:
    """Kind and key of each option that is no size."""
    found = []
    for kind in BASE:
        own = CONFIG_CLASSES[FAMILIES[kind].called or kind]
        for key, default in own.defaults.items():
            if kind not in ("kimi_k2", *OWN) and type(default) in OTHER and not key.startswith(("output_", "return_")):
                found.append((kind, key))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "key"), other_values())
def test_another_value_of_a_key_is_read_as_transformers_reads_it_or_is_refused(kind, key, tmp_path):
    default = CONFIG_CLASSES[FAMILIES[kind].called or kind].defaults[key]
    config = CASES[kind] | {key: OTHER[type(default)](default)}
    if options_of(config, "", Problems()) is None:
        return
    want = wanted(config, tmp_path)
    pretrained, params = opened(tmp_path)
    np.testing.assert_allclose(computed(built(pretrained.model.options, params)), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "where", "what"),
    [
        ("gemma", {"rms_norm_epz": 1.0}, "rms_norm_epz", "did you mean rms_norm_eps"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention", "only null is supported"),
        ("gemma3_text", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping", "only null is supported"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters.rope_type", ""),
        ("olmo2", {"rope_scaling": {"rope_type": "yarm"}}, "rope_scaling", "did you mean yarn"),
        ("olmo2", {"rope_scaling": {"rope_type": "linear", "factor": 2, "beta": 1}}, "rope_scaling.beta", "no such"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers", "2 entries"),
        ("exaone4", {"layer_types": ["full_attention", "chunked"]}, "layer_types", "'chunked' is not supported"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm", ""),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim", "only that of hidden_size"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn", ""),
        ("deepseek_v3", {"topk_group": 9}, "topk_group", "not a whole number from 1 to 2"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok", "chooses two"),
        ("granite", {"hidden_act": "silou"}, "hidden_act", "did you mean silu"),
        ("cohere", {"hidden_size": "big"}, "hidden_size", "'big', not a whole number"),
        ("gptj", {"rotary_dim": 3}, "rotary_dim", "in pairs"),
        ("gemma2", {"quantization_config": {"bits": 4}}, "quantization_config", "only null"),
        ("phi3-longrope", {"original_max_position_embeddings": -1}, "rope_scaling.original_max_position_embeddings",
         "not a positive"),
        ("nemotron", {"num_hidden_layers": 10**9}, "num_hidden_layers", "not a whole number"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_its_key(kind, changes, where, what):
    problems = Problems()
    assert options_of(CASES[kind] | changes, "config.json", problems) is None
    found = {problem.where: f"{problem.what} {problem.fix}" for problem in problems.found}
    assert f"config.json: {where}" in found, found
    assert what in found[f"config.json: {where}"]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_that_is_not_computed_is_refused_with_the_reason(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(CheckpointError, match=REFUSED[kind]):
        open_folder(tmp_path)


def test_an_unknown_family_is_refused_with_the_nearest(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gema2"}))
    with pytest.raises(CheckpointError, match=r"'gema2' is not supported\n    supported: .*; did you mean gemma2?"):
        open_folder(tmp_path)


def outcome(case: str) -> str:
    """How the config of a published variant is read: by which kind of model, or why it is refused."""
    if case in REFUSED:
        return "refused: " + REFUSED[case]
    if case in CASES:
        assert options_of(CASES[case], "", Problems()) is not None, case
        return "`kind: family`"
    assert case in architectures.ARCHITECTURES, case
    return f"`kind: {architectures.MODELS[case].__name__.lower()}`"


def test_of_62_published_variants_at_least_50_are_read():
    found = {name: outcome(case) for name, case in PUBLISHED.items()}
    read = [name for name, how in found.items() if not how.startswith("refused")]
    assert len(found) == 62
    assert len(read) >= 50, sorted(found.keys() - {*read})


# Meshes ------------------------------------------------------------------------------------------------------------

MESHES: dict[str, tuple[dict[str, int], list[str]]] = {
    "data2_fsdp2_tensor2": ({"data": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron"]),
    "fsdp8": ({"fsdp": 8}, ["fsdp"]),
    "data4_tensor2_sp": ({"data": 4, "tensor": 2}, ["megatron_sp"]),
}
MESH_SAMPLE = {("gemma3_text", "data2_fsdp2_tensor2")}
ONE_KEY_HEAD = ("falcon",)


def mesh_cases() -> list[Any]:
    return [
        pytest.param(kind, mesh, marks=[] if (kind, mesh) in MESH_SAMPLE else [pytest.mark.slow])
        for kind in BASE
        if kind not in OWN
        for mesh in MESHES
    ]


def batch() -> dict[str, np.ndarray]:
    """Rows of two documents each."""
    draw = np.random.default_rng(1)
    tokens, targets = draw.integers(0, VOCAB, (2, 8, SEQ), dtype=np.int32)
    cut = 9
    column = {"positions": np.r_[:cut, : SEQ - cut], "segments": np.r_[[1] * cut, [2] * (SEQ - cut)]}
    whole = {name: np.broadcast_to(np.int32(x), (8, SEQ)) for name, x in column.items()}
    return {"tokens": tokens, "targets": targets} | whole


def first_step(kind: str, sizes: dict[str, int], presets: list[str]) -> Any:
    layout = MeshLayout.model_validate(sizes)
    more: Any = {"kv_heads": ()} if kind in ONE_KEY_HEAD and "tensor" in sizes else {}
    run = Run(
        model=FamilyModel(config=CASES[kind]), data=Synthetic(batch_size=8, seq_len=SEQ, vocab_size=VOCAB),
        optim=SGD(lr=0.1), mesh=layout, rules=AxisRules(preset=tuple(presets), **more), num_steps=1, run_dir=Path("no"),
        precision=Precision(params="float64", compute="float64"),
    )  # fmt: skip
    trial = Trial(prepare(run, layout.build(jax.devices()[: layout.requested() or 1])))
    return trial.run(trial.start(), [batch()])[1][0]


@lru_cache
def on_one_device(kind: str) -> Any:
    return first_step(kind, {}, ["replicated"])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("kind", "mesh"), mesh_cases())
def test_a_step_on_a_mesh_is_that_of_one_device(kind, mesh):
    want, found = on_one_device(kind), first_step(kind, *MESHES[mesh])
    for name in ("loss", "gradients", "norm", "parameters"):
        one, other = getattr(want, name), getattr(found, name)
        assert one.keys() == other.keys()
        far = {path: float(np.abs(x - other[path]).max()) for path, x in one.items()}
        assert {path: x for path, x in far.items() if not x < 1e-10} == {}, name


# Runs --------------------------------------------------------------------------------------------------------------


def test_a_folder_is_converted_and_written_back_with_every_bit(tmp_path):
    folder, _ = saved("opt", tmp_path / "hf")
    run = convert.from_hf(folder, tmp_path / "run", ["mesh.fsdp=8", "rules=[fsdp]"])
    assert isinstance(run.model, FamilyModel)
    convert.to_hf(tmp_path / "run", tmp_path / "back")
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(x, after[name]) for name, x in before.items())


def test_a_run_of_another_model_than_the_folders_is_refused(tmp_path):
    folder, _ = saved("gemma", tmp_path)
    pretrained = open_folder(folder)
    other = FamilyModel(config=CASES["gemma"] | {"rms_norm_eps": 0.1})
    with pytest.raises(ConfigError, match=r"model.config differs from .*config.json: rms_norm_eps; leave model.config"):
        pretrained.check(other)


def test_a_config_of_a_run_lists_its_problems():
    with pytest.raises(ConfigError, match=r"config: rms_norm_epz: is 1.0, and GemmaConfig has no such key"):
        FamilyModel(config=CASES["gemma"] | {"rms_norm_epz": 1.0})


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    folder, _ = saved("gpt_oss", tmp_path)
    (folder / "config.json").write_text(json.dumps(CASES["gpt_oss"] | {"intermediate_size": 40}))
    with pytest.raises(CheckpointError, match=r"experts.down_proj\[0\]\n    is \[48, 32\]"):
        open_folder(folder)
