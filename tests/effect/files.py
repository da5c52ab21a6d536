"""The files that the runs of `cases.yaml` read: each twice, with other contents under the names `other...`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.sources import texts, write_tokenizer


def written(folder: Path) -> None:
    """Writes them into an empty folder."""
    import pyarrow as pa
    from pyarrow import parquet

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
        for half, some in {"a": documents[::2], "b": documents[1::2]}.items():
            table = pa.table({"text": some, "other": [text.upper() for text in some]})
            parquet.write_table(table, folder / f"{prefix}-tables" / f"{half}.parquet")
            with pa.ipc.new_file(folder / f"{prefix}-tables" / f"{half}.arrow", table.schema) as file:
                file.write_table(table)
            ids = [token for text in some for token in (0, *tokenizer.encode(text), tokenizer.eos)]
            np.save(folder / f"{prefix}-ids" / f"{half}.npy", np.asarray(ids, np.uint16))
