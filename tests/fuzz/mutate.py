"""Configs and command lines that somebody might write: the shipped ones, with mistakes that a seed determines."""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from meshpar.config import schema
from meshpar.experiment.config import Run
from tests.config.test_configs import CONFIGS
from tests.fuzz.harness import Case
from tests.fuzz.values import INTEGERS, ODD, OURS, TEXTS, scalar, small, value

SHIPPED = {path.name: path.read_text() for path in CONFIGS}
SMALL = yaml.safe_load(SHIPPED["quickstart.yaml"]) | {"run_dir": "run"}
SECTIONS: tuple[dict[str, Any], ...] = tuple(
    yaml.safe_load(line)
    for line in """
{lowering: auto}
{rules: {preset: [fsdp], heads: [tensor]}}
{rules: {preset: [], embed: []}}
{rules: {preset: [megatron_sp], seq: [context]}, mesh: {tensor: 2, context: 2}}
{parallel: {pipeline: {kind: 1f1b, num_microbatches: 4}}, rules: [pipeline], mesh: {pipe: 2}}
{parallel: {pipeline: {kind: interleaved, num_microbatches: 4, num_chunks: 2}}, rules: [pipeline], mesh: {pipe: 2}}
{parallel: {pipeline: {kind: zbv, num_microbatches: 4}}, rules: [pipeline, megatron], mesh: {pipe: 2, tensor: 2}}
{parallel: {pipeline: {kind: written, num_microbatches: 4, path: /dev/zero}}, rules: [pipeline], mesh: {pipe: 2}}
{lora: {kind: lora, rank: 4}}
{parallel: {gradient_reduction: {within: bf16, across: {kind: powersgd, rank: 2}}}}
{parallel: {gradient_reduction: {within: int8}}}
{parallel: {local: {axis: data, every: 10, start: 20, outer: {kind: nesterov, lr: 0.7}, compress: int8}}}
{freeze: [embedding, {paths: ["blocks.**"], until: 10}]}
{distill: {teacher: nowhere}}
{init: {from_checkpoint: nowhere, exclude: [params.head]}}
{init: {from_hf: nowhere}}
{contract: {all_gather: {axes: [fsdp], per_layer: 2}, bytes_per_axis: {tensor: 1MiB}, peak_bytes: 10}}
{precision: {params: bfloat16, compute: bfloat16, gradients: float32, master: float32}}
{checkpoints: {every: 10, keep: 2}, eval_every: 10, early_stopping: {patience: 2}}
{loggers: [tensorboard, {kind: wandb}, mlflow]}
{optim: {kind: muon, lr: 0.01, schedule: {kind: wsd, decay_steps: 10}}}
{optim: {kind: adafactor, lr: 0.01, ema: 0.999}}
{optim: {kind: sgd, lr: 0.01, schedule: {kind: linear}}}
{parallel: {tensor: {overlap: ring}, fsdp: {overlap: ring}}}
{mesh: {data: -1, dcn: {data: 2}}}
{loss: {label_smoothing: 0.1, z_loss: 0.001}}
{model: {kind: import, target: "model:build", arguments: {width: 4}}, lowering: auto}
{data: {kind: jsonl, path: x.jsonl, tokenizer: t.json}}
{data: {kind: numpy, path: x.npy, tokenizer: {kind: ids, vocab_size: 9, bos: 0}}}
{data: {kind: mixture, parts: [{weight: 1, data: {kind: stdlib}}, {weight: 2, data: {kind: synthetic}}]}}
{model: {kind: llama, num_layers: 3, hidden_size: 6, num_heads: 3, intermediate_size: 8, window: 4, global_layers: [1]}}
""".strip().splitlines()
)
"""Sections that a config may have beside the quickstart's."""


def encoded(text: str | bytes) -> str:
    return base64.b64encode(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text).decode()


AROUND = {"quickstart.yaml": encoded(SHIPPED["quickstart.yaml"])}


# Configs -------------------------------------------------------------------------------------------------------------


def _properties(definition: dict[str, Any]) -> list[str]:
    return list(definition.get("properties") or definition["anyOf"][0]["properties"])


def _keys() -> list[str]:
    described = schema(Run)
    return sorted({key for one in (described, *described["$defs"].values()) for key in _properties(one)} - {"target"})


KEYS = _keys()


def mappings(data: Any) -> list[dict[str, Any]]:
    """All mappings in `data`, `data` itself first."""
    if isinstance(data, dict):
        return [data, *(inner for item in data.values() for inner in mappings(item))]
    return [inner for item in data for inner in mappings(item)] if isinstance(data, list) else []


def other_value(rng: random.Random, data: dict[str, Any]) -> None:
    holder = rng.choice([one for one in mappings(data) if one])
    holder[rng.choice(list(holder))] = value(rng)


def other_number(rng: random.Random, data: dict[str, Any]) -> None:
    places = [(one, key) for one in mappings(data) for key in one if key != "kind"]
    numbers = [(one, key) for one, key in places if isinstance(one[key], (int, float))]
    holder, key = rng.choice(numbers if numbers and rng.random() < 0.8 else places)
    holder[key] = small(rng, holder[key])


def another_key(rng: random.Random, data: dict[str, Any]) -> None:
    rng.choice(mappings(data))[rng.choice((*KEYS, *KEYS, *TEXTS))] = value(rng)


def no_key(rng: random.Random, data: dict[str, Any]) -> None:
    holder = rng.choice([one for one in mappings(data) if one])
    del holder[rng.choice(list(holder))]


def renamed_key(rng: random.Random, data: dict[str, Any]) -> None:
    holder = rng.choice([one for one in mappings(data) if one])
    holder[rng.choice((*KEYS, *TEXTS))] = holder.pop(rng.choice(list(holder)))


def moved(rng: random.Random, data: dict[str, Any]) -> None:
    where = rng.choice(mappings(data))
    where[rng.choice(KEYS)] = copy.deepcopy(rng.choice(mappings(data)))


def section(rng: random.Random, data: dict[str, Any]) -> None:
    data.update(copy.deepcopy(rng.choice(SECTIONS)))


OF_DATA = (
    other_value,
    other_number,
    other_number,
    other_number,
    another_key,
    no_key,
    renamed_key,
    moved,
    section,
    section,
)


def bomb(levels: int, width: int) -> str:
    lines = ["z0: &z0 x", *(f"z{i}: &z{i} [{', '.join([f'*z{i - 1}'] * width)}]" for i in range(1, levels + 1))]
    return "\n".join(lines)


SNIPPETS = (
    "&a [*a]", "&a {b: *a}", "*nowhere", "&a 1", "!!set {a}", "!!binary aGk=", "!!python/object/apply:os.system [ls]",
    "!!int x", "!!float ''", "!x 1", "!<tag:yaml.org,2002:str> 1", "<<: {a: 1}", "? [a, b]", "? {a: 1}\n: 2", "=", "- ",
    "|", ">", "|9\n x", "%YAML 9.9", "---", "...", "@", "`", "\t", "\x00", "\x1b", "\x85", "\u2028", "\ufeff", "#",
    '"\\e"',
    '"\\x00"', '"\\ud800"', '"\\UFFFFFFFF"', "0x_", "0b_", "-0b" + "1" * 9000, "9" * 5000, "1" + "_" * 200, "1e", ".e1",
    "1:" * 200 + "1", ".", "-.inf", "[" * 600, "{" * 600, "[" * 5000 + "]" * 5000, "{a: " * 600, "- " * 600, "? " * 600,
    "a: " * 300, '"' * 99, "'" * 99, bomb(3, 10), bomb(9, 10), bomb(4, 12), "k" * 5000 + ": 1",
    "[" + "1, " * 30000 + "1]", "x" * 300000,
)  # fmt: skip
"""Pieces of YAML with a surprising meaning, or with none."""


def of_text(rng: random.Random, text: str) -> str:
    """One mistake in the text itself."""
    lines = text.splitlines()
    at = rng.randrange(len(text) + 1)
    line = rng.randrange(len(lines) or 1)
    form = rng.randrange(8)
    if form == 0:
        return text[:at] + text[at + rng.randrange(1, 9) :]
    if form == 1:
        return text[:at] + rng.choice(SNIPPETS) + text[at:]
    if form == 2:
        return text[:at] + rng.choice(TEXTS) + text[at:]
    if form == 3:
        return text[:at]
    if form == 4:
        return "\n".join([*lines[:line], rng.choice(SNIPPETS), *lines[line:]])
    if form == 5 and lines:
        key = lines[line].partition(":")[0]
        return "\n".join([*lines[:line], f"{key}: {rng.choice(SNIPPETS)}", *lines[line + 1 :]])
    if form == 6 and lines:
        return "\n".join([*lines[:line], " " * rng.randrange(4) + lines[rng.randrange(len(lines))], *lines[line:]])
    return f"{text}\n{rng.choice(KEYS)}: {rng.choice(SNIPPETS)}\n"


def special(rng: random.Random) -> Case:
    """A config that is no ordinary file, or extends in an odd way."""
    config = encoded(yaml.safe_dump(SMALL))

    def extends(text):
        return {"config.yaml": encoded(f"extends: {text}\n")}

    many = {f"e{i}.yaml": encoded(f"extends: e{i + 1}.yaml\n") for i in range(300)}
    return rng.choice(
        [
            Case(("explain", "config.yaml"), {"fifo:config.yaml": ""}),
            Case(("explain", "config.yaml"), {"dir:config.yaml": ""}),
            Case(("explain", "config.yaml"), {"link:config.yaml": encoded("nowhere")}),
            Case(("explain", "config.yaml"), {"link:config.yaml": encoded("config.yaml")}),
            Case(("explain", "config.yaml"), {"link:config.yaml": encoded("/dev/zero")}),
            Case(("explain", "config.yaml"), {"link:config.yaml": encoded("x" * 300)}),
            Case(("explain", "config.yaml"), {"config.yaml": encoded(b"\xff\xfe" + bytes(range(256)))}),
            Case(("explain", "config.yaml"), {"config.yaml": encoded(b"\x00" * 2**20)}),
            Case(("explain", "config.yaml"), {"config.yaml": encoded("a: 1 # " + "x" * 2**22)}),
            Case(("explain", "config.yaml"), {"config.yaml": encoded("")}),
            Case(("explain", "config.yaml"), extends("config.yaml")),
            Case(("explain", "config.yaml"), extends("/dev/zero")),
            Case(("explain", "config.yaml"), extends(f"{'x' * 300}.yaml")),
            Case(("explain", "config.yaml"), extends('"a\\0b"')),
            Case(("explain", "config.yaml"), extends("[" + "x, " * 50 + "x]")),
            Case(("explain", "config.yaml"), extends("f") | {"fifo:f": ""}),
            Case(("explain", "e0.yaml"), many | {"e300.yaml": config}),
            Case(("explain", "config.yaml/x"), {"config.yaml": config}),
            Case(("explain", "x" * 300), {}),
            Case(("explain", "x/" * 3000), {}),
            Case(("explain", "/dev/stdin"), {}),
            Case(("explain", "/proc/self/mem"), {}),
            Case(("explain", ""), {}),
        ]
    )


def override(rng: random.Random) -> str:
    """`key=value`, more or less."""
    keys = [rng.choice(KEYS) for _ in range(rng.choice((1, 2, 2, 2, 3)))]
    top = rng.choice(["model", "data", "optim", "mesh", "rules", "precision", "parallel", "", "contract"])
    name = ".".join([top, keys[0]] if top and rng.random() < 0.7 else keys)
    form = rng.randrange(6)
    if form == 0:
        return f"{name}={rng.choice(SNIPPETS)}"
    if form == 1:
        return f"{rng.choice(TEXTS)}={rng.choice(TEXTS)}"
    if form == 2:
        return f"{name}={rng.choice(INTEGERS)}"
    if form == 3:
        return f"{name}=[{', '.join(rng.choice(OURS) for _ in range(rng.randrange(3)))}]"
    return f"{name}={scalar(rng)}"


def config_case(rng: random.Random) -> Case:
    """`explain` of a config that ships, with one mistake or several."""
    if rng.random() < 0.05:
        return special(rng)
    text = SHIPPED[rng.choice(list(SHIPPED))]
    data = copy.deepcopy(SMALL) if rng.random() < 0.6 else yaml.safe_load(text)
    mistakes = rng.random()
    if mistakes < 0.25:
        for _ in range(rng.choice((1, 1, 2))):
            text = of_text(rng, text)
    else:
        if rng.random() < 0.6:
            section(rng, data)
        for _ in range(rng.choice((1, 1, 2))):
            if data:
                (other_number if mistakes < 0.7 else rng.choice(OF_DATA))(rng, data)
        text = yaml.dump(data, allow_unicode=rng.random() < 0.5, default_flow_style=rng.choice((None, True, False)))
    words = ["explain", "config.yaml", *(override(rng) for _ in range(rng.choice((0, 0, 0, 0, 1, 2))))]
    return Case(tuple(words), AROUND | {"config.yaml": encoded(text)})


# Command lines -------------------------------------------------------------------------------------------------------

BROKEN = ("nowhere", "empty", "file", "dangling", "fifo", ".", "/", "/dev/null", "/dev/zero", "x" * 300)
NAMES = ("config.yaml", "run", *BROKEN, *TEXTS)
KNOWN_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv")
SCHEDULES = (*KNOWN_SCHEDULES, "1F1B", "file", "config.yaml", "fifo", *ODD)
NUMBERS = (*map(str, INTEGERS), "1.5", "nan", "inf", "-inf", "1e9", "1e-320", "x", "", "0x10", "١", "1_0")


FITTING = {
    "--devices": "8", "--stages": "4", "--microbatches": "8", "--chunks": "2", "--f": "1", "--b": "2", "--w": "0.5",
    "--transfer": "0.5", "--svg": "a.svg", "--out": "a.png", "--prompt": "def", "--max-tokens": "4", "--html": "a.html",
    "--from-hf": "empty", "--to-hf": "made",
}  # fmt: skip
"""Valid values."""


def _options(rng: random.Random, options: dict[str, tuple[str, ...] | None]) -> list[str]:
    words: list[str] = []
    for option in rng.sample(list(options), rng.randrange(min(4, len(options) + 1))):
        words.append(option)
        if values := options[option]:
            words.append(FITTING.get(option, values[0]) if rng.random() < 0.6 else rng.choice(values))
    return words


def explain_words(rng: random.Random) -> list[str]:
    more = [override(rng) for _ in range(rng.choice((0, 0, 1, 2)))]
    path = rng.choice(("blocks.**", "blocks.attn.q.kernel", rng.choice(TEXTS)))
    options = _options(rng, {"--devices": NUMBERS, "--json": None, "--svg": NAMES})
    config = rng.choice(("config.yaml", "config.yaml", rng.choice(NAMES)))
    return ["explain", config, *rng.choice(([], [path])), *more, *options]


def schedule_words(rng: random.Random) -> list[str]:
    times = dict.fromkeys(("--f", "--b", "--w", "--transfer", "--stages", "--microbatches", "--chunks"), NUMBERS)
    name = rng.choice(KNOWN_SCHEDULES if rng.random() < 0.7 else SCHEDULES)
    return ["schedule", name, *_options(rng, times | {"--svg": NAMES})]


def checkpoint_words(rng: random.Random) -> list[str]:
    verb = rng.choice(("ls", "show", "diff", "", "rm"))
    return ["checkpoint", verb, *(rng.choice(NAMES) for _ in range(rng.randrange(4))), *_options(rng, {"--json": None})]


def convert_words(rng: random.Random) -> list[str]:
    options = _options(rng, {"--from-hf": NAMES, "--to-hf": NAMES, "--largest-file": NUMBERS})
    return ["convert", rng.choice(NAMES), *(override(rng) for _ in range(rng.randrange(2))), *options]


def plot_words(rng: random.Random) -> list[str]:
    return ["plot", *(rng.choice(NAMES) for _ in range(rng.randrange(3))), *_options(rng, {"--out": NAMES})]


def generate_words(rng: random.Random) -> list[str]:
    numbers = dict.fromkeys(("--max-tokens", "--temperature", "--top-k", "--top-p", "--seed", "--devices"), NUMBERS)
    texts = {"--prompt": TEXTS, "--prompts": NAMES, "--stop": TEXTS, "--json": None}
    return ["generate", rng.choice(NAMES), *_options(rng, numbers | texts)]


def new_words(rng: random.Random) -> list[str]:
    return ["new", *(rng.choice(("mine", *TEXTS)) for _ in range(rng.choice((0, 1, 1, 1, 2))))]


def refused_words(rng: random.Random) -> list[str]:
    """A verb that would take minutes, on a config that does not load."""
    verb = rng.choice(("train", "inspect", "verify"))
    files = {
        "--html": NAMES,
        "--profile": NAMES,
        "--target": TEXTS,
        "--devices": NUMBERS,
        "--json": None,
        "--diff": None,
    }
    options = _options(rng, files)
    return [verb, rng.choice(BROKEN), *(override(rng) for _ in range(rng.randrange(3))), *options]


def odd_words(rng: random.Random) -> list[str]:
    verbs = (
        "explain",
        "schema",
        "env",
        "new",
        "plot",
        "bench",
        "explian",
        "",
        "-",
        "--",
        "--help",
        "--version",
        "--import",
    )
    helped = ["--help"] if rng.random() < 0.4 else []
    return [*(rng.choice((*verbs, *ODD)) for _ in range(rng.randrange(4))), *helped]


def imported_words(rng: random.Random) -> list[str]:
    named = ("model.target=own:build", "model.target=nowhere:build", "model.target=own:nothing", f"loss={scalar(rng)}")
    importing = ["--import", rng.choice(("own.py", *NAMES))] if rng.random() < 0.5 else []
    return [*importing, "explain", "own.yaml", rng.choice(named), *(override(rng) for _ in range(rng.randrange(2)))]


WORDS: tuple[Callable[[random.Random], list[str]], ...] = (
    explain_words, explain_words, schedule_words, schedule_words, checkpoint_words, convert_words, plot_words,
    generate_words, new_words, refused_words, odd_words, imported_words,
)  # fmt: skip
OWN = SMALL | {"model": {"kind": "import", "target": "own:build"}, "lowering": "auto"}
FILES = AROUND | {
    "config.yaml": encoded(yaml.safe_dump(SMALL)),
    "own.yaml": encoded(yaml.safe_dump(OWN)),
    "own.py": encoded("def build():\n    return 3\n"),
    "dir:empty": "",
    "run/metrics.jsonl": encoded('{"kind": "train", "step": 1, "loss": 2.0}\n{"kind"'),
    "run/checkpoints/7/meta.json": encoded("{}"),
    "file": encoded("stage: [1"),
    "link:dangling": encoded("nowhere"),
    "fifo:fifo": "",
}


def command_case(rng: random.Random) -> Case:
    words = rng.choice(WORDS)(rng)
    if words and rng.random() < 0.1:
        at = rng.randrange(len(words))
        words[at] = words[at][: rng.randrange(len(words[at]) + 1)] + rng.choice(TEXTS)
    # Linux passes a program no NUL, and no argument of more than 128 KiB.
    return Case(tuple(word.replace("\0", "")[:100_000] for word in words), FILES)


def generated(make: Callable[[random.Random], Case], seed: int, count: int) -> Iterator[Case]:
    """The same cases for the same seed: each case has a random generator of its own."""
    return (make(random.Random(f"{make.__name__} {seed} {i}")) for i in range(count))
