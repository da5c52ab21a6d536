"""A user's own model from a config: every verb accepts it, and no config imports code that was not permitted."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from meshpar import MeshLayout, generate, prepare
from meshpar.experiment import mfu
from meshpar.experiment.config import load
from meshpar.experiment.validate import task_of
from meshpar.interop import user_code
from meshpar.mesh.hardware import Chip
from meshpar.planning.plan import plan
from meshpar.serve.open_engine import open_engine
from meshpar.serve.source import open_source
from meshpar.train.program import on_host, with_rows
from meshpar.tree import human_flops
from tests.serve.client import serving

MODULE = """
import flax.linen as nn
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from meshpar import constrain
from meshpar.parallel import tensor


class Own(nn.Module):
    width: int = 16
    batch_norm: bool = False

    @nn.compact
    def __call__(self, tokens):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Embed(64, self.width)(tokens)
        x = nn.Dense(32, kernel_init=init)(x)
        if self.batch_norm:
            x = nn.BatchNorm(use_running_average=not self.is_mutable_collection("batch_stats"))(x)
        return nn.Dense(64)(nn.gelu(x))


class Published(nn.Module):
    # As public models are: its dims have no names, and an argument of its call says whether it trains.
    rate: float = 0.5

    @nn.compact
    def __call__(self, inputs, train):
        x = nn.Embed(64, 16)(inputs)
        hidden = nn.Dropout(self.rate, deterministic=not train)(nn.gelu(nn.Dense(32, name="up")(x)))
        return nn.Dense(64)(x + nn.Dense(16, name="down")(hidden))


def of_model(model, batch, key):
    logits = model(batch["tokens"], train=True, rngs={"dropout": key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["targets"], 0)).mean()


class Looping(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 64)(tokens)
        first, last = (jnp.int32(0), lax.stop_gradient(x)), tokens.max()
        _, fixed = lax.while_loop(lambda at: at[0] < last, lambda at: (at[0] + 1, at[1] @ jnp.eye(64)), first)
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return nn.Dense(64, kernel_init=init)(x + fixed)


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 16)(tokens)
        for i in range(4):
            x = x + nn.Dense(16, name=f"layer_{i}")(nn.gelu(x))
        return nn.Dense(64)(x)


class Sequence(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        def kernel(*dims):
            return nn.with_logical_partitioning(nn.initializers.lecun_normal(), dims)

        x = constrain(nn.Embed(64, 16)(tokens), "batch", "residual_seq", "embed")
        hidden = nn.gelu(nn.Dense(32, use_bias=False, kernel_init=kernel("embed", "mlp"))(x))
        x = nn.Dense(16, use_bias=False, kernel_init=kernel("mlp", "embed"))(hidden)
        return nn.Dense(64)(constrain(x, "batch", "residual_seq", "embed"))


class OwnNNX(nnx.Module):
    def __init__(self, width, rngs):
        self.table = nnx.Embed(64, width, param_dtype=jnp.result_type(float), rngs=rngs)
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.up = nnx.Linear(width, 64, kernel_init=init, rngs=rngs)

    def __call__(self, tokens):
        return self.up(self.table(tokens))


class Dropping(nnx.Module):
    # Statistics, random keys and counters beside its parameters.

    def __init__(self, width, rngs):
        self.table = nnx.Embed(64, width, param_dtype=jnp.result_type(float), rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", "tp"))
        self.up = nnx.Linear(width, 64, kernel_init=init, rngs=rngs)

    def __call__(self, tokens):
        return self.up(self.dropout(self.norm(self.table(tokens))))


class Regression(nn.Module):
    # No decoder: one number for each row.

    @nn.compact
    def __call__(self, tokens):
        dtype = jnp.result_type(float)
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.gelu(nn.Dense(32, kernel_init=init, param_dtype=dtype)(tokens.astype(dtype) / 64))
        return nn.Dense(1, param_dtype=dtype)(x)[..., 0]


def squared(model, params, batch, key):
    error = model.apply({"params": params}, batch["tokens"]) - batch["targets"].mean(-1) / 64
    return jnp.square(error).mean(), {"size": jnp.abs(error).mean()}


def centred(model, params, batch, key):
    # Wrong for local shards: a device knows the mean of its own rows alone.
    made = model.apply({"params": params}, batch["tokens"])
    return jnp.square(made - made.mean()).mean(), {}


class Local(nnx.Module):
    # Written for local shards of the dim mlp.

    def __init__(self, width, rngs):
        dtype, init = jnp.result_type(float), nnx.initializers.lecun_normal()
        self.table = nnx.Embed(64, width, param_dtype=dtype, rngs=rngs)
        up, down = nnx.with_partitioning(init, ("embed", "mlp")), nnx.with_partitioning(init, ("mlp", "embed"))
        self.up = nnx.Linear(width, 32, use_bias=False, kernel_init=up, param_dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(32, 64, use_bias=False, kernel_init=down, param_dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        hidden = nnx.gelu(self.up(tensor.enter_region(self.table(tokens), "mlp")))
        return tensor.exit_region(self.down(hidden), "mlp")


def own(model, params, batch, key, carried):
    merged = nnx.merge(model, params, carried)
    nll = optax.softmax_cross_entropy_with_integer_labels(merged(batch["tokens"]), jnp.maximum(batch["targets"], 0))
    return nll.mean(), {}, nnx.state(merged, nnx.Not(nnx.Param))


def forgets(model, params, batch, key, carried):
    return own(model, params, batch, key, carried)[0]


def misspelt(model, params, batch, key):
    return batch["tokes"].mean()


def keyless(model, params, batch):
    return batch["tokens"].mean()


def loss(model, params, batch, key):
    logits = model.apply({"params": params}, batch["tokens"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["targets"], 0))
    return nll.mean(), {"largest": logits.max()}


def normed(model, params, batch, key, carried):
    variables = {"params": params, **carried}
    logits, carried = model.apply(variables, batch["tokens"], mutable=["batch_stats"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["targets"], 0))
    return nll.mean(), {}, carried


def number():
    return 7
"""
CONFIG = """\
model: {kind: import, target: own_model:Own}
data: {kind: synthetic, vocab_size: 64, batch_size: 8, seq_len: 8, documents_in_row: joined}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: 2, fsdp: 2, tensor: 2}
rules: {preset: [fsdp, megatron], unnamed: []}
num_steps: 2
log_every: 1
run_dir: run
"""


DROPPING = ["model.target=own_model:Dropping", "model.arguments={width: 16}", "model.axes={tp: tensor}"]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """A folder with a module and a config, where no import is permitted yet."""
    monkeypatch.setattr(user_code, "_named", [])
    monkeypatch.setattr(user_code, "_permitted", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    here = tmp_path / "here"
    here.mkdir()
    (here / "own_model.py").write_text(MODULE)
    (here / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(here)
    with jax.numpy_dtype_promotion("standard"):
        yield
    sys.modules.pop("own_model", None)


@pytest.fixture
def meshpar(command):
    """Runs a command; returns its exit code and its output."""

    def call(*arguments: str) -> tuple[int, str]:
        result = command(*arguments)
        return result.code, result.err or result.out

    return call


@pytest.fixture
def chip(monkeypatch):
    """A chip of 1e12 operations a second in place of the CPU."""
    chip = Chip("test", ("cpu",), 1e12, 1e9, 1e9)
    monkeypatch.setattr(mfu, "chip_of", lambda device: chip)
    return chip


def records(output, kind):
    return [r for r in map(json.loads, output.splitlines()) if r["kind"] == kind]


def test_a_linen_model_trains_and_resumes(meshpar):
    code, output = meshpar("train", "config.yaml", "--json")
    assert code == 0
    assert [r["step"] for r in records(output, "train")] == [1, 2]
    code, output = meshpar("train", "config.yaml", "num_steps=3", "mesh.data=4", "mesh.tensor=1", "--json")
    assert [r["step"] for r in records(output, "train")] == [3]


def test_the_loss_of_an_imported_model_reports_metrics(meshpar):
    _, output = meshpar("train", "config.yaml", "loss=own_model:loss", "--json")
    assert all(r["largest"] > 0 for r in records(output, "train") + records(output, "evaluation"))


PUBLISHED = ["model.target=own_model:Published", "model.dims=infer"]


@pytest.mark.parametrize("rate", [0.5, 0.0])
def test_a_published_decoder_drops_in_training_alone(rate):
    """With the rate 0, the negative control, keys change nothing."""
    run = load("config.yaml", [*PUBLISHED, f"model.arguments={{rate: {rate}}}"])
    made = prepare(run, MeshLayout(data=2, fsdp=2, tensor=2).abstract())
    assert "tensor" in str(made.placement.params["up"]["kernel"].pspec)
    assert run.model.names(task_of(run))["up.kernel"] == ("embed", "mlp")
    params = made.init(jax.random.key(0))
    rows = with_rows({name: jnp.ones(x.shape, x.dtype) for name, x in made.batch.items()})
    losses = {float(made.loss(params, rows, jax.random.key(i), {}).loss) for i in (1, 2)}
    assert len(losses) == (2 if rate else 1)
    assert (float(made.evaluation(params, rows, None, {}).loss) in losses) == (not rate)
    generating, _ = run.model.causal(8)
    plain = importlib.import_module("own_model").Published().apply({"params": params}, rows["tokens"], train=False)
    assert (generating.apply(params, rows["tokens"]) == plain).all()


def test_tokens_too_may_have_a_loss_of_the_model():
    made = prepare(load("config.yaml", [*PUBLISHED, "loss=own_model:of_model"]), MeshLayout(tensor=2).abstract())
    assert made.key is not None
    assert "tensor" in str(made.placement.params["down"]["kernel"].pspec)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "weights"), [([], 16 * 32 + 32 * 64), (DROPPING, 16 * 64)], ids=["Linen", "NNX"])
def test_the_mfu_of_an_imported_model_is_recorded(meshpar, chip, model, weights):
    """Each token is multiplied with the weights of the dense layers, once forward and twice backward."""
    _, output = meshpar("train", "config.yaml", *model, "--json")
    timed = [record for record in records(output, "train") if "tokens_per_s" in record]
    assert timed
    for record in timed:
        assert record["mfu"] == pytest.approx(record["tokens_per_s"] * 6 * weights / (8 * chip.flops))


def test_an_imported_model_is_planned_by_the_operations_of_its_own_step(meshpar):
    """Each of four devices multiplies its tokens with the weights of the dense layers, once forward and twice backward.

    The step that is counted is the partitioned one. What GSPMD sends over tensor is not known.
    """
    planned = plan("config.yaml", "h100:1x4", fix=["num_microbatches=1"]).ranked
    assert {axis for one in planned for axis in one.layout.mesh} >= {"fsdp", "tensor"}
    flops = 6 * (16 * 32 + 32 * 64) * 8 * 8 / 4
    first_layer = 2 * 16 * 32 * 8 * 8 / 4  # its input, a lookup of tokens, has a gradient too
    for one in planned:
        assert flops - first_layer <= one.work.computes.flops <= flops + first_layer
    mixes = "optim={kind: muon, lr: 1e-2}"  # an optimizer that mixes elements, so that GSPMD lowers its step
    code, output = meshpar("plan", "config.yaml", mixes, "--target", "h100:1x4", "--fix", "mesh.tensor=4")
    assert (code, output) == (
        2,
        "meshpar: GSPMD decides what this run sends: only layouts over data and fsdp can be planned\n",
    )


def test_an_imported_model_whose_flops_cannot_be_counted_trains_without_mfu(meshpar, chip):
    code, output = meshpar("train", "config.yaml", "model.target=own_model:Looping", "--json")
    why = "dot_general: in a while loop, which may run any number of times"
    assert (code, output) == (0, f"meshpar: MFU is not recorded, as the model's operations cannot be counted: {why}\n")
    assert "mfu" not in (Path("run") / "metrics.jsonl").read_text()


def test_an_imported_model_generates_and_is_served(meshpar):
    """Its tokens are those of a greedy loop in plain Flax; it has no cache, so each token recomputes its row."""
    assert meshpar("train", "config.yaml", "--json")[0] == 0
    generated = generate("run", [[3, 5], [7]], max_tokens=4)
    source = open_source(Path("run"))
    engine = open_engine(source, slots=2)
    params = on_host(engine._params)
    own = importlib.import_module("own_model").Own()
    for prompt, completion in zip(([3, 5], [7]), generated.completions, strict=True):
        row = list(prompt)
        for _ in range(4):
            row.append(int(own.apply({"params": params}, jnp.array([row]))[0, -1].argmax()))
        assert completion.tokens == row[len(prompt) :]
    assert "each token recomputes its row, without a cache" in str(generated)
    assert "each token recomputes its row, without a cache" in str(engine)

    async def ask() -> str:
        async with serving(engine, source) as client:
            return (await client.complete([3, 5], max_tokens=4, temperature=0)).json["choices"][0]["text"]

    assert asyncio.run(ask()) == generated.texts[0]
    code, output = meshpar("generate", "run", "--prompt", "3 5", "--max-tokens", "4", "--ngrams", "2")
    assert code == 2
    assert "ngrams\n    a model of your own decodes one token at a time\n    leave it out" in output


def test_an_imported_model_with_statistics_does_not_generate(meshpar):
    batch_norm = ["model.arguments={batch_norm: true}", "loss=own_model:normed"]
    assert meshpar("train", "config.yaml", *batch_norm, "--json")[0] == 0
    code, output = meshpar("generate", "run", "--prompt", "3 5")
    assert (code, output) == (
        2,
        "meshpar: own_model:Own has state that the forward changes: batch_stats; a model generates from its parameters"
        " alone\n",
    )


def test_batch_statistics_need_a_loss_that_returns_them(meshpar):
    batch_norm = ["model.arguments={batch_norm: true}", "loss=own_model:normed"]
    assert meshpar("train", "config.yaml", *batch_norm, "--json")[0] == 0
    code, output = meshpar("explain", "config.yaml", batch_norm[0])
    assert code == 2
    assert output == (
        "meshpar: own_model:Own has collections that change: batch_stats; "
        "set a loss that returns their new values, loss: package.module:name\n"
    )


def test_an_nnx_model_is_explained_and_inspected(meshpar):
    of_nnx = ["model.target=own_model:OwnNNX", "model.arguments={width: 16}"]
    assert "up.kernel" in meshpar("explain", "config.yaml", *of_nnx)[1]
    assert json.loads(meshpar("inspect", "config.yaml", *of_nnx, "--json")[1])["flops"] > 0


@pytest.mark.filterwarnings("ignore:scatter inputs have:FutureWarning")  # Flax keeps statistics in float32
def test_an_nnx_model_with_keys_statistics_and_axes_of_its_own_is_verified(meshpar):
    code, output = meshpar("verify", "config.yaml", *DROPPING)
    assert (code, output.splitlines()[-1]) == (0, "equal to one device: no difference is above 1e-10")


@pytest.mark.sample(1)
@pytest.mark.parametrize("loss", [[], ["loss=own_model:own"]])
def test_random_keys_are_carried_and_a_resumed_run_has_the_same_losses(meshpar, loss):
    """Both with the default loss, which evaluates without dropout, and with the model's own."""
    _, output = meshpar("train", "config.yaml", *DROPPING, *loss, "run_dir=whole", "num_steps=4", "--json")
    whole = {r["step"]: r["loss"] for r in records(output, "train")}
    assert len(set(whole.values())) == 4
    assert meshpar("train", "config.yaml", *DROPPING, *loss, "--json")[0] == 0
    _, output = meshpar("train", "config.yaml", *DROPPING, *loss, "num_steps=4", "--json")
    assert {r["step"]: r["loss"] for r in records(output, "train")} == {step: whole[step] for step in (3, 4)}


def test_the_models_own_axes_are_mapped_to_those_of_the_mesh(meshpar):
    _, output = meshpar("explain", "config.yaml", *DROPPING)
    assert "fsdp -> fsdp" in output and "tp -> tensor" in output
    code, output = meshpar("explain", "config.yaml", *DROPPING[:2])
    assert (code, "no rule covers tp" in output) == (2, True)


def test_a_dim_that_only_activations_have_must_be_declared(meshpar):
    rules = "rules={preset: [fsdp, megatron], unnamed: [], height: []}"
    assert meshpar("explain", "config.yaml", rules, "model.activation_dims=[height]")[0] == 0
    code, output = meshpar("explain", "config.yaml", rules)
    assert (code, "rules.height\n    no parameter has such a dim\n    if only activations have it" in output) == (
        2,
        True,
    )


def test_a_mean_in_microbatches_is_warned_of(meshpar):
    """Some microbatches have more tokens without a target than others."""
    with pytest.warns(UserWarning, match="the mean of 2 microbatches' means is not the mean of the batch"):
        assert meshpar("inspect", "config.yaml", "loss=own_model:loss", "num_microbatches=2")[0] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["model.arguments={widht: 8, height: 3}"],
            "own_model:Own cannot be called with these arguments:\n"
            "  model.arguments.widht\n    own_model:Own has no such argument\n    did you mean width?\n"
            "  model.arguments.height\n    own_model:Own has no such argument\n    it has width, batch_norm",
        ),
        (
            ["model.target=own_model:OwnNNX"],
            "own_model:OwnNNX cannot be called with these arguments:\n"
            "  model.arguments.width\n    own_model:OwnNNX requires it\n    it has width",
        ),
        (
            ["model.target=own_model:OwnNNX", "model.arguments={width: wide}"],
            "own_model:OwnNNX failed at {file}:{OwnNNX}: TypeError: ",
        ),
        (["model.arguments={width: wide}"], "own_model:Own failed at {file}:{Own}: TypeError: "),
        (["model.axes={tp: tnsor}"], "the model's names of axes are wrong:\n  axes: tp\n    tnsor is not an axis of "),
        (["model.dims={'**.kernal': [embed]}"], "the names of dims do not fit the model:\n  dims['**.kernal']"),
    ],
)
def test_wrong_arguments_of_a_model_are_reported_in_a_few_lines(meshpar, tmp_path, changes, message):
    code, output = meshpar("explain", "config.yaml", *changes)
    lines = {"OwnNNX": 1 + MODULE[: MODULE.index("self.table = nnx")].count("\n")}
    lines["Own"] = 1 + MODULE[: MODULE.index("x = nn.Embed")].count("\n")
    assert code == 2
    assert output.startswith("meshpar: " + message.format(file=tmp_path / "here" / "own_model.py", **lines))
    assert "Traceback" not in output and len(output.splitlines()) < 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["loss=own_model:misspelt"], "own_model:misspelt failed at {file}:{line}: KeyError: 'tokes'\n"),
        (["loss=own_model:keyless"], "own_model:keyless is called with 4 arguments; def keyless(model, params, "),
        (
            [*DROPPING, "loss=own_model:forgets"],
            "the loss gets dropout, norm as carried state, and does not return its ",
        ),
    ],
)
def test_an_error_in_a_loss_is_reported_in_one_line(meshpar, tmp_path, changes, message):
    code, output = meshpar("inspect", "config.yaml", *changes)
    line = 1 + MODULE[: MODULE.index("tokes")].count("\n")
    assert code == 2
    assert output.startswith("meshpar: " + message.format(file=tmp_path / "here" / "own_model.py", line=line))
    assert output.count("\n") == 1


# Who may import what -----------------------------------------------------------------------------------------------


def test_a_config_from_elsewhere_imports_nothing(meshpar, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    code, output = meshpar("explain", "../config.yaml")
    assert code == 2
    assert output == (
        "meshpar: own_model:Own: ../config.yaml may not import it: it is not in the working directory, where "
        "own_model is; if you trust it, run meshpar --import own_model.py\n"
    )
    assert "own_model" not in sys.modules


PAYLOAD = "import pathlib\npathlib.Path('ran').touch()\n"


@pytest.mark.parametrize("target", ["downloads.evil.payload:build", "evil.payload:build", "payload:build"])
@pytest.mark.parametrize("packages", [False, True])
def test_a_config_in_a_subfolder_imports_no_code_from_there(meshpar, tmp_path, target, packages):
    here = tmp_path / "here"
    evil = here / "downloads" / "evil"
    evil.mkdir(parents=True)
    (evil / "payload.py").write_text(PAYLOAD)
    (evil / "config.yaml").write_text(CONFIG.replace("own_model:Own", target))
    if packages:
        (evil / "__init__.py").touch()
        (evil.parent / "__init__.py").touch()
    code, output = meshpar("explain", "downloads/evil/config.yaml")
    assert (code, target in output) == (2, True)
    assert not list(here.rglob("ran"))


def test_control_the_same_code_runs_where_config_and_module_are_in_the_working_directory(meshpar, tmp_path):
    (tmp_path / "here" / "payload.py").write_text(PAYLOAD)
    (tmp_path / "here" / "config.yaml").write_text(CONFIG.replace("own_model:Own", "payload:build"))
    assert "has no build" in meshpar("explain", "config.yaml")[1]
    assert (tmp_path / "here" / "ran").exists()
    sys.modules.pop("payload")


def test_a_link_to_a_config_elsewhere_is_a_config_elsewhere(meshpar, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "here" / "link.yaml").symlink_to("../config.yaml")
    assert meshpar("explain", "link.yaml")[0] == 2


@pytest.mark.parametrize("words", [["--import", "own_model.py", "explain"], ["explain"]])
def test_the_command_line_may_permit_an_import(meshpar, tmp_path, words):
    (tmp_path / "config.yaml").write_text(CONFIG)
    named = [] if len(words) > 1 else ["model.target=own_model:Own"]
    assert meshpar(*words, "../config.yaml", *named)[0] == 0


def test_a_module_elsewhere_must_be_named_on_the_command_line(meshpar, tmp_path):
    (tmp_path / "here" / "own_model.py").rename(tmp_path / "own_model.py")
    code, output = meshpar("explain", "config.yaml")
    assert (code, output.startswith("meshpar: own_model:Own: there is no own_model.py in the working")) == (2, True)
    assert meshpar("--import", "../own_model.py", "explain", "config.yaml")[0] == 0


def test_a_link_out_of_the_working_directory_is_not_followed(meshpar, tmp_path):
    (tmp_path / "here" / "own_model.py").rename(tmp_path / "there.py")
    (tmp_path / "here" / "own_model.py").symlink_to(tmp_path / "there.py")
    assert meshpar("explain", "config.yaml")[0] == 2


def test_a_config_that_was_not_read_from_a_file_imports_nothing():
    with pytest.raises(Exception, match="was not permitted"):
        user_code.load("own_model:Own")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("model.target=own_model:Onw", "own_model:Onw: {here}/own_model.py has no Onw; did you mean Own?"),
        (
            "model.target=own_model:number",
            "own_model:number returns int, not a Linen module, and has no argument rngs for NNX; "
            "name a function that returns a Flax model",
        ),
        ("model.target=decimal:Own", "decimal:Own: there is no decimal.py in the working directory, {here}"),
        ("data.vocab_size=70", "the data has 70 token ids, but own_model:Own has logits for 64"),
    ],
)
def test_an_imported_model_that_does_not_fit_is_refused(meshpar, tmp_path, changed, message):
    assert meshpar("explain", "config.yaml", changed) == (2, f"meshpar: {message.format(here=tmp_path / 'here')}\n")


MANUAL = ["model.manual=true"]
ROWS = ["mesh.fsdp=4", "mesh.tensor=1"]


def test_an_imported_model_with_a_pipeline_or_an_overlap_is_refused(meshpar):
    pipeline = ["parallel.pipeline={kind: 1f1b, num_microbatches: 2}", "parallel.fsdp.overlap=ring"]
    code, output = meshpar("explain", "config.yaml", *MANUAL, *pipeline)
    assert code == 2
    assert (
        "pipeline\n    a loss for local shards is not traced with whole shapes, so it cannot be cut into stages\n"
        in output
    )
    assert "parallel.fsdp.overlap\n    a loss for local shards communicates by itself" in output


OVERLAPPED = [
    "model.target=own_model:Sequence", "model.activation_dims=[residual_seq]",
    "rules={preset: [fsdp, megatron_sp], unnamed: []}",
]  # fmt: skip


@pytest.mark.parametrize("axis", ["tensor", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_an_overlap_of_an_imported_model_sends_chunks(meshpar, axis):
    output = meshpar("inspect", "config.yaml", *OVERLAPPED, f"parallel.{axis}.overlap=ring")[1]
    assert ["collective_permute", axis] in [line.split()[:2] for line in output.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_an_overlap_of_an_imported_model_is_verified(meshpar, axis):
    code, output = meshpar("verify", "config.yaml", *OVERLAPPED, f"parallel.{axis}.overlap=bidirectional")
    assert (code, "equal to one device: no difference is above 1e-10" in output) == (0, True)


def test_an_imported_model_with_a_teacher_is_refused(meshpar):
    code, output = meshpar("explain", "config.yaml", "distill={teacher: teacher}")
    assert code == 2
    assert "distill\n    an imported model computes its loss itself, which has no teacher\n    no distill; or" in output


PIPED = [
    "model.target=own_model:Stacked", "mesh={pipe: 4, data: 2}", "rules={preset: [pipeline], unnamed: []}",
    "parallel.pipeline={kind: 1f1b, num_microbatches: 4}",
]  # fmt: skip


def test_explain_shows_the_stages_of_an_imported_model(meshpar):
    code, output = meshpar("explain", "config.yaml", *PIPED)
    assert code == 0, output
    drawn = output.partition("parallel.pipeline  ")[2].splitlines()[:6]
    per_layer = 16 * 16 + 16
    assert drawn[0] == "4 equal layers, a list, of which every stage stores all"
    flops = [2 * 2 * 8 * 16 * 16, 2 * 2 * 8 * 16 * (16 + 64)]
    assert drawn[1].split() == (
        f"stage 0: what stands before; layer 0, with {per_layer} parameters; {human_flops(flops[0])} "
        "in a forward of a microbatch"
    ).split()  # fmt: skip
    assert drawn[4].endswith(
        f"layer 3, with {per_layer} parameters; what stands after; {human_flops(flops[1])} in a forward of a microbatch"
    )
    assert drawn[5].strip() == "a message of a microbatch is 1.00 KiB on all devices of a stage: f32[2,8,16]"


def test_an_imported_model_trains_in_stages_with_the_parameters_before_the_last_update(meshpar):
    stale = "parallel.pipeline={kind: pipedream_2bw, num_microbatches: 4}"
    code, output = meshpar("train", "config.yaml", *PIPED[:-1], stale, "run_dir=stale", "num_steps=2", "--json")
    assert code == 0, output


@pytest.mark.slow
def test_an_imported_model_trains_in_stages_as_on_one_device(meshpar):
    alone = ["model.target=own_model:Stacked", "mesh={data: 8}", "rules={preset: [replicated], unnamed: []}"]
    losses = []
    for i, keys in enumerate([PIPED, alone]):
        code, output = meshpar("train", "config.yaml", *keys, f"run_dir=run{i}", "--json")
        assert code == 0, output
        losses.append([record["loss"] for kind in ("train", "evaluation") for record in records(output, kind)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_an_imported_model_with_chunks_of_the_loss_is_refused(meshpar):
    code, output = meshpar("explain", "config.yaml", "loss.chunk=8")
    assert code == 2
    reason = "an imported model computes all logits at once, so that its loss has no chunks"
    assert output.endswith(f"loss.chunk\n    {reason}\n    loss.chunk=none\n")


LOCAL = ["model.target=own_model:Local", "model.arguments={width: 16}"]
REGRESSION = ["model.target=own_model:Regression", *ROWS]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [[*REGRESSION, "loss=own_model:squared"], [*ROWS, "rules.zero=1"], [*LOCAL, "num_microbatches=2"]],
    ids=["no decoder", "Linen", "NNX, local shards of mlp"],
)
def test_an_imported_model_for_local_shards_is_equal_to_one_device(meshpar, changes):
    code, output = meshpar("verify", "config.yaml", *MANUAL, *changes)
    last = output.splitlines()[-1]
    assert code == 0
    assert last.startswith("equal to one device") and last.endswith("no difference is above 1e-10")


def test_control_a_loss_that_is_not_written_for_local_shards_is_seen(meshpar):
    code, output = meshpar("verify", "config.yaml", *MANUAL, *REGRESSION, "loss=own_model:centred")
    assert code != 0
    assert "no difference is above" not in output


@pytest.mark.parametrize("lowering", ["manual", "auto"])
def test_the_same_loss_of_whole_rows_is_equal_to_one_device(meshpar, lowering):
    changes = [*REGRESSION, "loss=own_model:centred", f"lowering={lowering}"]
    code, output = meshpar("verify", "config.yaml", *changes)
    assert (code, output.splitlines()[-1]) == (
        0,
        "equal to one device, including random draws: no difference is above 1e-10",
    )


def test_an_imported_model_for_local_shards_trains(meshpar):
    code, output = meshpar("train", "config.yaml", *MANUAL, *REGRESSION, "loss=own_model:squared", "--json")
    assert code == 0
    assert [r["step"] for r in records(output, "train") if r["size"] > 0] == [1, 2]


def test_a_module_that_fails_says_where(meshpar, tmp_path):
    (tmp_path / "here" / "own_model.py").write_text("x = 1\ny = x / 0\n")
    code, output = meshpar("explain", "config.yaml")
    assert code == 2
    where = tmp_path / "here" / "own_model.py"
    assert output == f"meshpar: {where}:2 cannot be imported: ZeroDivisionError: division by zero\n"


def test_a_module_cannot_take_the_name_of_an_installed_one(meshpar, tmp_path):
    (tmp_path / "here" / "decimal.py").write_text(MODULE)
    code, output = meshpar("explain", "config.yaml", "model.target=decimal:Own")
    assert (code, output.endswith("an installed module has the name decimal too; choose another\n")) == (2, True)
