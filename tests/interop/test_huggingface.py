"""Models from Hugging Face's folders: the same logits, the same bits on the way back, and no byte read needlessly."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from meshpar.errors import CheckpointError, ConfigError
from meshpar.interop.export import export
from meshpar.interop.huggingface import Pretrained, open_pretrained
from meshpar.interop.safetensors import Tensor
from meshpar.mesh.layout import MeshLayout
from meshpar.nn.decoder import Decoder
from meshpar.nn.describe import describe, functional, nested
from meshpar.nn.experts import Experts
from meshpar.nn.lora import LoRA
from meshpar.sharding.resolve import resolve
from meshpar.sharding.rules import AxisRules
from meshpar.tree import flatten_with_paths
from tests.interop.pretrained import KINDS, SEQ, VOCAB, logits, made, saved

TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, SEQ))


def specs(model: Decoder):
    return describe(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))


def params(pretrained: Pretrained, model: Decoder | None = None) -> dict[str, jax.Array]:
    here = SingleDeviceSharding(jax.devices()[0])
    flat = flatten_with_paths(specs(model or pretrained.model))
    dtype = pretrained.dtype
    return pretrained.params({path: jax.ShapeDtypeStruct(s.shape, dtype, sharding=here) for path, s in flat.items()})


def our_logits(model: Decoder, arrays: dict[str, jax.Array], lora: LoRA | None = None) -> np.ndarray:
    whole = jnp.ones((2, SEQ), jnp.int32)
    batch = {"tokens": jnp.asarray(TOKENS, jnp.int32), "segments": whole, "rows": jnp.arange(2, dtype=jnp.int32)}
    batch["positions"] = whole * jnp.arange(SEQ, dtype=jnp.int32)

    def build():
        built = model.build(nnx.Rngs(0))
        if lora:
            lora.adapt(built, nnx.Rngs(0))
        return built

    apply = functional(nnx.eval_shape(build))
    tree = nested({tuple(path.split(".")): array for path, array in arrays.items()})
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(apply)(tree, batch))


# An option of each model, with another value that keeps its parameters and changes its logits.
OPTION = {
    "llama3_rope": {"rope_scaling": None},
    "linear_rope": {"rope_scaling": None},
    "mistral": {"window": None},
    "ministral": {"global_layers": ()},
    "qwen2": {"global_layers": ()},
    "phi3": {"rotary_fraction": 1.0},
    "qwen3": {"rope_theta": 1e4},
    "mixtral": {"experts": Experts(num=4, per_token=2, intermediate_size=64, normalize=False)},
    "qwen3_moe": {"experts": Experts(num=6, per_token=2, intermediate_size=24, normalize=False)},
    "olmoe": {"experts": Experts(num=6, per_token=2, intermediate_size=64, normalize=False)},
    "qwen3_moe_some_layers": {
        "experts": Experts(num=4, per_token=1, intermediate_size=24, normalize=False, first_dense=3, every=2)
    },
}
IN_CI = {
    "llama",
    "llama_biases",
    "llama3_rope",
    "smollm",
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "phi3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "qwen3_moe_some_layers",
    "olmoe",
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in IN_CI else pytest.mark.slow) for k in KINDS])
def test_logits_equal_transformers_and_weights_come_back_bit_for_bit(kind, tmp_path):
    theirs = made(kind)
    theirs.save_pretrained(tmp_path / "there")
    pretrained = open_pretrained(tmp_path / "there")
    arrays = params(pretrained)
    want = logits(theirs, TOKENS)
    np.testing.assert_allclose(our_logits(pretrained.model, arrays), want, rtol=0, atol=1e-5)
    if kind in OPTION:
        other = pretrained.model.model_copy(update=OPTION[kind])
        assert abs(our_logits(other, arrays) - want).max() > 1e-3
    export(tmp_path / "back", pretrained.model, arrays)
    _same_bits(tmp_path / "there", tmp_path / "back")


def test_an_upcycled_model_computes_at_first_what_the_dense_one_does(tmp_path):
    dense = open_pretrained(saved("llama", tmp_path / "there"))
    width = dense.model.intermediate_size
    model = dense.model.model_copy(update={"experts": Experts(num=4, per_token=2, intermediate_size=width)})
    upcycled = replace(dense, is_upcycled=True)
    upcycled.check(model)
    want = our_logits(dense.model, params(dense))
    flat = flatten_with_paths(specs(model))
    router = np.random.default_rng(0).normal(size=flat["blocks.mlp.router.weight"].shape).astype("float32")
    mesh = MeshLayout(expert=2, fsdp=2).build(jax.devices()[:4])
    placed = resolve(specs(model), AxisRules(preset=("fsdp", "experts")), mesh)
    structs = {path: placement.struct for path, placement in flatten_with_paths(placed).items()}
    read = jax.device_get(upcycled.params({path: structs[path] for path in upcycled.paths}))
    assert structs.keys() - read.keys() == {"blocks.mlp.router.weight"}
    arrays = {path: read.get(path, router) for path in structs}
    np.testing.assert_allclose(our_logits(model, arrays), want, rtol=0, atol=1e-5)
    other = np.array(arrays["blocks.mlp.experts.up.kernel"])
    other[:, 1] *= 2  # the experts have to be equal
    assert abs(our_logits(model, arrays | {"blocks.mlp.experts.up.kernel": other}) - want).max() > 1e-3


def test_upcycling_refuses_experts_that_the_mlp_does_not_fit(tmp_path):
    dense = replace(open_pretrained(saved("llama_biases", tmp_path / "there")), is_upcycled=True)
    experts = Experts(num=4, per_token=2, intermediate_size=7, shared=1)
    with pytest.raises(ConfigError) as error:
        dense.check(dense.model.model_copy(update={"experts": experts}))
    for key in ("model.experts.intermediate_size", "model.mlp_bias", "model.experts.shared"):
        assert key in str(error.value)
    with pytest.raises(ConfigError, match="the run's model has no experts"):
        dense.check(dense.model)


def test_another_number_of_experts_than_declared_is_refused(tmp_path):
    pretrained = open_pretrained(saved("mixtral", tmp_path / "there"))
    assert pretrained.model.experts
    other = pretrained.model.experts.model_copy(update={"num": 8})
    with pytest.raises(ConfigError) as error:
        pretrained.check(pretrained.model.model_copy(update={"experts": other}))
    assert str(error.value) == (
        "the model of init.from_hf differs from the run's:\n"
        f"  model.experts.num\n    8 in this run, 4 in {tmp_path}/there/config.json\n    model.experts.num=4"
    )
    config = json.loads((tmp_path / "there/config.json").read_text())
    (tmp_path / "there/config.json").write_text(json.dumps(config | {"num_local_experts": 6}))
    with pytest.raises(CheckpointError) as error:
        open_pretrained(tmp_path / "there")
    assert str(error.value) == (
        f"{tmp_path}/there does not hold what its config.json describes:\n"
        "  the number of experts\n    config.json has 6, but there are tensors of 4\n"
        "    the config.json of this checkpoint"
    )


def _same_bits(there, back):
    """Reads the files with the safetensors library, not with meshpar."""
    import safetensors.torch
    import torch

    a, b = (
        {k: v for f in d.glob("*.safetensors") for k, v in safetensors.torch.load_file(f).items()}
        for d in (there, back)
    )
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


@pytest.mark.parametrize("kind", ["gpt2", "phi3"])
def test_transformers_reads_what_is_exported_in_several_files(kind, tmp_path):
    """In bfloat16, with fused projections, an index, and a config.json that meshpar wrote."""
    import transformers

    saved(kind, tmp_path / "there", "bfloat16", max_shard_size="20KB")
    assert len(list((tmp_path / "there").glob("*.safetensors"))) > 1
    pretrained = open_pretrained(tmp_path / "there")
    export(tmp_path / "back", pretrained.model, params(pretrained), largest_file=30_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    _same_bits(tmp_path / "there", tmp_path / "back")
    there, back = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / d, dtype="auto") for d in ("there", "back")
    )
    assert back.dtype == there.dtype
    np.testing.assert_array_equal(logits(there.eval(), TOKENS), logits(back.eval(), TOKENS))


def test_the_original_config_is_kept_if_it_still_fits(tmp_path):
    pretrained = open_pretrained(saved("qwen3", tmp_path / "there"))
    arrays = params(pretrained)
    export(tmp_path / "back", pretrained.model, arrays, companions=tmp_path / "there")
    assert (tmp_path / "back/config.json").read_text() == (tmp_path / "there/config.json").read_text()
    export(tmp_path / "other", pretrained.model.model_copy(update={"rope_theta": 5e5}), arrays, tmp_path / "there")
    written = json.loads((tmp_path / "other/config.json").read_text())
    assert (written["model_type"], written["rope_theta"]) == ("qwen3", 5e5)


# Bytes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def read_bytes(monkeypatch):
    """The number of bytes that each call of `os.preadv` reads."""
    counted = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: counted.append(preadv(*args)) or counted[-1])
    return counted


LAYOUTS = {
    "whole": ({}, ["replicated"]),
    "copies": ({"data": 8}, ["replicated"]),
    "fsdp_tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron"]),
}


def placed(pretrained, layout, **padding):
    sizes, presets = LAYOUTS[layout]
    mesh = MeshLayout(**sizes)
    model = pretrained.model.model_copy(update={"pad_vocab_to_multiple": 64} | padding)  # 96 tokens, 128 rows
    placements = resolve(specs(model), AxisRules(preset=tuple(presets)), mesh.build(jax.devices()[: mesh.requested()]))
    return {path: placement.struct for path, placement in flatten_with_paths(placements).items()}


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return open_pretrained(saved("qwen2", tmp_path_factory.mktemp("qwen2")))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_process_reads_each_byte_of_its_shards_once_and_no_other(layout, qwen2, read_bytes):
    got = qwen2.params(placed(qwen2, layout, pad_layers_to_multiple=3))  # 2 layers, 3 rows
    assert sum(read_bytes) == sum(4 * int(np.prod(tensor.shape)) for tensor in qwen2.tensors.values())
    for path, array in params(qwen2).items():
        padded = np.zeros(got[path].shape, array.dtype)
        padded[tuple(slice(0, size) for size in array.shape)] = array
        np.testing.assert_array_equal(got[path], padded, err_msg=path)


def test_a_device_reads_only_its_shard(qwen2, read_bytes):
    """A process with the first of eight devices, whose shards have no padding."""
    for path, struct in placed(qwen2, "fsdp_tensor").items():
        index = struct.sharding.addressable_devices_indices_map(struct.shape)[jax.devices()[0]]
        ranges = [slice(*dim.indices(size)[:2]) for dim, size in zip(index, struct.shape, strict=True)]
        read_bytes.clear()
        shard = qwen2._shard(path, ranges, np.dtype("float32"))
        assert sum(read_bytes) == shard.nbytes, path
        np.testing.assert_array_equal(shard, qwen2.params({path: struct})[path][index], err_msg=path)


def test_control_reading_whole_tensors_is_seen(qwen2, read_bytes, monkeypatch):
    read = Tensor.read
    monkeypatch.setattr(
        Tensor,
        "read",
        lambda self, rows=slice(None), columns=slice(None): read(self)[(rows, columns)[: len(self.shape)]],
    )
    qwen2.params(placed(qwen2, "fsdp_tensor"))
    assert sum(read_bytes) > 1.5 * sum(4 * int(np.prod(tensor.shape)) for tensor in qwen2.tensors.values())
