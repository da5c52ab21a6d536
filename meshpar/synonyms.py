"""What other frameworks call the keys, kinds, presets and axes of a config; see `meshpar.errors.nearest`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    # Theirs -> ours, the first of them that is known. A dotted one is of the whole config.
    # models: Hugging Face, nanoGPT, Megatron-LM, MaxText
    "hidden_size": ("width",),
    "hidden_dim": ("width",),
    "d_model": ("width",),
    "dim": ("width",),
    "emb_dim": ("width",),
    "embed_dim": ("width",),
    "n_embd": ("width",),
    "n_embed": ("width",),
    "embedding_size": ("width",),
    "intermediate_size": ("mlp_width",),
    "ffn_hidden_size": ("mlp_width",),
    "ffn_dim": ("mlp_width",),
    "mlp_dim": ("mlp_width",),
    "d_ff": ("mlp_width",),
    "n_inner": ("mlp_width",),
    "num_hidden_layers": ("num_layers",),
    "n_layer": ("num_layers",),
    "n_layers": ("num_layers",),
    "layers": ("num_layers",),
    "depth": ("num_layers",),
    "num_attention_heads": ("num_heads",),
    "n_head": ("num_heads",),
    "n_heads": ("num_heads",),
    "heads": ("num_heads",),
    "num_key_value_heads": ("num_kv_heads",),
    "num_query_groups": ("num_kv_heads",),
    "n_kv_heads": ("num_kv_heads",),
    "kv_heads": ("num_kv_heads",),
    "max_position_embeddings": ("max_seq_len",),
    "n_positions": ("max_seq_len",),
    "n_ctx": ("max_seq_len",),
    "n_vocab": ("vocab_size",),
    "padded_vocab_size": ("vocab_multiple",),
    "make_vocab_size_divisible_by": ("vocab_multiple",),
    "rms_norm_eps": ("norm_eps",),
    "layer_norm_epsilon": ("norm_eps",),
    "layer_norm_eps": ("norm_eps",),
    "rope_base": ("rope_theta",),
    "rotary_base": ("rope_theta",),
    "tie_word_embeddings": ("tied",),
    "tie_embeddings": ("tied",),
    "qk_norm": ("head_norm",),
    "sliding_window": ("window",),
    "gradient_checkpointing": ("remat",),
    "activation_checkpointing": ("remat",),
    "checkpoint_activations": ("remat",),
    "recompute": ("remat",),
    "attention_dropout": ("dropout",),
    "hidden_dropout": ("dropout",),
    # data
    "batch": ("batch_size",),
    "global_batch_size": ("batch_size",),
    "train_batch_size": ("batch_size",),
    "per_device_train_batch_size": ("batch_size",),
    "per_device_batch_size": ("batch_size",),
    "micro_batch_size": ("num_microbatches",),
    "sequence_length": ("seq_len",),
    "seq_length": ("seq_len",),
    "max_seq_length": ("seq_len", "max_seq_len"),
    "max_target_length": ("seq_len",),
    "max_length": ("seq_len",),
    "block_size": ("seq_len",),
    "context_length": ("seq_len",),
    "dataset": ("data",),
    "files": ("paths", "path"),
    # optimizers and schedules
    "learning_rate": ("lr",),
    "max_lr": ("lr",),
    "peak_lr": ("lr",),
    "optimizer": ("optim",),
    "beta1": ("b1",),
    "adam_beta1": ("b1",),
    "beta2": ("b2",),
    "adam_beta2": ("b2",),
    "epsilon": ("eps",),
    "adam_epsilon": ("eps",),
    "wd": ("weight_decay",),
    "max_grad_norm": ("clip_norm",),
    "grad_clip": ("clip_norm",),
    "gradient_clip_val": ("clip_norm",),
    "clip_grad": ("clip_norm",),
    "warmup": ("warmup_steps",),
    "num_warmup_steps": ("warmup_steps",),
    "lr_scheduler": ("schedule",),
    "lr_scheduler_type": ("schedule",),
    "adam": ("adamw",),
    "one_cycle": ("cosine",),
    # the run
    "max_steps": ("num_steps",),
    "total_steps": ("num_steps",),
    "train_iters": ("num_steps",),
    "num_train_steps": ("num_steps",),
    "max_iters": ("num_steps",),
    "steps": ("num_steps",),
    "gradient_accumulation_steps": ("num_microbatches",),
    "grad_accum": ("num_microbatches",),
    "accumulate_grad_batches": ("num_microbatches",),
    "microbatches": ("num_microbatches",),
    "output_dir": ("run_dir",),
    "save_dir": ("run_dir",),
    "logging_steps": ("log_every",),
    "log_interval": ("log_every",),
    "eval_steps": ("eval_every",),
    "eval_interval": ("eval_every",),
    "save_steps": ("every",),
    "save_interval": ("every",),
    "save_total_limit": ("keep",),
    "random_seed": ("seed",),
    "resume_from_checkpoint": ("from_checkpoint",),
    "dtype": ("precision", "compute"),
    "param_dtype": ("params",),
    "compute_dtype": ("compute",),
    "bf16": ("precision", "bfloat16"),
    "fp16": ("precision", "bfloat16"),
    "fp32": ("float32",),
    "fp64": ("float64",),
    "lora_r": ("rank",),
    "r": ("rank",),
    "lora_alpha": ("alpha",),
    # axes
    "dp": ("mesh.data", "data"),
    "ddp": ("mesh.data", "replicated", "data"),
    "data_parallel": ("mesh.data", "replicated", "data"),
    "data_parallel_size": ("mesh.data", "data"),
    "dp_replicate": ("mesh.replica", "replica"),
    "dp_shard": ("mesh.fsdp", "fsdp"),
    "fully_sharded": ("fsdp",),
    "fully_sharded_data_parallel": ("mesh.fsdp", "fsdp"),
    "zero3": ("fsdp",),
    "sdp": ("mesh.fsdp", "fsdp"),
    "tp": ("mesh.tensor", "tensor", "megatron"),
    "mp": ("mesh.tensor", "tensor", "megatron"),
    "model": ("tensor", "megatron"),
    "model_parallel": ("mesh.tensor", "tensor", "megatron"),
    "tensor_parallel": ("mesh.tensor", "tensor", "megatron"),
    "tensor_parallel_size": ("mesh.tensor", "tensor"),
    "tensor_model_parallel_size": ("mesh.tensor", "tensor"),
    "sp": ("megatron_sp", "tensor"),
    "sequence_parallel": ("megatron_sp",),
    "pp": ("mesh.pipe", "pipe", "pipeline"),
    "pipeline_parallel": ("mesh.pipe", "pipe", "pipeline"),
    "pipeline_parallel_size": ("mesh.pipe", "pipe"),
    "pipeline_model_parallel_size": ("mesh.pipe", "pipe"),
    "stage": ("pipe",),
    "cp": ("mesh.context", "context"),
    "context_parallel": ("mesh.context", "context"),
    "context_parallel_size": ("mesh.context", "context"),
    "ep": ("mesh.expert", "expert"),
    "expert_parallel": ("mesh.expert", "expert"),
    "expert_parallel_size": ("mesh.expert", "expert"),
    "num_slices": ("dcn",),
}


def words(name: str) -> tuple[str, ...]:
    """The name without capitals and hyphens, and our words for it.

    >>> words("Learning-Rate")
    ('learning_rate', 'lr')
    """
    plain = _plain(name)
    return (plain, *SYNONYMS.get(plain, ()))


def meant(name: str, names: Iterable[str]) -> str | None:
    """The valid name that is the same but for capitals and hyphens, or that another framework calls so.

    >>> meant("FSDP", ["data", "fsdp"]), meant("learning_rate", ["lr"]), meant("n_layer", ["width"])
    ('fsdp', 'lr', None)
    """
    plain = {_plain(known): known for known in names}
    return next((plain[word] for word in words(name) if word in plain), None)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
