"""The time of products, passes and machines by hand; machine files, prices and large spaces."""

from __future__ import annotations

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import meshpar
from meshpar.cost.flops import ProductSizes, traced_products
from meshpar.cost.passes import passes
from meshpar.cost.touched import Touch
from meshpar.cost.walk import walk
from meshpar.errors import ConfigError, Problems
from meshpar.mesh import targets
from meshpar.mesh.hardware import CHIPS
from meshpar.planning import calibrate_chip, machine_file, promising, published
from meshpar.planning import search as searching
from meshpar.planning.machine import LAUNCH_S, MEMORY, StatedMachine, filled
from meshpar.planning.rough import Probes
from meshpar.planning.worth import Price
from tests.unit.test_planning import RUN

H100 = next(chip for chip in CHIPS if chip.name == "H100 SXM")
MACHINE = StatedMachine.of(targets.parse("h100:1x1"))


def product(rows, columns, terms, batch=1, width=2):
    num_bytes = width * batch * (rows * terms + terms * columns + rows * columns)
    return ProductSizes(
        "dot_general", 2 * batch * rows * columns * terms, batch, rows, columns, terms, width, num_bytes
    )


def test_tiles_and_waves_quantize_a_product():
    """132 tiles of 256 x 128 are one wave, and another tile is a wave of its own: cuBLAS's guide, figure 4."""
    endless = 10**6  # no prologue
    assert filled(product(256 * 132, 128, endless), H100) == pytest.approx(1.0, abs=1e-3)
    assert filled(product(256 * 133, 128, endless), H100) == pytest.approx(133 / 140, abs=0.01), "in parts of sums"
    assert filled(product(256 * 132, 65, endless), H100) == pytest.approx(65 / 128, abs=1e-3)
    assert filled(product(256 * 132, 128, 64), H100) == pytest.approx(0.5, abs=1e-3), "as short as the prologue"
    assert filled(product(8192, 8192, 8192), H100) > 0.95


def test_a_product_takes_its_rate_or_its_bytes():
    large = product(16384, 16384, 16384)
    seconds = MACHINE.product_s(large)
    assert large.num_flops / seconds == pytest.approx(0.7 * H100.flops, rel=0.03)
    eight = MACHINE.product_s(product(16384, 16384, 16384, width=1))
    assert seconds / eight == pytest.approx(2.0, rel=0.01), "8 bits are twice as fast"
    assert MACHINE.product_s(product(16384, 16384, 16384, width=4)) / seconds == pytest.approx(2.0, rel=0.01), "TF32"
    thin = product(8, 16384, 16384)
    assert MACHINE.product_s(thin) - LAUNCH_S == pytest.approx(thin.num_bytes / (MEMORY * H100.memory_bytes_per_s))


@pytest.mark.parametrize(
    ("equation", "shapes", "sizes"),
    [
        ("bsk,kn->bsn", [(2, 3, 5), (5, 7)], (1, 6, 7, 5)),
        ("bhqd,bhkd->bhqk", [(2, 4, 8, 16), (2, 4, 9, 16)], (8, 8, 9, 16)),
    ],
)
def test_the_sizes_of_a_product_are_those_of_its_equation(equation, shapes, sizes):
    program = jax.make_jaxpr(partial(jnp.einsum, equation))(*(jnp.ones(shape, jnp.bfloat16) for shape in shapes))
    (one,) = traced_products(program)
    assert sorted((one.sizes.rows, one.sizes.columns)) == sorted(sizes[1:3])
    assert (one.sizes.batch, one.sizes.terms, one.sizes.width) == (sizes[0], sizes[3], 2)


def moved(fn, *arrays):
    found = passes(jax.make_jaxpr(fn)(*arrays))
    return sum(one.num_bytes * times for one, times in found.items())


def test_a_pass_reads_and_writes_what_it_must():
    x = jnp.ones((64, 128), jnp.float32)
    size = x.nbytes
    assert moved(lambda x: jnp.exp(x) * 2 + 1, x) == 2 * size
    assert moved(lambda x, y: x * y + x / y, x, x) == 3 * size, "each array once, whoever reads it"
    rows = moved(lambda x: x / x.sum(1, keepdims=True), x)
    assert rows == 2 * size, "a row's sum is of the pass that reads the row"
    columns = moved(lambda x: x / x.sum(0, keepdims=True), x)
    assert 3 * size <= columns <= 3 * size + 4 * 128 * 4, "a column's is not: two passes read x"
    assert moved(lambda x: jnp.tanh(x) @ x.T, x) == 2 * size, "a product reads an array"
    twice = moved(lambda x, y: jnp.tanh(x) @ y + jnp.tanh(x).T @ y, jnp.ones((128, 128)), jnp.ones((128, 128)))
    other = moved(lambda x, y: jnp.tanh(x) @ y + jnp.sin(x).T @ y, jnp.ones((128, 128)), jnp.ones((128, 128)))
    assert other - twice == 128 * 128 * 4, "equal operations are one, whose result is written once"
    assert moved(lambda x: jnp.transpose(x).reshape(-1)[::-1].reshape(128, 64) @ x, x) == 0, "views"
    looped = moved(lambda x: jax.lax.scan(lambda y, _: (jnp.sin(y) @ y.T @ y, None), x, None, length=5)[0], x)
    assert looped == 5 * 2 * size


FILE = "chip: h100\ndevices_per_host: 8\nhosts: 2\n"


def written(tmp_path, text):
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    return path


def test_a_machine_file_changes_figures_of_its_data_sheet(tmp_path):
    more = "across: {bandwidth: 200 Gb/s, latency: 20 us}\nproducts: 600 TFLOP/s\n"
    more += "memory: 96 GB\nmemory_bandwidth: 2160 GB/s\n"
    machine = machine_file.read(written(tmp_path, FILE + more))
    assert (machine.num_devices, machine.per_host, machine.flops, machine.memory_bytes) == (16, 8, 6e14, 96e9)
    assert machine.links.across.bytes_per_s == 25e9
    assert machine.links.across.latency_s == pytest.approx(20e-6)
    assert machine.links.inside.bytes_per_s == 450e9
    assert machine.touch_s(Touch(2_160_000_000)) == pytest.approx(1e-3, rel=0.01)
    found = meshpar.plan(RUN, str(tmp_path / "machine.yaml"), fix=["mesh.data=16", "model.remat=none"])
    assert found.machine.text == "h100:2x8"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            "across: {bandwidth: 400}\nlaunch: 3\n",
            [
                "across.bandwidth\n    '400' has no unit\n    write it as in bandwidth: 400 Gb/s",
                "launch\n    '3' has no unit",
            ],
        ),
        (
            "across: {bandwidth: 0 GB/s, latency: 0 us}\n",
            [
                "across.bandwidth\n    '0 GB/s': nothing is ever done at 0",
                "across.latency\n    '0 us': nothing takes no time",
            ],
        ),
        (
            "products: 600 GB/s\n",
            ["products\n    '600 GB/s' is not such an amount\n    write it as in products: 650 TFLOP/s"],
        ),
    ],
)
def test_a_bad_machine_file_is_refused_with_every_fix(tmp_path, text, messages):
    with pytest.raises(ConfigError) as error:
        machine_file.read(written(tmp_path, FILE + text))
    for message in messages:
        assert message in str(error.value)


def test_a_machine_file_of_an_unknown_chip_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="no chip is called 'h10'\n    did you mean h100") as error:
        machine_file.read(written(tmp_path, FILE.replace("h100", "h10") + "products: 600\n"))
    assert "'600' has no unit" in str(error.value)


def test_a_machine_file_without_its_chip_is_no_calibration(tmp_path):
    with pytest.raises(ConfigError, match="  chip\n    required, but missing"):
        meshpar.plan(RUN, str(written(tmp_path, FILE.replace("chip: h100\n", ""))))


def test_a_calibration_of_a_chip_is_read_as_a_machine(tmp_path):
    """On a CPU, with tiny sizes: only its form is tested."""
    found = calibrate_chip.calibrate_chip(
        ((64, 64, 64),), copied=(2**12,), sent=(2**10, 2**14), num_rounds=1, chip=H100
    )
    machine = machine_file.read(written(tmp_path, found.yaml()))
    assert machine.num_devices == jax.device_count()
    assert machine.flops > 0
    assert machine.launch_s > 0


def test_a_price_has_a_currency():
    problems = Problems()
    assert Price.parse("2.50 usd", problems) == Price(2.5, "USD") and not len(problems)
    assert Price.parse("2.5", problems) is Price.parse("much", problems) is None
    no_currency, no_price = problems.found
    assert no_currency.what == "has no currency" and no_currency.fix.endswith("--price '2.5 USD'")
    assert no_price.what == "is not a price"


def test_a_plan_says_what_it_costs_and_what_would_help():
    fix = ["mesh.data=4", "num_microbatches=1", "model.remat=none"]
    planned = meshpar.plan(RUN, "h100:1x4", fix=fix, tokens=1e9, price="2 USD")
    hours = 1e9 / (16 * 64) * planned.ranked[0].estimate.total_s * 4 / 3600
    assert f"{hours:,.0f} device-hours, {2 * hours:,.0f} USD" in str(planned)
    took = [took for source in published.read().sources if source.chip.startswith("h100") for took in source.took]
    assert f"published steps on h100s took {min(took):.2f} to {max(took):.2f} times such an estimate" in str(planned)
    assert planned.as_json()["costs"][0].endswith("tokens a second and device")


@pytest.mark.slow
def test_a_narrowed_space_keeps_the_choice(monkeypatch):
    """Of two hosts: the choice among the layouts of a few meshes is that among all."""
    fix = ["model.remat=none", "mesh.context=1"]
    whole = meshpar.plan(RUN, "h100:2x4", fix=fix)
    monkeypatch.setattr(promising, "MANY", 10)
    monkeypatch.setattr(promising, "MESHES", 6)
    narrow = meshpar.plan(RUN, "h100:2x4", fix=fix)
    assert len(narrow.found.rough) < len(whole.found.rough)
    assert narrow.ranked[0].estimate.total_s <= 1.01 * whole.ranked[0].estimate.total_s


@pytest.mark.slow
def test_the_cost_of_a_plan_does_not_grow_with_layers_or_devices(monkeypatch):
    """It traces as many equations, and estimates as many layouts of a machine whose space is narrowed."""
    monkeypatch.setattr(promising, "MANY", 100)
    monkeypatch.setattr(promising, "MESHES", 10)

    def cost(num_layers, target, rows):
        counts = Counter()
        estimate, prepare = Probes.work, searching.prepare

        def prepared(run, mesh):
            counts["traces"] += 1
            made = prepare(run, mesh)
            counts["equations"] += sum(1 for _ in walk(made.countable_step))
            return made

        def work(probes, layout):
            counts["estimates"] += 1
            return estimate(probes, layout)

        with monkeypatch.context() as patched:
            patched.setattr(searching, "prepare", prepared)
            patched.setattr(Probes, "work", work)
            model = RUN.model.model_copy(update={"num_layers": num_layers})
            run = RUN.model_copy(update={"model": model, "data": RUN.data.model_copy(update={"batch_size": rows})})
            meshpar.plan(run, target, fix=["model.remat=none", "mesh.context=1"])
        return counts

    small, deep, large = cost(4, "h100:2x8", 64), cost(32, "h100:2x8", 64), cost(4, "h100:128x8", 4096)
    for more in (deep, large):
        assert all(more[what] < 1.5 * small[what] for what in small), (small, deep, large)
    monkeypatch.setattr(promising, "MANY", 10**6)
    whole = cost(4, "h100:128x8", 4096)
    assert whole["estimates"] > 3 * large["estimates"], "the control: a space that is not narrowed"
