"""Other frameworks' names for the keys, kinds, presets and axes of a config; see `meshpar.errors.nearest`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

_NAMES = {
    # Our words -> other frameworks' names. If there are several words, the first valid one applies; a dotted word is
    # the path of a key in the whole config.
    # models: Hugging Face nanoGPT Megatron-LM MaxText
    "hidden_size": "hidden_size hidden_dim d_model dim emb_dim embed_dim n_embd n_embed embedding_size",
    "intermediate_size": "intermediate_size ffn_hidden_size ffn_dim mlp_dim d_ff n_inner",
    "num_layers": "num_hidden_layers n_layer n_layers layers depth",
    "num_heads": "num_attention_heads n_head n_heads heads",
    "num_kv_heads": "num_key_value_heads num_query_groups n_kv_heads kv_heads",
    "max_seq_len": "max_position_embeddings n_positions n_ctx",
    "vocab_size": "n_vocab",
    "pad_vocab_to_multiple": "padded_vocab_size make_vocab_size_divisible_by",
    "norm_eps": "rms_norm_eps layer_norm_epsilon layer_norm_eps",
    "rope_theta": "rope_base rotary_base",
    "tie_embeddings": "tie_word_embeddings tie_embeddings",
    "qk_norm": "qk_norm",
    "window": "sliding_window",
    "remat": "gradient_checkpointing activation_checkpointing checkpoint_activations recompute",
    "dropout": "attention_dropout hidden_dropout",
    # data
    "batch_size": "batch global_batch_size train_batch_size per_device_train_batch_size per_device_batch_size",
    "seq_len": "sequence_length seq_length max_target_length max_length block_size context_length",
    "seq_len max_seq_len": "max_seq_length",
    "data": "dataset",
    "paths path": "files",
    # optimizers and schedules
    "lr": "learning_rate max_lr peak_lr",
    "optim": "optimizer",
    "b1": "beta1 adam_beta1",
    "b2": "beta2 adam_beta2",
    "eps": "epsilon adam_epsilon",
    "weight_decay": "wd",
    "clip_norm": "max_grad_norm grad_clip gradient_clip_val clip_grad",
    "warmup_steps": "warmup num_warmup_steps",
    "schedule": "lr_scheduler lr_scheduler_type",
    "adamw": "adam",
    "cosine": "one_cycle",
    # the run
    "num_steps": "max_steps total_steps train_iters num_train_steps max_iters steps",
    "num_microbatches": "gradient_accumulation_steps grad_accum accumulate_grad_batches microbatches micro_batch_size",
    "run_dir": "output_dir save_dir",
    "log_every": "logging_steps log_interval",
    "eval_every": "eval_steps eval_interval",
    "checkpoints.every": "save_steps save_interval",
    "keep": "save_total_limit",
    "seed": "random_seed",
    "from_checkpoint": "resume_from_checkpoint",
    "precision compute": "dtype",
    "params": "param_dtype",
    "compute": "compute_dtype",
    "precision bfloat16": "bf16 fp16",
    "float32": "fp32",
    "float64": "fp64",
    "rank": "lora_r r",
    "alpha": "lora_alpha",
    # events
    "on_step_end": "on_batch_end on_batch_ends on_train_batch_end on_optimizer_step",
    "on_step_begin": "on_batch_begin on_train_batch_begin on_train_batch_start on_batch_start",
    "on_evaluation_begin": "on_test_begin on_validation_start on_validation_epoch_start",
    "on_evaluation_end": "on_test_end on_validation_end on_validation_epoch_end on_evaluate",
    "on_checkpoint": "on_save on_save_checkpoint",
    "on_train_begin": "on_fit_start on_train_start",
    "on_train_end": "on_fit_end",
    # axes
    "mesh.data data": "dp data_parallel_size",
    "mesh.data replicated data": "ddp data_parallel",
    "mesh.replica replica": "dp_replicate",
    "mesh.fsdp fsdp": "dp_shard fully_sharded_data_parallel sdp",
    "fsdp": "fully_sharded zero3",
    "mesh.tensor tensor megatron": "tp mp model_parallel tensor_parallel",
    "tensor megatron": "model",
    "mesh.tensor tensor": "tensor_parallel_size tensor_model_parallel_size",
    "megatron_sp tensor": "sp",
    "megatron_sp": "sequence_parallel",
    "mesh.pipe pipe pipeline": "pp pipeline_parallel",
    "mesh.pipe pipe": "pipeline_parallel_size pipeline_model_parallel_size",
    "pipe": "stage",
    "mesh.context context": "cp context_parallel context_parallel_size",
    "mesh.expert expert": "ep expert_parallel expert_parallel_size",
    "dcn": "num_slices",
}
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    name: tuple(words.split()) for words, names in _NAMES.items() for name in names.split()
}
"""Another framework's name -> our words for it."""

RENAMED: Mapping[str, str] = {
    # Old keys -> their current names, as paths from the root of the config.
    "model.width": "model.hidden_size",
    "model.mlp_width": "model.intermediate_size",
    "model.tied": "model.tie_embeddings",
    "model.head_norm": "model.qk_norm",
    "model.full_layers": "model.global_layers",
    "model.layers_multiple": "model.pad_layers_to_multiple",
    "model.vocab_multiple": "model.pad_vocab_to_multiple",
    "rules.norm_seq": "rules.residual_seq",
    "adapt": "lora",
    "expects": "contract",
    "tensor": "parallel.tensor",
    "fsdp": "parallel.fsdp",
    "pipeline": "parallel.pipeline",
    "reduce": "parallel.gradient_reduction",
    "init.take": "init.include",
    "init.leave": "init.exclude",
}

_PUBLIC = {
    # Names that people guess or bring along -> what meshpar has for them.
    "make_mesh create_mesh mesh device_mesh init_device_mesh": "use MeshLayout(data=2, tensor=4)",
    "trainer train training_arguments accelerator train_loop run_training experiment": (
        "use fit(run) for a config, and training(...) for a model of your own"
    ),
    "config train_config load_config from_yaml trainer_config": "use Run(...), or load(path) for a file",
    "from_pretrained auto_model auto_model_for_causal_lm pretrained load_model from_hf hf": (
        "a run begins with a Hugging Face folder by Run(init={'from_hf': folder}); convert makes a run of one"
    ),
    "tokenizer auto_tokenizer": "use data.TokenizerFile, or data.Bytes",
    "data_loader dataset dataloaders load_dataset batch_loader": (
        "a run reads data.Text, data.Jsonl or data.Numpy; a training takes your batches: step(state, model.put(batch))"
    ),
    "partition_spec p named_sharding sharding shard shard_map pjit shard_params shard_model parallelize xmap": (
        "name the dims of arrays, and map them to axes: training(..., dims=..., rules=AxisRules(preset='fsdp'))"
    ),
    "rules logical_axis_rules axis_rule": "use AxisRules(preset=['fsdp', 'megatron'], mlp=('tensor',))",
    "fsdp fully_shard fully_sharded_data_parallel zero zero3": "use AxisRules(preset='fsdp') and MeshLayout(fsdp=8)",
    "ddp distributed_data_parallel data_parallel": "use AxisRules(preset='replicated') and MeshLayout(data=8)",
    "tp megatron parallelize_module": "use AxisRules(preset='megatron') and MeshLayout(tensor=8)",
    "pp pipeline_parallel": "use AxisRules(preset='pipeline') and Parallel(pipeline=OneFOneB(num_microbatches=8))",
    "checkpointer checkpoint_manager save save_checkpoint load_checkpoint restore restore_checkpoint save_pretrained": (
        "use Checkpoints(folder): save, latest, restore; export writes Hugging Face folders"
    ),
    "initialize init_process_group init_distributed setup": (
        "use join() in each process of several, and simulate(8) for devices on the CPU"
    ),
    "with_sharding_constraint with_logical_constraint logical_constraint shard_constraint": (
        "use constrain(x, 'batch', 'embed')"
    ),
    "adam optimizer": "use AdamW(lr=1e-3) in a run; a training takes any Optax optimizer",
    "train_state state create_train_state": "model.compile_init()() makes the state of a training",
    "softmax_cross_entropy fused_linear_cross_entropy chunked_cross_entropy linear_cross_entropy cross_entropy_loss": (
        "use cross_entropy(hidden, head, labels) in a loss"
    ),
    "server": "run `meshpar serve RUN` in a shell; generate(...) completes prompts in Python",
    "estimate estimate_memory memory": "use inspect(run, target='h100:1x8')",
    "launch spawn": "run `meshpar launch` in a shell",
}
PUBLIC: Mapping[str, str] = {name.replace("_", ""): ours for names, ours in _PUBLIC.items() for name in names.split()}


def public_name(name: str) -> str | None:
    """What `meshpar` has for a public name that it lacks.

    >>> public_name("DeviceMesh")
    'use MeshLayout(data=2, tensor=4)'
    """
    return PUBLIC.get(name.replace("_", "").lower())


def new_name(path: str, known: Collection[str]) -> str | None:
    """The current name of an old key; None if no known key replaced it.

    The path starts at the root of a config, or at a section that is checked alone, such as a model.

    >>> new_name("model.width", ["model.hidden_size"]), new_name("width", ["hidden_size"]), new_name("width", ["depth"])
    ('model.hidden_size', 'hidden_size', None)
    """
    last = {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in RENAMED.items()}
    return next((new for new in (RENAMED.get(path), last.get(path)) if new in known), None)


def with_new_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as plain data, with every old key renamed to its current name.

    >>> with_new_names({"model": {"kind": "gpt", "width": 8}, "adapt": None})
    {'model': {'kind': 'gpt', 'hidden_size': 8}, 'lora': None}
    """
    renamed: dict[str, Any] = {}
    _rename(config, "", renamed)
    return renamed


def _rename(section: Mapping[str, Any], at: str, into: dict[str, Any]) -> None:
    for key, value in section.items():
        path = f"{at}{key}"
        *outer, name = RENAMED.get(path, path).split(".")
        place = into
        for part in outer:
            place = place.setdefault(part, {})
        if isinstance(value, Mapping) and any(old.startswith(f"{path}.") for old in RENAMED):
            place.setdefault(name, {})
            _rename(value, f"{path}.", into)
        else:
            place[name] = value


def words(name: str) -> tuple[str, ...]:
    """The name in lower case with underscores, and our words for it.

    >>> words("Learning-Rate")
    ('learning_rate', 'lr')
    """
    plain = _plain(name)
    return (plain, *SYNONYMS.get(plain, ()))


def meant(name: str, names: Iterable[str]) -> str | None:
    """The valid name that differs only in case and hyphens, or that another framework calls by this name.

    >>> meant("FSDP", ["data", "fsdp"]), meant("learning_rate", ["lr"]), meant("n_layer", ["hidden_size"])
    ('fsdp', 'lr', None)
    """
    plain = {_plain(known): known for known in names}
    return next((plain[word] for word in words(name) if word in plain), None)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
