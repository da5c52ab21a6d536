"""The files that the runs of `cases.yaml` read: each twice, with other contents under the names `other...`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from meshpar.data import Jsonl
from meshpar.data.shards.build import build
from tests.chats import UNMARKED, conversations, write_lines
from tests.chats import write_tokenizer as write_chat_tokenizer
from tests.pictures import pictures, write_folders
from tests.sources import texts, write_records, write_tars, write_tokenizer


def written(folder: Path) -> None:
    """Writes them into an empty folder."""
    import pyarrow as pa
    from pyarrow import parquet

    _write_chats(folder)
    _write_pictures(folder)
    tokenizer = write_tokenizer(folder / "tokenizer.json")
    write_tokenizer(folder / "other.json", vocab_size=290)
    for prefix, documents in {"texts": texts(), "other": texts()[::-1]}.items():
        (folder / prefix).mkdir()
        for i, text in enumerate(documents):
            (folder / prefix / f"{i:02}.txt").write_text(text)
        lines = [json.dumps({"id": text[::-1], "body": text}) + "\n" for text in documents]
        (folder / f"{prefix}-lines").mkdir()
        for half, some in {"a": lines[::2], "b": lines[1::2]}.items():
            (folder / f"{prefix}-lines" / f"{half}.jsonl").write_text("".join(some))
        (folder / f"{prefix}-tables").mkdir()
        (folder / f"{prefix}-ids").mkdir()
        write_tars(folder / f"{prefix}-tars", documents)
        write_records(folder / f"{prefix}-records", documents)
        for half, some in {"a": documents[::2], "b": documents[1::2]}.items():
            table = pa.table({"text": some, "other": [text.upper() for text in some]})
            parquet.write_table(table, folder / f"{prefix}-tables" / f"{half}.parquet")
            with pa.ipc.new_file(folder / f"{prefix}-tables" / f"{half}.arrow", table.schema) as file:
                file.write_table(table)
            ids = [token for text in some for token in (0, *tokenizer.encode(text), tokenizer.eos)]
            np.save(folder / f"{prefix}-ids" / f"{half}.npy", np.asarray(ids, np.uint16))
        lines = Jsonl(path=str(folder / f"{prefix}-lines"), field="body", held_out_fraction=0.25)
        build(lines, folder / f"{prefix}-shards")


def _write_pictures(folder: Path) -> None:
    """Folders of classes, and beside them a Parquet file with two columns of pictures and of labels."""
    import pyarrow as pa
    from pyarrow import parquet

    for prefix, found in {"pictures": pictures(), "other-pictures": pictures(seed=1)}.items():
        write_folders(folder / prefix, found)
        some, labels = zip(*found, strict=True)
        columns = {"image": some, "label": labels, "other": some[::-1], "class": [2 - label for label in labels]}
        for half in range(2):
            part = {name: list(values[half::2]) for name, values in columns.items()}
            parquet.write_table(pa.table(part), folder / prefix / f"{half}.parquet", row_group_size=4)


def _write_chats(folder: Path) -> None:
    """Conversations, and a template that reads each variable that a config can set."""
    template = "{{ strftime_now('%d') }}{{ mood }}" + UNMARKED
    lines = conversations(16)
    for prefix, some in {"chats": lines, "other-chats": lines[::-2]}.items():
        (folder / prefix).mkdir()
        write_lines(folder / prefix / "a.jsonl", some[::2])
        write_lines(folder / prefix / "b.jsonl", some[1::2])
    pairs = [{"prompt": f"Number {i}?", "chosen": f"It is {i}.", "rejected": f"No {i}."} for i in range(32)]
    for prefix, some in {"pairs": pairs, "other-pairs": pairs[::-2]}.items():
        (folder / prefix).mkdir()
        write_lines(folder / prefix / "a.jsonl", some[::2])
        write_lines(folder / prefix / "b.jsonl", some[1::2])
    prompts = [{"prompt": f"Number {i}?"} for i in range(32)]
    for prefix, some in {"prompts": prompts, "other-prompts": prompts[::-2]}.items():
        (folder / prefix).mkdir()
        write_lines(folder / prefix / "a.jsonl", some[::2])
        write_lines(folder / prefix / "b.jsonl", some[1::2])
    write_chat_tokenizer(folder / "chat-model", template)
    write_chat_tokenizer(folder / "other-chat-model", "other " + template)


def write_llama(folder: Path, value: float = 1.0) -> None:
    """Writes the smallest Llama as Hugging Face does; each weight is `value`."""
    from safetensors.numpy import save_file

    folder.mkdir()
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "rms_norm_eps": 1e-6,
              "num_key_value_heads": 2, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
              "max_position_embeddings": 64, "torch_dtype": "float32"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | sizes))
    layer = {"self_attn.q_proj": (8, 8), "self_attn.k_proj": (8, 8), "self_attn.v_proj": (8, 8),
             "self_attn.o_proj": (8, 8), "mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8), "mlp.down_proj": (8, 16),
             "input_layernorm": (8,), "post_attention_layernorm": (8,)}  # fmt: skip
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,), "lm_head.weight": (32, 8)}
    weights = {name: np.full(shape, value, np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
