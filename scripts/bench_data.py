"""Measures data that `meshpar data build` has encoded: encoding, memory, and the start of a run that resumes.

    python scripts/bench_data.py encode --tokens 20_000_000   # beside datasets.map with the same tokenizer
    python scripts/bench_data.py memory --tokens 1_000_000_000  # writes the ids themselves, and reads rows of them

Everything is written to a temporary folder below --folder, and removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

WORDS = 20_000
TOKENS_OF_A_DOCUMENT = 500
READ = """
import os, resource, sys, time
import numpy as np

def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

from meshpar.data import Shards
from meshpar.data.order import Order

before = resident()
began = time.perf_counter()
train = Shards(path=sys.argv[1], seq_len=1024, batch_size=32).train(seed=0)
first = int(sys.argv[2])
batches = train.in_order(Order()).batches(first)
next(batches)
start = time.perf_counter() - began
began, num = time.perf_counter(), 500
for _ in range(num):
    next(batches)
rate = num * 32 * 1024 / (time.perf_counter() - began)
print(f"{train.num_tokens:,} tokens, from step {first:,}: first batch after {start:.2f} s; {rate:,.0f} tokens/s; "
      f"resident {resident():.0f} MiB, of which {resident() - before:.0f} since the imports")
"""


def write_text(path: Path, tokens: int) -> None:
    """About this many tokens of English-like text: words of a Zipf distribution."""
    draw = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = ["".join(draw.choice(letters, draw.integers(2, 9))) for _ in range(WORDS)]
    shares = 1 / np.arange(1, WORDS + 1)
    with path.open("w") as file:
        for _ in range(tokens // TOKENS_OF_A_DOCUMENT):
            chosen = draw.choice(WORDS, TOKENS_OF_A_DOCUMENT * 2 // 3, p=shares / shares.sum())
            file.write(json.dumps({"text": " ".join(words[i] for i in chosen)}) + "\n")


def write_tokenizer(text: Path, path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=16_000, special_tokens=["<s>", "</s>"], show_progress=False)
    with text.open() as file:
        library.train_from_iterator((json.loads(next(file))["text"] for _ in range(2000)), trainer)
    library.save(str(path))


def encode(folder: Path, tokens: int, processes: int) -> None:
    text, tokenizer = folder / "text.jsonl", folder / "tokenizer.json"
    write_text(text, tokens)
    write_tokenizer(text, tokenizer)
    print(f"{text.stat().st_size:,} bytes of JSON Lines")
    (folder / "config.yaml").write_text(
        "model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32}\n"
        f"data: {{kind: jsonl, path: {text}, tokenizer: {tokenizer}}}\n"
        "optim: {kind: adamw, lr: 1e-3}\nnum_steps: 1\nrun_dir: run\n"
    )
    for num in {1, processes}:
        words = ["data", "build", str(folder / "config.yaml"), "--output", str(folder / f"shards-{num}")]
        measured(
            f"meshpar, {num} processes",
            [sys.executable, "-m", "meshpar", *words, f"--processes={num}", "--shard-bytes=8000000"],
        )
    code = (
        "import sys, time\nfrom datasets import load_dataset\nfrom tokenizers import Tokenizer\n"
        "t = Tokenizer.from_file(sys.argv[2])\nbegan = time.time()\n"
        "d = load_dataset('json', data_files=sys.argv[1], split='train', cache_dir=sys.argv[3])\n"
        "f = lambda rows: {'ids': [e.ids for e in t.encode_batch_fast(rows['text'])]}\n"
        "if __name__ == '__main__':\n"
        "    d = d.map(f, batched=True, remove_columns=['text'], num_proc=int(sys.argv[4]))\n"
        "    n = sum(len(x) + 1 for x in d.with_format('arrow').select(range(1000))['ids'])\n"
        "    print(f'{time.time() - began:.1f} s for {len(d):,} documents, about {n * len(d) // 1000:,} tokens')\n"
    )
    for num in {1, processes}:
        cache = folder / f"cache-{num}"
        measured(
            f"datasets.map, {num} processes",
            [sys.executable, "-c", code, str(text), str(tokenizer), str(cache), str(num)],
        )


def measured(name: str, command: list[str]) -> None:
    """Runs a command, and prints the line with its rate."""
    began, before = time.perf_counter(), _cpu_s()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_DATASETS_OFFLINE": "1"})
    lines = (done.stdout.strip() or done.stderr.strip()[-2000:]).splitlines()
    seconds = f"{time.perf_counter() - began:.1f} s in all, {_cpu_s() - before:.1f} s of CPUs"
    print(f"{name}: {seconds}; {lines[0] if not done.returncode else lines}")


def _cpu_s() -> float:
    """CPU time of all programs that were run and have ended: on a machine with other work, seconds say little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory(folder: Path, tokens: int) -> None:
    """Writes shards of ids that nobody encoded, and reads rows of them, from the beginning and in the middle."""
    from meshpar.data.shards import manifest
    from meshpar.data.shards.stored import SideWriter
    from meshpar.data.tokenizer import Ids

    draw = np.random.default_rng(0)
    dtype = np.dtype(np.uint16)
    num = max(1, tokens // 2**26)
    bodies = [draw.integers(0, 50_000, TOKENS_OF_A_DOCUMENT - 1) for _ in range(1000)]
    shards = []
    for i in range(num):
        place = folder / manifest.shard_name(i, num)
        place.mkdir()
        sides = {}
        for side, share in {"train": 0.99, "held_out": 0.01}.items():
            with SideWriter(place / side, dtype) as writer:
                for j in range(int(tokens * share / num / TOKENS_OF_A_DOCUMENT)):
                    writer.add(bodies[j % 1000])
            sides[side] = writer
        numbers = {
            side: manifest.Side(documents=one.num_documents, tokens=one.num_tokens) for side, one in sides.items()
        }
        crc32 = {name: crc for one in sides.values() for name, crc in one.crc32.items()}
        shards.append(manifest.ShardNumbers(**numbers, crc32=crc32, shares=[]))
    ids = Ids(vocab_size=50_257, bos=50_256)
    about = manifest.StoredTokenizer(kind="ids", vocab_size=ids.vocab_size, bos=ids.bos, eos=None)
    found = manifest.Manifest(version=manifest.VERSION, dtype="uint16", tokenizer=about, held_out_fraction=0.05,
                              sources="", shards=shards)  # fmt: skip
    manifest.write(folder / manifest.MANIFEST, found)
    steps = found.shards[0].train.tokens * num // (1024 * 32)
    for first in (0, steps // 2):
        subprocess.run([sys.executable, "-c", READ, str(folder), str(first)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["encode", "memory"])
    parser.add_argument("--tokens", type=lambda text: int(text.replace("_", "")), required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if arguments.what == "memory":
            memory(Path(folder), arguments.tokens)
        else:
            encode(Path(folder), arguments.tokens, arguments.processes)


if __name__ == "__main__":
    main()
