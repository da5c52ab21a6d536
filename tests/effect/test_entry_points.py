"""No argument of an entry point is without effect, in Python and on the command line.

Its change shows in what is given to the loop, in answers, in an engine, in files or in what the verb calls; or it is
refused by name. The arguments are those of the signatures: a new one is walked on the day that it is added.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_overloads
from unittest.mock import patch

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar
import meshpar.experiment.fit_model as fit_module
from meshpar import MeshLayout, MeshparError, convert
from meshpar.checkpoint.retention import Retention
from meshpar.cli.convert import convert as convert_verb
from meshpar.cli.generate import generate as generate_verb
from meshpar.cli.serve import serve as serve_verb
from meshpar.cli.train import train as train_verb
from meshpar.config import to_yaml
from meshpar.experiment.arrays import Batches
from meshpar.experiment.config import Run, load
from meshpar.interop.peft import LayerUpdate
from meshpar.interop.peft_params import AdapterParams
from meshpar.records.loggers import TensorBoard
from meshpar.serve.answer import AnswerPiece
from meshpar.serve.batch import Batch
from meshpar.serve.open_engine import open_batch, open_engine
from meshpar.serve.paged_decoding import PagedDecoding
from meshpar.serve.side_adapters import OpenedAdapters
from meshpar.serve.source import Source
from meshpar.tree import flatten_with_paths
from tests.effect import fingerprint
from tests.effect.files import write_llama, written
from tests.effect.walk import CASES

VALUES: dict[str, Any] = CASES["arguments"]
AROUND: dict[str, dict[str, Any]] = CASES["around_arguments"]
ALL = ["mesh.data=8"]
CONFIG = {
    "model": {"kind": "llama", "num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
              "vocab_size": 320},
    "data": {"kind": "text", "path": "texts", "tokenizer": "tokenizer.json", "batch_size": 8, "seq_len": 16,
             "held_out_fraction": 0.25},
    "optim": {"kind": "adamw", "lr": 1e-3}, "mesh": {"data": 8}, "num_steps": 4, "run_dir": "run", "loggers": [],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _files(tmp_path_factory):
    jax.devices()  # a conversion would start JAX with one
    folder = tmp_path_factory.mktemp("entries")
    written(folder)
    (folder / "config.yaml").write_text(json.dumps(CONFIG))
    (folder / "other.yaml").write_text(json.dumps(CONFIG | {"num_steps": 6}))
    (folder / "prompts.txt").write_text("c\n")
    write_llama(folder / "llama")
    write_llama(folder / "other-llama", 0.5)
    with pytest.MonkeyPatch.context() as context:
        context.chdir(folder)
        convert.from_hf("llama", "converted", ALL)
        convert.from_hf("other-llama", "other-run", ALL)
        yield
    observed.cache_clear()


# What an entry point does --------------------------------------------------------------------------------------------


def of_fit(run: Run, callbacks: Any = (), **arguments: Any) -> Any:
    before = {*Path().iterdir()}
    given = fingerprint.loop(run, callbacks=callbacks, **arguments)
    made = {*Path().iterdir()} - before
    for path in made:
        path.unlink()
    return given, made


class Small(nnx.Module):
    """A user's model."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.down = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(x)


class Wide(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.up(x))


def squared(model: Any, batch: Any) -> jax.Array:
    return jax.numpy.square(model(batch["x"])).mean()


def rows(size: int = 64) -> dict[str, np.ndarray]:
    return {"x": np.arange(4 * size, dtype="f").reshape(size, 4)}


def of_fit_model(subject: Any, *, steps: bool = False, **arguments: Any) -> Any:
    """What is given to the loop, and the programs and first rows of the training that is made."""
    seen: list[Any] = []
    make = fit_module.training

    def spy(*given: Any, **more: Any) -> Any:
        made = make(*given, **more)
        seen.append((sorted(fingerprint.of_training(made).items()), given[3]))
        return made

    def call(folder: Path) -> Any:
        made = meshpar.fit(model=subject, **arguments | {"run_dir": folder / arguments["run_dir"], "steps": steps})
        return [*made] if steps else made

    names, shown = ("Loop", "checkpoints_of", "recorder"), (Batches, Retention, list, dict)
    with patch.object(fit_module, "training", spy), jax.numpy_dtype_promotion("standard"):
        return fingerprint.spied_on(fit_module, names, call, shown), repr(seen)


def source(run: Run) -> Source:
    """A model with random weights."""

    def restore(structs: Any) -> Any:
        rng = np.random.default_rng(0)
        return jax.tree.map(lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding), structs)

    return Source(run, restore)


def opened(path: Path, overrides: Any = ()) -> Source:
    return source(load(path, overrides))


def of_generate(source: Any, prompts: Any, **arguments: Any) -> Any:
    """What the engine is opened with, and what becomes of the tokens that it is said to draw; nothing is compiled."""
    seen: list[Any] = []
    sources: list[Source] = []
    module = import_module(meshpar.generate.__module__)

    def streamed(batch: Any, engine: Any, requests: Any) -> Any:
        seen.append(([vars(request) for request in requests], [vars(answer).copy() for answer in batch.answers]))
        for row, answer in enumerate(batch.answers):
            for token in sources[0].tokenizer.encode("is a mesh"):
                if not answer.finish:
                    yield AnswerPiece(row, answer.add(int(token)), answer.finish)

    def engine_of(source: Source, *sampling: Any, **sizes: Any) -> Any:
        sources.append(source)
        seen.append((source.run, sampling, sizes))
        return uncompiled(open_batch, source, *sampling, **sizes)

    with ExitStack() as patches:
        for name, other in (("open_source", opened), ("open_batch", engine_of)):
            patches.enter_context(patch.object(module, name, other))
        patches.enter_context(patch.object(Batch, "stream", streamed))
        got = meshpar.generate(source, prompts, **{"show": seen.append} | arguments)
    return fingerprint.ADDRESS.sub("", f"{seen} {got}")


def uncompiled(opening: Any, *sources: Any, **arguments: Any) -> Any:
    with ExitStack() as patches:
        for name in ("compile_prefill", "compile_decode", "compile_verify", "compile_draft", "compile_round"):
            patches.enter_context(patch.object(PagedDecoding, name, lambda decoding, *smaller: None))
        return opening(*sources, **arguments)


def of_engine(**arguments: Any) -> Any:
    engine = uncompiled(open_engine, **arguments)
    drafting = getattr(engine.drafter, "decoding", None)
    sizes = dict(engine.decoding.ctx.mesh.shape)
    return (
        engine.decoding.model,
        sizes,
        engine.decoding.capacity,
        engine.decoding.num_drafts,
        engine.decoding.scores_prompts,
        repr(drafting),
        engine.decoding.adapters,
    )


def of_folder(make: Callable[..., Any]) -> Callable[..., Any]:
    """The folders that a conversion writes: the names of their files, and the parameters."""

    def of(*places: Any, **arguments: Any) -> Any:
        before = {*Path().iterdir()}
        run = make(*places, **arguments)
        (folder,) = {*Path().iterdir()} - before
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors*"))
        weights = convert.open_folder(folder).paths if run is None else flatten_with_paths(convert.trained(folder)[1])
        read = {path: float(np.sum(x)) for path, x in weights.items()} if run else [
            path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))]  # fmt: skip
        folder.rename(f"done-{len(before)}")
        return str(folder), files, read, run and to_yaml(run)

    return of


CONTEXT = {"ctx"}
"""What Typer passes to a verb, which is no option."""


def of_verb(verb: Callable[..., None], spied: tuple[str, ...]) -> Callable[..., Any]:
    """The calls that a verb makes, with their arguments."""

    def of(**arguments: Any) -> Any:
        calls: list[Any] = []

        def spy(name: str) -> Any:
            def called(*given: Any, **more: Any) -> Any:
                calls.append((name, fingerprint.ADDRESS.sub("", f"{given} {sorted(more.items())}")))
                return returned.get(name)

            return called

        run = load("config.yaml")
        returned = {"open_source": SimpleNamespace(run=run), "bind": nullcontext(), "from_hf": run,
                    "TextEndpoints": SimpleNamespace(app=lambda: None, service=None)}  # fmt: skip
        with ExitStack() as patches:
            for place in spied:
                module, _, name = place.rpartition(".")
                patches.enter_context(patch.object(import_module(module), name, spy(name)))
            patches.enter_context(patch.object(MeshLayout, "simulate", spy("simulate")))
            verb(**dict.fromkeys(CONTEXT & signature(verb).parameters.keys()), **arguments)
        return calls

    return of


def adapter() -> AdapterParams:
    """Of rank 1, of the first layer's down projection."""
    update = LayerUpdate(np.ones((16, 1)), np.ones((1, 16)), 1.0)
    return AdapterParams(Path(), {"blocks.mlp.down": {(0,): update}})


class Entry(NamedTuple):
    """A function, what it does, and arguments with which it is called first."""

    function: Callable[..., Any]
    does: Callable[..., Any]
    base: Callable[[], dict[str, Any]]


def of_run(**changes: Any) -> Run:
    plain = {"kind": "synthetic", "vocab_size": 64, "batch_size": 8, "seq_len": 16, "num_documents": 60,
             "document_len": 20}  # fmt: skip
    return Run(**CONFIG | {"data": plain} | changes)


SPIED = {
    "train": ("meshpar.experiment.actions.fit", "meshpar.mesh.join.join", "meshpar.cli.train.use_cache"),
    "generate_verb": ("meshpar.serve.source.open_source", "meshpar.mesh.join.join", "meshpar.cli.generate.use_cache",
                      "meshpar.serve.generate.generate", "meshpar.cli.generate.echo"),
    "serve": ("meshpar.serve.source.open_source", "meshpar.cli.serve.use_cache", "meshpar.serve.http.app.TextEndpoints",
              "meshpar.serve.open_engine.open_engine", "meshpar.serve.http.server.bind",
              "meshpar.serve.http.server.run", "meshpar.serve.side_adapters.open_adapters"),
    "convert": ("meshpar.convert.from_hf", "meshpar.convert.to_hf"),
}  # fmt: skip
ENTRIES = {
    "fit": Entry(meshpar.fit, of_fit, lambda: {"run": of_run(), "json": False}),
    "fit_model": Entry(
        fit_module.fit_model, of_fit_model,
        lambda: {"subject": Small, "loss": squared, "data": rows(), "tx": optax.adam(0.1), "batch_size": 16,
                 "num_steps": 4, "run_dir": "run", "mesh": "data=8", "rules": ["replicated"], "json": True},
    ),
    "generate": Entry(
        meshpar.generate, of_generate,
        lambda: {"source": opened(Path("config.yaml")), "prompts": ["a <s>"], "max_tokens": 8},
    ),
    "open_engine": Entry(open_engine, of_engine, lambda: {"source": opened(Path("config.yaml")), "max_len": 64}),
    "from_hf": Entry(
        convert.from_hf, of_folder(convert.from_hf), lambda: {"folder": "llama", "run_dir": "made", "overrides": ALL}
    ),
    "to_hf": Entry(convert.to_hf, of_folder(convert.to_hf), lambda: {"source": "converted", "folder": "made"}),
    "train": Entry(train_verb, of_verb(train_verb, SPIED["train"]), lambda: {"config": Path("config.yaml")}),
    "generate_verb": Entry(
        generate_verb, of_verb(generate_verb, SPIED["generate_verb"]),
        lambda: {"source": Path("config.yaml"), "prompt": ["a"]},
    ),
    "serve": Entry(serve_verb, of_verb(serve_verb, SPIED["serve"]), lambda: {"source": Path("config.yaml")}),
    "convert": Entry(
        convert_verb, of_verb(convert_verb, SPIED["convert"]), lambda: {"run": Path("made"), "from_hf": Path("llama")}
    ),
}  # fmt: skip
OBJECTS: dict[str, Callable[[], Any]] = {
    "fit.run": lambda: of_run(num_steps=5),
    "fit.callbacks": lambda: (print,),
    "fit_model.subject": lambda: Wide,
    "fit_model.loss": lambda: lambda model, batch: 2 * squared(model, batch),
    "fit_model.tx": lambda: optax.sgd(0.1),
    "fit_model.data": lambda: rows(128),
    "fit_model.held_out": lambda: rows(16),
    "fit_model.callbacks": lambda: (print,),
    "fit_model.loggers": lambda: (TensorBoard(),),
    "fit_model.options": dict,
    "generate.source": lambda: source(of_run(data=CONFIG["data"], mesh={"data": 4, "fsdp": 2}, rules=["fsdp"])),
    "generate.draft": lambda: opened(Path("other.yaml")),
    "generate.show": lambda: lambda piece: None,
    "open_engine.source": lambda: source(of_run(data=CONFIG["data"], mesh={"data": 4, "fsdp": 2}, rules=["fsdp"])),
    "open_engine.draft": lambda: opened(Path("other.yaml")),
    "open_engine.adapters": lambda: OpenedAdapters(("a",), (adapter(),)),
}
"""Values that are no plain data."""


def parameters(function: Any) -> Signature:
    """The arguments of a function; of one that takes a run or a model, those for a run."""
    ways = get_overloads(function)
    return signature(ways[0] if ways else function, eval_str=False)


CASES_OF = [
    (entry, argument)
    for entry in ENTRIES
    for argument in parameters(ENTRIES[entry].function).parameters
    if argument not in CONTEXT
]


def another(entry: str, parameter: Parameter, before: Any) -> Any:
    """Another legal value of an argument."""
    name = f"{entry}.{parameter.name}"
    if name in OBJECTS:
        return OBJECTS[name]()
    if name in VALUES or parameter.name in VALUES:
        value = VALUES.get(name, VALUES.get(parameter.name))
        return Path(value) if "Path" in str(parameter.annotation) and isinstance(value, str) else value
    value = parameter.default if before is None else before
    if isinstance(value, bool):
        return not value
    assert isinstance(value, int | float), f"cases.yaml has no other value of {name}: add one to arguments"
    return 2 * value + 1


@cache
def observed(entry: str, argument: str, changed: bool) -> Any:
    """What the entry point does before or after the change; the message, if it is refused."""
    function, does, base = ENTRIES[entry]
    arguments = base() | AROUND.get(f"{entry}.{argument}", {})
    if changed:
        parameter = parameters(function).parameters[argument]
        arguments[argument] = another(entry, parameter, arguments.get(argument))
    try:
        return does(**arguments)
    except MeshparError as error:
        return f"refused: {error}" if argument in str(error).replace("-", "_") else f"without its name: {error}"


def before(entry: str, argument: str) -> Any:
    """Arguments that need nothing beside them share one observation."""
    return observed(entry, argument if f"{entry}.{argument}" in AROUND else "", False)


def assert_effect(entry: str, argument: str) -> None:
    plain = before(entry, argument)
    changed = observed(entry, argument, True)
    assert not str(plain).startswith("refused"), plain
    assert not str(changed).startswith("without its name")
    assert changed != plain


@pytest.mark.sample(40)
@pytest.mark.parametrize(("entry", "argument"), CASES_OF)
def test_an_argument_has_an_effect_or_is_refused_by_name(entry, argument):
    assert_effect(entry, argument)


@pytest.mark.parametrize("entry", ["fit", "generate", "open_engine", "train"])
def test_the_same_arguments_do_the_same(entry):
    assert ENTRIES[entry].does(**ENTRIES[entry].base()) == before(entry, "")


# Controls ------------------------------------------------------------------------------------------------------------

DROPPED = {
    ("generate", "top_p"): lambda real: lambda **more: real(**more | {"top_p": 1.0}),
    ("open_engine", "chunk"): lambda real: SimpleNamespace(
        of_rows=lambda *sizes, **more: real.of_rows(*sizes, **more | {"chunk": 128})
    ),
}
"""Arguments that a planted fault drops on their way to the class of this name."""
PLACES = {"generate": "meshpar.serve.generate.Sampling", "open_engine": "meshpar.serve.open_engine.Capacity"}


@pytest.mark.parametrize(("entry", "argument"), DROPPED)
def test_control_an_argument_that_is_dropped_is_found(entry, argument, monkeypatch):
    module, _, name = PLACES[entry].rpartition(".")
    real = getattr(import_module(module), name)
    observed.cache_clear()
    monkeypatch.setattr(import_module(module), name, DROPPED[entry, argument](real))
    with pytest.raises(AssertionError):
        assert_effect(entry, argument)
    observed.cache_clear()


def test_control_an_argument_of_tomorrow_is_walked(monkeypatch):
    """It is tried with another value of its type, or its value is asked for."""

    def fit(run, *, json=False, later: bool = False, strategy: str = "a"):
        return meshpar.fit(run, json=json)

    monkeypatch.setitem(ENTRIES, "fit", ENTRIES["fit"]._replace(
        function=fit, does=lambda run, json, later=False: of_fit(run, json=json)))  # fmt: skip
    observed.cache_clear()
    with pytest.raises(AssertionError):
        assert_effect("fit", "later")
    with pytest.raises(AssertionError, match=r"cases.yaml has no other value of fit.strategy"):
        assert_effect("fit", "strategy")
    observed.cache_clear()
