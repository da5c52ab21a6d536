"""Adapters of PEFT: read, they give the logits of PEFT; what is not supported, or fits another model, is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import meshpar
from meshpar import convert
from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.experiment.config import Init
from meshpar.interop import peft_export
from meshpar.interop.export import export, keep_model_files
from meshpar.interop.open_folder import open_folder
from meshpar.interop.peft import ADAPTER, ADAPTER_CONFIG, MAGNITUDES, AdaptedTensor, adapted
from meshpar.interop.safetensors import tensors_in
from meshpar.models import GPT, Llama
from meshpar.nn.describe import describe, functional
from meshpar.nn.lora import LoRA, is_lora
from meshpar.serve.side_adapters import open_adapters
from meshpar.serve.source import open_source
from meshpar.tree import flatten_with_paths, map_with_path

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24,
                         "vocab_size": 32}  # fmt: skip
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "base_model_name_or_path": "../base", "r": 4, "lora_alpha": 6, "bias": "none",
    "target_modules": ["q_proj", "down_proj"], "fan_in_fan_out": False, "task_type": "CAUSAL_LM",
    "init_lora_weights": True, "lora_dropout": 0.1, "use_dora": False, "modules_to_save": None, "rank_pattern": {},
    "alpha_pattern": {}, "use_rslora": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("peft") / "base"
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def write_adapter(base: Path, name: str, matrices: dict[str, tuple[Any, Any]], **changes: Any) -> Path:
    """Writes the files as PEFT does: module -> (A [rank, in], B [out, rank])."""
    folder = base.parent / name
    folder.mkdir(exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(CONFIG | changes))
    tensors = {}
    for module, (a, b) in matrices.items():
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    save_file(tensors, folder / ADAPTER)
    return folder


def drawn(rank: int, size_in: int, size_out: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(rank + size_in + 2 * size_out)
    return rng.normal(size=(rank, size_in)).astype(np.float32), rng.normal(size=(size_out, rank)).astype(np.float32)


Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("changes", "ranks", "scales"),
    [
        ({}, (4, 4), (6 / 4, 6 / 4)),
        ({"use_rslora": True}, (4, 4), (6 / 2, 6 / 2)),
        (
            {"rank_pattern": {"q_proj": 2, r"^model\.layers\.0.*": 3}, "alpha_pattern": {r"layers.1.mlp.down_proj": 5}},
            (2, 4), (6 / 2, 5 / 4),
        ),
        ({"rank_pattern": {"down_proj": 9}, "use_rslora": True}, (4, 9), (6 / 2, 6 / 3)),
    ],
    ids=["plain", "rslora", "patterns", "rslora and patterns"],
)  # fmt: skip
def test_an_adapter_adds_scale_times_b_a(base, changes, ranks, scales):
    matrices = {Q: drawn(ranks[0], 16, 16), DOWN: drawn(ranks[1], 24, 16)}
    read = open_folder(write_adapter(base, "adapter", matrices, **changes)).tensors
    plain = load_file(base / "model.safetensors")
    for (module, (a, b)), scale in zip(matrices.items(), scales, strict=True):
        want = plain[f"{module}.weight"] + scale * (b @ a)
        np.testing.assert_allclose(read[f"{module}.weight"].read(), want, rtol=1e-6, atol=1e-6)
        part = read[f"{module}.weight"].read(slice(3, 9), slice(2, 7))
        np.testing.assert_allclose(part, want[3:9, 2:7], rtol=1e-6, atol=1e-6)
    other = f"{Q.replace('0', '1')}.weight"
    np.testing.assert_array_equal(read[other].read(), plain[other])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type\n.*'IA3' is not supported"),
    "biases": ({"bias": "all"}, "bias\n.*trained biases are not supported"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save\n.*is not supported"),
    "pissa": ({"init_lora_weights": "pissa"}, "'pissa' changed the weights of the base model"),
    "a new key": ({"use_new_method": {"a": 1}}, "use_new_method\n.*is not supported"),
    "a broken pattern": ({"rank_pattern": {"(": 1}}, "rank_pattern\n.*is no object of regular"),
    "another rank": ({"r": 8}, r"lora_A\[4, 16\] and lora_B\[16, 4\] of rank 8 do not fit"),
    "no number": ({"lora_alpha": "6"}, "its rank 4 or its lora_alpha '6' is no such number"),
    "another base": ({"base_model_name_or_path": "meta/llama"}, "'meta/llama' is no folder; nothing is downloaded"),
    "itself": ({"base_model_name_or_path": "."}, "which is an adapter too"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_supported_is_refused_by_name(base, case):
    changes, message = WRONG[case]
    folder = write_adapter(base, "wrong", {Q: drawn(4, 16, 16)}, **changes)
    if case == "itself":
        folder = write_adapter(base, "outer", {Q: drawn(4, 16, 16)}, base_model_name_or_path="../wrong")
    with pytest.raises(CheckpointError, match=message):
        open_folder(folder)


def test_an_adapter_of_another_model_is_refused_with_all_that_differs(base):
    matrices = {Q: drawn(4, 32, 32), "model.layers.7.mlp.down_proj": drawn(4, 24, 16)}
    with pytest.raises(CheckpointError) as raised:
        open_folder(write_adapter(base, "other", matrices))
    assert "lora_A[4, 32] and lora_B[32, 4] of rank 4 do not fit the model's matrix[16, 16]" in str(raised.value)
    assert "model.layers.7.mlp.down_proj\n    the model has no such matrix" in str(raised.value)


def test_magnitudes_of_dora_are_the_norms_of_the_adapted_outputs(base):
    """Also of a part that is read; magnitudes that are missing, unasked for, or of another size are refused."""
    a, b = drawn(4, 16, 16)
    folder = write_adapter(base, "dora", {Q: (a, b)}, use_dora=True)
    with pytest.raises(CheckpointError, match="has no magnitudes, and use_dora is true"):
        open_folder(folder)
    matrices = load_file(folder / ADAPTER)
    magnitudes = np.linspace(0.5, 2, 16, dtype=np.float32)
    save_file(matrices | {f"base_model.model.{Q}.lora_magnitude_vector": magnitudes}, folder / ADAPTER)
    tensor = open_folder(folder).tensors[f"{Q}.weight"]
    want = load_file(base / "model.safetensors")[f"{Q}.weight"] + 1.5 * (b @ a)
    want *= (magnitudes / np.linalg.norm(want, axis=1))[:, None]
    np.testing.assert_allclose(tensor.read(), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(tensor.read(slice(3, 9), slice(2, 7)), want[3:9, 2:7], rtol=1e-6, atol=1e-6)
    source = open_source(base, ["mesh.data=8"])
    with pytest.raises(CheckpointError, match="magnitudes of DoRA, which scale the whole matrix"):
        open_adapters(source, {"dora": folder})
    save_file(matrices | {f"base_model.model.{Q}.lora_magnitude_vector": magnitudes[1:]}, folder / ADAPTER)
    with pytest.raises(CheckpointError, match=r"lora_magnitude_vector\[15\] does not fit lora_B\[16, 4\]"):
        open_folder(folder)
    write_adapter(base, "dora", {}, use_dora=False)
    save_file(matrices | {f"base_model.model.{Q}.lora_magnitude_vector": magnitudes}, folder / ADAPTER)
    with pytest.raises(CheckpointError, match="has magnitudes, and use_dora is false"):
        open_folder(folder)


def test_a_matrix_that_is_stored_as_inputs_by_outputs_is_adapted_in_its_order(tmp_path):
    """As GPT-2's. PEFT corrects an adapter that says otherwise."""
    a, b = drawn(2, 6, 6)
    module = "h.0.attn.c_attn"
    save_file({f"{module}.weight": np.zeros((6, 6), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(CONFIG | {"r": 2}))
    name = f"base_model.model.{module}"
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, tmp_path / ADAPTER)
    tensors = tensors_in(tmp_path / "model.safetensors", Problems())
    read = adapted(tmp_path, tensors, "h.", [f"{module}.weight"])[f"{module}.weight"].read(slice(1, 4))
    np.testing.assert_allclose(read, 3 * (b @ a).T[1:4], rtol=1e-6)


LLAMA = ("llama", ["blocks.attn.*", "blocks.mlp.down"], 10)
GPT2 = ("gpt2", ["blocks.attn.q", "blocks.attn.v", "blocks.mlp.*"], 6)
"""q, k and v are one matrix here, in [in, out]: q and v are adapted, k is not."""
SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "intermediate_size": 24, "vocab_size": 29}


def check_adapter(adapter: Path, merged: Path, num: int) -> None:
    """Whether an adapter gives the merged model, by so many matrices."""
    read, want = open_folder(adapter).tensors, open_folder(merged).tensors
    for name, tensor in read.items():
        np.testing.assert_allclose(tensor.read(), want[name].read(), rtol=0, atol=1e-6, err_msg=name)
    assert sum(isinstance(tensor, AdaptedTensor) for tensor in read.values()) == num


@pytest.mark.parametrize(("kind", "paths", "num"), [LLAMA, GPT2])
def test_updates_are_written_as_an_adapter_that_gives_the_merged_model(kind, paths, num, tmp_path):
    model = Llama(**SMALL) if kind == "llama" else GPT(**SMALL, max_seq_len=8, tie_embeddings=True)
    lora = LoRA(rank=2, alpha=3, paths=paths)
    module = model.build(nnx.Rngs(0))
    lora.adapt(module, nnx.Rngs(1))
    rng = np.random.default_rng(0)
    params = {
        path: jnp.array(rng.normal(size=x.shape), x.dtype) if is_lora(path) else x
        for path, x in flatten_with_paths(nnx.to_pure_dict(nnx.state(module, nnx.Param))).items()
    }
    export(tmp_path / "base", model, {path: x for path, x in params.items() if not is_lora(path)})
    export(tmp_path / "merged", model, lora.merged(params))
    peft_export.write_adapter(tmp_path / "adapter", model, lora, params, "../base", None)
    check_adapter(tmp_path / "adapter", tmp_path / "merged", num)


@pytest.mark.slow
def test_a_run_with_lora_is_written_as_an_adapter_that_gives_the_merged_model(base, tmp_path):
    settings: Any = {
        "init": {"from_hf": base}, "lora": {"rank": 2, "alpha": 3, "paths": LLAMA[1]}, "rules": ["fsdp"],
        "data": {"kind": "synthetic", "batch_size": 8, "seq_len": 8, "vocab_size": 32}, "mesh": {"fsdp": 8},
        "optim": {"kind": "adamw", "lr": 0.1}, "num_steps": 2, "run_dir": tmp_path / "run", "loggers": [],
    }  # fmt: skip
    model: Any = open_folder(base).model
    meshpar.fit(meshpar.Run(model=model, **settings), json=True)
    convert.to_hf(tmp_path / "run", tmp_path / "merged")
    convert.to_peft(tmp_path / "run", tmp_path / "adapter")
    check_adapter(tmp_path / "adapter", tmp_path / "merged", LLAMA[2])


def test_the_folder_of_an_adapter_is_that_of_a_model(base, tmp_path):
    """Its other files are those of the base model; a converted run has its updates in the kernels."""
    folder = write_adapter(base, "served", {Q: drawn(4, 16, 16)})
    source = open_source(folder, ["mesh.data=8"])
    assert source.folder == folder / "../base"
    run = convert.from_hf(folder, tmp_path / "run", ["mesh.data=8"])
    convert.to_hf(run.run_dir, tmp_path / "out")
    want = open_folder(folder).tensors[f"{Q}.weight"].read()
    np.testing.assert_array_equal(open_folder(tmp_path / "out").tensors[f"{Q}.weight"].read(), want)


def test_a_run_without_lora_has_no_adapter(base, tmp_path):
    convert.from_hf(base, tmp_path / "plain", ["mesh.data=8"])
    with pytest.raises(CheckpointError, match="trained without LoRA"):
        convert.to_peft(tmp_path / "plain", tmp_path / "none")

    def base_of(run_dir: Path, began: str) -> str:
        """The base of a run that began with a checkpoint of the converted one."""
        run_dir.mkdir(exist_ok=True)
        record = {"kind": "restored", "step": 0, "source": str(tmp_path / "plain" / "checkpoints" / began)}
        (run_dir / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        keep_model_files(tmp_path / "plain" / "hugging_face", run_dir)
        run = continued(base, None, run_dir)
        return convert.base_of(run.model_copy(update={"init": Init(from_checkpoint=tmp_path / "plain")}), run_dir)

    assert base_of(tmp_path / "run", "0") == base_of(tmp_path / "plain", "0") == str(base)
    with pytest.raises(
        ConfigError, match=r"began with .*/plain/checkpoints/4, .*; meshpar export .*/4 FOLDER --format hf"
    ):
        base_of(tmp_path / "run", "4")


NF4: dict[str, Any] = {"kind": "nf4", "group": 4, "double": True}


def qlora(base: Path, run_dir: Path) -> meshpar.Run:
    """A run that trains LoRA on a folder's kernels in nf4, on a mesh."""
    return meshpar.Run(
        model={"weights": NF4}, init={"from_hf": base}, lora={"rank": 2, "alpha": 3, "paths": LLAMA[1]},  # pyright: ignore
        rules=["fsdp", "megatron"], mesh={"data": 2, "fsdp": 2, "tensor": 2},  # pyright: ignore
        data={"kind": "synthetic", "batch_size": 8, "seq_len": 8, "vocab_size": 32},  # pyright: ignore
        optim={"kind": "adamw", "lr": 0.1}, num_steps=2, run_dir=run_dir, loggers=[],  # pyright: ignore
    )  # fmt: skip


@pytest.mark.slow
def test_a_folder_is_quantized_as_it_is_read_and_lora_trains_on_the_codes(base, tmp_path):
    """The exported model is the folder's, rounded to nf4, with the update; the adapter has the same update."""
    run = qlora(base, tmp_path / "run")
    meshpar.fit(run, json=True)
    convert.to_hf(run.run_dir, tmp_path / "merged")
    convert.to_peft(run.run_dir, tmp_path / "adapter")
    plain, adapted_, merged = (
        open_folder(folder).tensors for folder in (base, tmp_path / "adapter", tmp_path / "merged")
    )
    how = meshpar.Quantized(**NF4)
    for name, tensor in plain.items():
        want = tensor.read()
        if name.endswith("_proj.weight"):
            kernel = jnp.asarray(want.T)
            # The four heads are four input dims of o_proj.
            heads = kernel.reshape(4, 4, -1) if "o_proj" in name else kernel
            num = heads.ndim - 1
            codes = how.quantize(heads, num - 1, num)
            rounded = np.asarray(how.dequantize(codes, num - 1, num)).reshape(kernel.shape).T
            assert 0.001 < abs(rounded - want).max() < 0.1
            want = rounded + adapted_[name].read() - want
        np.testing.assert_allclose(merged[name].read(), want, rtol=0, atol=1e-6, err_msg=name)
    answers = meshpar.generate(run.run_dir, ["3 4"], max_tokens=4).texts
    assert answers == meshpar.generate(tmp_path / "merged", ["3 4"], overrides=["mesh.data=8"], max_tokens=4).texts


SEQUENCE: dict[str, Any] = {"kind": "synthetic", "batch_size": 8, "seq_len": 8, "vocab_size": 32}


def continued(base: Path, adapter: Path | None, run_dir: Path, optim: Any = None, num_steps: int = 1, **lora: Any):
    """A run on a mesh whose LoRA begins with an adapter; by default one whose steps change no bit."""
    lora = {"rank": 4, "alpha": 6, "paths": ["blocks.attn.q", "blocks.mlp.down"]} | lora
    return meshpar.Run(
        init={"from_hf": base, "adapter": adapter}, lora=lora, rules=["fsdp", "megatron"],  # pyright: ignore
        mesh={"data": 2, "fsdp": 2, "tensor": 2}, data=SEQUENCE, log_every=1,  # pyright: ignore
        optim=optim or {"kind": "adamw", "lr": 1e-30}, num_steps=num_steps, run_dir=run_dir, loggers=[],
    )  # fmt: skip


MODULES = {Q: (16, 16), Q.replace("0", "1"): (16, 16), DOWN: (24, 16), DOWN.replace("1", "0"): (24, 16)}
PATTERNS = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q_proj": 5}, "use_rslora": True}
OURS: dict[str, Any] = {
    "rank_pattern": {"blocks.mlp.*": 2}, "alpha_pattern": {"blocks.attn.q": 5}, "use_rslora": True,
}  # fmt: skip
"""The same for a run: globs over the paths of its projections."""


@pytest.mark.parametrize("has_dora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_lora_goes_on_from_an_adapter(has_dora, base, tmp_path):
    """After a step that changes no bit the run writes the same adapter, bit for bit; another LoRA is refused.

    The norms of DoRA are kept as changes from those of the model, so that they may be rounded.
    """
    ranks = {module: 2 if has_dora and "down" in module else 4 for module in MODULES}
    matrices = {module: drawn(ranks[module], *size) for module, size in MODULES.items()}
    adapter = write_adapter(base, "first", matrices, **({"use_dora": True} | PATTERNS if has_dora else {}))
    if has_dora:
        norms = {f"base_model.model.{name}{MAGNITUDES}": np.linspace(0.5, 2, 16, dtype=np.float32) for name in MODULES}
        save_file(load_file(adapter / ADAPTER) | norms, adapter / ADAPTER)
    own = {"use_dora": True} | OURS if has_dora else {}
    meshpar.fit(continued(base, adapter, tmp_path / "run", **own), json=True)
    convert.to_peft(tmp_path / "run", tmp_path / "again")
    before, after = load_file(adapter / ADAPTER), load_file(tmp_path / "again" / ADAPTER)
    assert before.keys() == after.keys()
    for name, x in before.items():
        np.testing.assert_allclose(after[name], x, rtol=0, atol=5e-7 if name.endswith(MAGNITUDES) else 0, err_msg=name)

    other = {"rank": 3, "alpha": 3, "paths": ["blocks.attn.q"], "use_dora": not has_dora}
    wrong = continued(base, adapter, tmp_path / "wrong", **other)
    with pytest.raises(ConfigError) as raised:
        meshpar.fit(wrong, json=True)
    fixes = ["lora.rank=4", "lora.paths=[blocks.attn.q, blocks.mlp.down]", f"lora.use_dora={json.dumps(has_dora)}"]
    assert all(fix in str(raised.value) for fix in (*fixes, f"lora.alpha={10 if has_dora else 6}"))
    partly = write_adapter(base, "partly", {Q: matrices[Q], DOWN: matrices[DOWN]}, **(PATTERNS if has_dora else {}))
    with pytest.raises(ConfigError, match="the adapter has updates in 1 of 2 layers"):
        meshpar.fit(continued(base, partly, tmp_path / "wrong"), json=True)


def logits_of_peft(folder: Path, tokens: np.ndarray) -> np.ndarray:
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(peft_base(folder))
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(model, folder)(torch.tensor(tokens)).logits.numpy()


def peft_base(folder: Path) -> Path:
    named = Path(json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"])
    return named if named.is_dir() else folder / named


def our_logits(folder: Path, tokens: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """The logits of the model of a folder, without a cache; an adapter is merged."""
    read = open_folder(folder)
    module = read.model.abstract()
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    structs = {
        path: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=one)
        for path, spec in flatten_with_paths(describe(module)).items()
    }
    params = read.params(structs)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    batch = {
        "tokens": jnp.asarray(tokens, jnp.int32),
        "positions": positions,
        "rows": jnp.zeros(len(tokens), jnp.int32),
    }
    return np.asarray(functional(module)(map_with_path(lambda path, _: params[path], describe(module)), batch))


OF_THE_LIBRARY = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.mark.slow
@OF_THE_LIBRARY
@pytest.mark.parametrize("settings", [
    {}, {"use_rslora": True}, {"use_dora": True}, {"use_dora": True, "use_rslora": True},
    {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 5}},
])  # fmt: skip
def test_the_logits_of_what_the_library_wrote_are_its_own(base, settings, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    how = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM",
                          **settings)  # fmt: skip
    model = peft.get_peft_model(plain, how)
    for name, param in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.uniform_(param, 0.1, 0.5)
    model.save_pretrained(tmp_path / "adapter")
    tokens = np.arange(12).reshape(2, 6)
    want = logits_of_peft(tmp_path / "adapter", tokens)
    assert abs(our_logits(base, tokens) - want).max() > 1e-2
    np.testing.assert_allclose(our_logits(tmp_path / "adapter", tokens), want, atol=1e-4)


@pytest.mark.slow
@OF_THE_LIBRARY
def test_the_library_loads_what_is_written_with_the_same_logits(base, tmp_path):
    adapter = write_adapter(base, "before", {module: drawn(4, *size) for module, size in MODULES.items()})
    meshpar.fit(continued(base, adapter, tmp_path / "run"), json=True)
    convert.to_peft(tmp_path / "run", tmp_path / "again")
    tokens = np.arange(12).reshape(2, 6)
    np.testing.assert_allclose(logits_of_peft(tmp_path / "again", tokens), our_logits(adapter, tokens), atol=1e-4)


FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "gemma2": ("Gemma2", {"head_dim": 8, "num_key_value_heads": 2}, ["layers.*.attn.*", "layers.*.mlp.down"]),
    "pythia": (
        "GPTNeoX",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ["layers.*.attn.*", "layers.*.mlp.up"],
    ),
}


@pytest.mark.slow
@OF_THE_LIBRARY
@pytest.mark.parametrize("settings", [{}, {"use_dora": True, "rank_pattern": {"layers.0.**": 3}}])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_updates_of_a_family_are_written_under_the_names_of_its_folder(family, settings, tmp_path):
    name, sizes, paths = FAMILIES[family]
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, **sizes}
    config = getattr(transformers, f"{name}Config")(intermediate_size=24, max_position_embeddings=32, **sizes)
    torch.manual_seed(0)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path / "base")
    convert.from_hf(tmp_path / "base", tmp_path / "converted", ["mesh.data=8"])
    run = meshpar.Run(
        init={"from_checkpoint": tmp_path / "converted"}, lora={"rank": 2, "alpha": 3, "paths": paths, **settings},
        data={"kind": "synthetic", "batch_size": 8, "seq_len": 8, "vocab_size": 32}, mesh={"fsdp": 8}, rules=["fsdp"],
        optim={"kind": "adamw", "lr": 0.1}, num_steps=2, run_dir=tmp_path / "run", loggers=[],
    )  # fmt: skip  # pyright: ignore
    with jax.numpy_dtype_promotion("standard"):
        meshpar.fit(run, json=True)
        convert.to_hf(tmp_path / "run", tmp_path / "merged")
        convert.to_peft(tmp_path / "run", tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == str(
        tmp_path / "base"
    )
    tokens = np.arange(12).reshape(2, 6)
    logits = []
    for folder in ("base", "merged"):
        with torch.no_grad():
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            logits.append(model(torch.tensor(tokens)).logits.numpy())
    found = logits_of_peft(tmp_path / "adapter", tokens)
    assert abs(found - logits[0]).max() > 1e-2
    np.testing.assert_allclose(found, logits[1], rtol=0, atol=1e-4)
