"""Every key of a `config.json` acts as in transformers' config class, or is refused, or is known to change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import config_classes
from meshpar.errors import CheckpointError, Problems
from meshpar.interop.architectures import ARCHITECTURES, canonical, read
from meshpar.interop.huggingface import open_pretrained
from meshpar.models.config_classes import CONFIG_CLASSES
from meshpar.models.foreign import NEUTRAL, OUTSIDE, REQUIRED, WITHOUT_EFFECT
from tests.interop.pretrained import SIZES, VOCAB, loaded, logits, randomized, saved_with
from tests.interop.test_huggingface import TOKENS, our_logits, params

IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OWN: dict[str, Any] = {
    "mixtral": {"num_local_experts": 4},
    "ministral": {"head_dim": 16},  # transformers fails without it
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"num_experts": 10, "moe_intermediate_size": 24, "head_dim": 16},
    "olmoe": {"num_experts": 10, "intermediate_size": 24},
}
TINY: dict[str, dict[str, Any]] = {
    kind: {"model_type": kind} | IDS | (GPT2 if kind == "gpt2" else SIZES | OWN.get(kind, {})) for kind in ARCHITECTURES
}
"""A `config.json` of each kind with its sizes, and no other key."""
INTERNAL = {"num_labels", "classifier_dropout", "hidden_dropout", "summary_last_dropout", "problem_type"}
"""What modeling files read for classifiers, and is no key of a model that generates text."""


def keys_read(kind: str) -> set[str]:
    architecture = ARCHITECTURES[kind]
    known = CONFIG_CLASSES[kind].defaults.keys() | CONFIG_CLASSES[kind].beside
    return (architecture.keys.keys() | architecture.given.model_fields.keys()) & known


def model_of(config: dict[str, Any]):
    problems = Problems()
    model = read(config, "config.json", problems)
    return None if model is None else canonical(model)


def test_the_table_is_that_of_transformers():
    assert config_classes.text() == config_classes.PATH.read_text()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_each_key_of_a_class_and_of_its_model_is_read_or_refused_or_changes_nothing(kind):
    own = CONFIG_CLASSES[kind]
    keys = own.defaults.keys() | own.aliases.keys() | own.beside | config_classes.keys_used(kind, "any") - INTERNAL
    accounted = keys_read(kind) | own.aliases.keys() | REQUIRED.keys() | WITHOUT_EFFECT
    assert keys <= accounted, sorted(keys - accounted)
    assert not keys_read(kind) & (WITHOUT_EFFECT | REQUIRED.keys())


OTHER = {bool: lambda x: not x, int: lambda x: 5, float: lambda x: x + 0.25, str: lambda x: "last"}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_keys_that_are_said_to_change_nothing_change_no_logit_in_transformers(kind):
    config = transformers.AutoConfig.for_model(**TINY[kind])
    model = randomized(config)
    want = logits(model, TOKENS)
    tried = 0
    for key in sorted(WITHOUT_EFFECT & CONFIG_CLASSES[kind].defaults.keys()):
        default = CONFIG_CLASSES[kind].defaults[key]
        value = OTHER[type(default)](default) if default is not None and key != "return_dict" else None
        if value is None:
            continue
        other = transformers.AutoConfig.for_model(**TINY[kind] | {key: value})
        changed = transformers.AutoModelForCausalLM.from_config(other, attn_implementation="eager").eval()
        changed.load_state_dict(model.state_dict())
        np.testing.assert_allclose(logits(changed, TOKENS), want, rtol=0, atol=1e-5, err_msg=key)
        tried += 1
    assert tried > 4


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_missing_key_has_the_default_of_its_own_class(kind, tmp_path):
    """Read from a file without the key, and from the file as transformers completes it: the same model."""
    sizes = {"n_embd": 384} if kind == "gpt2" else {"hidden_size": 384, "num_attention_heads": 32}
    for key in sorted(keys_read(kind) & CONFIG_CLASSES[kind].defaults.keys()):
        config = {name: value for name, value in (TINY[kind] | sizes).items() if name != key}
        (tmp_path / "config.json").write_text(json.dumps(config))
        completed = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
        assert model_of(config) == model_of(completed), key
        assert model_of(config) is not None, key
    assert model_of({"model_type": kind} | OWN.get(kind, {})) is not None


def keys_of_others(kind: str) -> dict[str, Any]:
    """Keys of the other classes, which this one does not have, and one that no class has."""
    others = {key: value for own in ARCHITECTURES for key, value in CONFIG_CLASSES[own].defaults.items()}
    others |= {"sliding_window": 5, "partial_rotary_factor": 0.5, "moe_intermediate_size": 16, "n_inner": 16}
    taken = {*CONFIG_CLASSES[kind].defaults, *CONFIG_CLASSES[kind].aliases, *CONFIG_CLASSES[kind].aliases.values()}
    taken |= CONFIG_CLASSES[kind].beside | WITHOUT_EFFECT | OUTSIDE | REQUIRED.keys() | {"layer_types"}
    kept = {key: value for key, value in others.items() if key not in taken and value not in (None, False, [], {})}
    return kept | {"final_logit_softcapping": 0.1}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_keys_of_other_classes_change_no_logit_in_transformers_and_are_refused(kind, tmp_path):
    more = keys_of_others(kind)
    folder = saved_with(TINY[kind], tmp_path)
    want = logits(loaded(folder), TOKENS)
    (folder / "config.json").write_text(json.dumps(TINY[kind] | more))
    np.testing.assert_array_equal(logits(loaded(folder), TOKENS), want)
    problems = Problems()
    assert read(TINY[kind] | more, "config.json", problems) is None
    assert [problem.where for problem in problems.found] == [f"config.json: {key}" for key in more]
    assert all(f"{CONFIG_CLASSES[kind].called} has no such key" in problem.what for problem in problems.found)


@pytest.mark.parametrize(
    ("kind", "key", "value", "fix"),
    [
        ("llama", "rms_norm_epz", 1e-6, "leave it out, to compute what transformers does; did you mean rms_norm_eps?"),
        ("llama", "use_qk_norm", False, "leave it out, to compute what transformers does"),
        ("phi3", "attention_bias", True, None),
        ("llama", "add_cross_attention", True, None),
        ("mistral", "pruned_heads", {"0": [1]}, None),
        ("qwen2", "quantization", {"bits": 4}, None),
    ],
)
def test_a_key_that_a_class_does_not_have_is_refused(kind, key, value, fix):
    problems = Problems()
    assert read(TINY[kind] | {key: value}, "config.json", problems) is None
    (problem,) = problems.found
    assert problem.where == f"config.json: {key}"
    assert problem.what == f"is {value!r}, and {CONFIG_CLASSES[kind].called} has no such key"
    assert fix is None or problem.fix == fix


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {"is_llama_config": True, "rope_interleaved": False, "torch_dtype": "bfloat16", "sliding_window": None,
              "transformers.js_config": {"kv_cache_dtype": {}}, "_name_or_path": "x", "unsloth_fixed": True},
    "phi3": {"auto_map": {"AutoConfig": "x.Y"}, "attention_bias": False, "mlp_bias": False, "lm_head_bias": False,
             "full_attn_mod": 1, "interpolate_factor": 1},
    "qwen2": {"use_mrope": False, "sliding_window": None},
    "qwen3_moe": {"max_window_layers": 48},
    "gpt2": {"n_ctx": 64, "task_specific_params": {"text-generation": {"do_sample": True}}, "_num_labels": 1},
}  # fmt: skip
"""Keys of files on the Hub that no config class has."""


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_other_keys_of_published_files_and_of_generation_change_no_model(kind):
    """The defaults of generation are what transformers wrote into this file before there was another for them."""
    generation = transformers.GenerationConfig._get_default_generation_params()
    config = TINY[kind]
    model = model_of(config)
    assert model is not None
    assert model_of(dict.fromkeys(OUTSIDE, 5) | PUBLISHED.get(kind, {}) | generation | config) == model


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_no_model_of_transformers_reads_a_key_outside_of_its_class(kind):
    own = CONFIG_CLASSES[kind]
    used = config_classes.keys_used(kind, "any") - INTERNAL - own.defaults.keys() - own.beside
    assert not used & (OUTSIDE | NEUTRAL.keys())


def check_logits(folder: Path, config: dict[str, Any], changes: dict[str, Any] | None = None) -> None:
    """Compares the logits of a folder with those of transformers; `changes` of our model must change them."""
    want = logits(loaded(saved_with(config, folder)), TOKENS)
    pretrained = open_pretrained(folder)
    arrays = params(pretrained)
    np.testing.assert_allclose(our_logits(pretrained.model, arrays), want, rtol=0, atol=2e-5)
    if changes:
        assert abs(our_logits(pretrained.model.model_copy(update=changes), arrays) - want).max() > 1e-4


@pytest.mark.parametrize(
    "kind", [kind if kind in ("qwen3_moe",) else pytest.param(kind, marks=pytest.mark.slow) for kind in ARCHITECTURES]
)
def test_only_sizes_given_the_logits_are_those_of_transformers(kind, tmp_path):
    """Epsilon, rotary base, experts a token and their normalization are the defaults of the class."""
    check_logits(tmp_path, TINY[kind])


SLIDING = "sliding_attention"
FULL = "full_attention"
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5},
    "mistral_of_layers": {"model_type": "mistral", "sliding_window": 5, "layer_types": [FULL, SLIDING], "head_dim": 8},
    "ministral_of_all": {"model_type": "ministral", "sliding_window": 5},
    "mixtral": {"sliding_window": 5},
    "phi3": {"sliding_window": 5},
    "qwen2_of_layers": {"use_sliding_window": True, "sliding_window": 5, "layer_types": [FULL, SLIDING]},
    "qwen3_of_layers": {"use_sliding_window": True, "sliding_window": 5, "layer_types": [SLIDING, FULL]},
    "qwen3_from_a_layer_on": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 5},
    "qwen3_moe_all_layers": {"use_sliding_window": True, "sliding_window": 5, "layer_types": [SLIDING, SLIDING]},
    "qwen3_moe_unused": {"use_sliding_window": False, "sliding_window": 5},
    "llama_has_none": {"sliding_window": None},
}
IN_CI = ("mistral_of_layers", "qwen3_moe", "qwen3_of_layers")


def of_case(case: str) -> dict[str, Any]:
    kind = max((kind for kind in ARCHITECTURES if case.startswith(kind)), key=len)
    return TINY[kind] | WINDOWS[case]


@pytest.mark.parametrize(
    "case", [case if case in IN_CI else pytest.param(case, marks=pytest.mark.slow) for case in WINDOWS]
)
def test_windows_are_those_of_transformers(case, tmp_path):
    has_window = case not in ("qwen3_moe_unused", "llama_has_none")
    check_logits(tmp_path, of_case(case), {"window": None, "global_layers": ()} if has_window else None)


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        ("qwen2", {"layer_types": [FULL, SLIDING], "sliding_window": 5}, "use_sliding_window"),
        ("ministral", {"layer_types": [FULL, SLIDING], "sliding_window": None}, "sliding_window"),
        ("qwen3", {"layer_types": [FULL, "linear_attention"]}, "layer_types"),
        ("mistral", {"layer_types": [FULL]}, "layer_types"),
        ("qwen3_moe", {"layer_types": [FULL, SLIDING], "use_sliding_window": True, "sliding_window": 5}, "layer_types"),
        ("qwen3_moe", {"layer_types": [FULL, SLIDING]}, "layer_types"),
        ("llama", {"layer_types": [SLIDING, SLIDING], "sliding_window": 5}, "layer_types"),
        ("olmoe", {"sliding_window": 5}, "sliding_window"),
        ("olmoe", {"head_dim": 16}, "head_dim"),
        ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("llama", {"hidden_size": 34, "head_dim": 8}, "hidden_size"),
        ("mistral", {"head_dim": 7}, "head_dim"),
        ("phi3", {"head_dim": 10, "partial_rotary_factor": 0.5}, "head_dim"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps"),
        ("mixtral", {"num_experts": 3}, "num_experts"),
        ("llama", {"per_layer_config": {"0": {"rms_norm_eps": 1.0}}}, "per_layer_config"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)  # fmt: skip
def test_what_transformers_refuses_or_we_do_not_compute_is_refused_by_its_key(kind, changes, key):
    problems = Problems()
    assert read(TINY[kind] | changes, "config.json", problems) is None
    assert any(problem.where.startswith(f"config.json: {key}") for problem in problems.found)


@pytest.mark.parametrize(
    "kind", ["mistral", *(pytest.param(k, marks=pytest.mark.slow) for k in ("llama", "qwen2", "gpt2"))]
)
def test_a_head_beside_a_tied_config_is_used_if_it_differs(kind, tmp_path):
    """As transformers loads it. The exported config then says that the two are not tied."""
    untied = TINY[kind] | {"tie_word_embeddings": False}
    saved_with(untied, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(untied | {"tie_word_embeddings": True}))
    want = logits(loaded(tmp_path), TOKENS)
    pretrained = open_pretrained(tmp_path)
    assert not pretrained.model.tie_embeddings
    np.testing.assert_allclose(our_logits(pretrained.model, params(pretrained)), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("keep", ["both, equal", "only the head"])
def test_a_tied_model_may_have_its_matrix_under_either_name(keep, tmp_path):
    from safetensors.numpy import load_file, save_file

    want = logits(loaded(saved_with(TINY["llama"] | {"tie_word_embeddings": True}, tmp_path)), TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = (
        tensors["model.embed_tokens.weight"] if keep == "both, equal" else tensors.pop("model.embed_tokens.weight")
    )
    save_file(tensors | {"lm_head.weight": embedding.copy()}, tmp_path / "model.safetensors", {"format": "pt"})
    np.testing.assert_array_equal(logits(loaded(tmp_path), TOKENS), want)
    pretrained = open_pretrained(tmp_path)
    assert pretrained.model.tie_embeddings
    np.testing.assert_allclose(our_logits(pretrained.model, params(pretrained)), want, rtol=0, atol=2e-5)


def values_of(kind: str) -> list[tuple[str, Any]]:
    """Other legal values of each key that is read, and of each that is refused."""
    values: dict[str, list[Any]] = {
        "vocab_size": [100], "hidden_size": [64], "n_embd": [64], "intermediate_size": [48], "n_inner": [48],
        "num_hidden_layers": [3], "n_layer": [3], "num_attention_heads": [2], "n_head": [2],
        "num_key_value_heads": [1, 4], "head_dim": [8, 4], "max_position_embeddings": [32], "n_positions": [32],
        "rms_norm_eps": [0.1], "layer_norm_epsilon": [0.1], "tie_word_embeddings": [True, False],
        "hidden_act": ["gelu", "swish"], "activation_function": ["relu", "gelu_pytorch_tanh"],
        "attention_bias": [True], "mlp_bias": [True], "clip_qkv": [0.5],
        "sliding_window": [5, None], "use_sliding_window": [True], "max_window_layers": [1], "layer_types": [None],
        "rope_parameters": [{"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}],
        "rope_scaling": [
            {"type": "linear", "factor": 2.0},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 16},
            {"rope_type": "dynamic", "factor": 2.0},
        ],
        "rope_theta": [100.0], "partial_rotary_factor": [0.5],
        "num_experts_per_tok": [1], "num_local_experts": [5], "num_experts": [5], "moe_intermediate_size": [16],
        "norm_topk_prob": [True], "decoder_sparse_step": [2], "mlp_only_layers": [[0], [1], None],
        "scale_attn_weights": [False], "scale_attn_by_inverse_layer_idx": [True],
    }  # fmt: skip
    keys = (keys_read(kind) | REQUIRED.keys() & CONFIG_CLASSES[kind].defaults.keys()) - {
        "is_encoder_decoder", "add_cross_attention", "per_layer_config", "quantization_config"
    }  # fmt: skip
    assert keys <= values.keys(), keys - values.keys()
    return [(key, value) for key in sorted(keys) for value in values[key]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "key", "value"), [(kind, *rest) for kind in ARCHITECTURES for rest in values_of(kind)]
)
def test_another_value_of_a_key_is_read_as_transformers_reads_it_or_is_refused(kind, key, value, tmp_path):
    config = (
        TINY[kind]
        | {key: value}
        | ({"num_experts_per_tok": 2} if kind in ("qwen3_moe", "olmoe") and key == "num_experts" else {})
    )
    problems = Problems()
    if read(config, "config.json", problems) is None or (kind, key, value) == ("ministral", "sliding_window", None):
        return  # refused; or transformers fails in the forward pass
    check_logits(tmp_path, config)


def test_control_a_wrong_default_is_seen(monkeypatch, tmp_path):
    own = CONFIG_CLASSES["qwen3_moe"]
    wrong = own._replace(defaults={**own.defaults, "num_experts_per_tok": 2})
    monkeypatch.setitem(CONFIG_CLASSES, "qwen3_moe", wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(AssertionError):
        check_logits(tmp_path, TINY["qwen3_moe"])


def test_a_config_that_is_refused_names_the_file(tmp_path):
    saved_with(TINY["llama"], tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY["llama"] | {"per_layer_config": {"0": {}}}))
    with pytest.raises(CheckpointError, match=r"config.json: per_layer_config\n    is .*only null is supported"):
        open_pretrained(tmp_path)
