"""Plans: the time of collectives by hand, the search against all layouts, constraints and their errors."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import meshpar
from meshpar.config import to_yaml
from meshpar.cost.live import peak_bytes
from meshpar.cost.traced import Collective
from meshpar.cost.walk import walk
from meshpar.errors import ConfigError, MeshError
from meshpar.experiment.config import Precision, Run
from meshpar.mesh.hardware import Link, Links
from meshpar.mesh.layout import AxisSizes, MeshLayout
from meshpar.planning import search as searching
from meshpar.planning.estimate import Estimate, work_of
from meshpar.planning.machine import StatedMachine
from meshpar.planning.rough import Divided, Ends
from meshpar.planning.space import Layout, layouts

RUN = Run(
    model={
        "kind": "llama",
        "num_layers": 4,
        "hidden_size": 32,
        "num_heads": 4,
        "intermediate_size": 64,
        "pad_vocab_to_multiple": 32,
    },
    data={"kind": "synthetic", "batch_size": 16, "seq_len": 64},
    optim={"kind": "adamw", "lr": 1e-3},
    num_steps=10,
    run_dir="unused",
)
MACHINE = StatedMachine("two hosts", 8, 4, 1e9, 1e9, Links(Link(1e6, 1e-3), Link(1e5, 1e-2)))
MESH = MeshLayout(fsdp=2, tensor=4).abstract()


@pytest.mark.parametrize(
    ("one", "seconds"),
    [
        # Inside a host: ceil(log2(4)) messages, and 3/4 of the buffer.
        (Collective("all_gather", ("tensor",), 4000, 4), 2 * 1e-3 + 3000 / 1e6),
        (Collective("all_reduce", ("tensor",), 4000, 4, Fraction(5)), 5 * (4 * 1e-3 + 6000 / 1e6)),
        (Collective("collective_permute", ("tensor",), 4000, 4), 1e-3 + 4000 / 1e6),
        # Across hosts, one device of each: one link.
        (Collective("reduce_scatter", ("fsdp",), 4000, 2), 1e-2 + 2000 / 1e5),
        # Across hosts, four devices of each: four links at once.
        (Collective("all_gather", ("fsdp", "tensor"), 8000, 8), 3 * 1e-2 + 7000 / 4e5),
        # Of what a device sends to the seven others, four sevenths cross, over its own link.
        (Collective("all_to_all", ("fsdp", "tensor"), 8000, 8), 3 * 1e-2 + 4000 / 1e5),
    ],
)
def test_a_collective_takes_its_messages_and_its_bytes(one, seconds):
    assert MACHINE.collective_s(one, MESH) == pytest.approx(seconds)


def sharded(fn):
    mesh = MeshLayout(data=2).abstract()
    return jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))


def region(fn):
    return jax.make_jaxpr(sharded(fn))


def test_the_peak_counts_what_is_held_at_once():
    x = jnp.ones((16, 8), jnp.float32)  # 256 bytes on each of two devices
    w = jnp.ones((8, 8), jnp.float32)
    assert peak_bytes(region(lambda x: x @ w)(x)) == 256
    assert peak_bytes(region(lambda x: x @ w @ w @ w)(x)) == 512  # a product and its operand
    assert peak_bytes(region(lambda x: jnp.exp(-x) + 1)(x)) == 256  # one fusion
    both = region(lambda x: (lambda y: (y @ w @ w) * y)(x @ w))
    assert peak_bytes(both(x)) == 3 * 256  # y is held beside both products


def test_a_loop_holds_its_results_and_one_turn():
    w = jnp.ones((8, 8), jnp.float32)

    def saved(x):
        end, every = jax.lax.scan(lambda y, _: (y @ w, y), x, None, length=10)
        return end + every.sum(0)

    x = jnp.ones((16, 8), jnp.float32)
    assert 11 * 256 <= peak_bytes(region(saved)(x)) <= 14 * 256


@pytest.mark.parametrize(
    ("fn", "arrays"),
    [
        (lambda y: y.at[0].set(0.0), 1),
        (lambda y: jax.lax.scan(lambda y, _: (y + 1, None), y, None, length=10)[0], 1),
        (lambda y: jax.lax.scan(lambda y, _: (y + 1, None), y, None, length=1)[0], 1),  # no loop
        (lambda y: jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y + 1, y), 1),
        (lambda y: jax.lax.cond(y[0, 0] < 9, lambda y: y + 1, lambda y: y, y), 1),
        # Controls: nothing overwrites what is read later, and products do not overwrite what they read.
        (lambda y: y.at[0].set(0.0) + y, 2),
        (lambda y: jax.lax.scan(lambda y, _: (y + 1, None), y, None, length=10)[0] + y, 2),
        (lambda y: jax.lax.scan(lambda y, _: (y @ y[:8], None), y, None, length=10)[0], 2),
        (lambda y: jax.lax.cond(y[0, 0] < 9, lambda y: y + 1, lambda y: -y, y), 2),
    ],
)
def test_what_is_read_last_is_overwritten(fn, arrays):
    w = jnp.ones((8, 8), jnp.float32)
    peak = peak_bytes(region(lambda x: fn(x @ w))(jnp.ones((16, 8), jnp.float32)))
    assert arrays * 256 <= peak <= arrays * 256 + 40  # beside scalars


def test_a_parameter_that_is_gathered_along_a_later_dim_is_copied():
    """XLA gathers along the first dim in memory, and stores all layers in that order before the loop over them."""

    def gathered(is_later):
        def layer(y, w):
            shard = w.T if is_later else w
            return y + jax.lax.all_gather(shard, "data", tiled=True), None

        return region(lambda w: jax.lax.scan(layer, jnp.tile(w[0], (2, 1)), w)[0])

    w = jnp.ones((8, 8, 8), jnp.float32)  # four layers of 256 bytes on each of two devices
    assert peak_bytes(gathered(True)(w)) - peak_bytes(gathered(False)(w)) == 4 * 256


def changed(is_read_later: bool, x):
    """A loop with a conditional, as a pipeline's: a branch writes to a part of a large array in another loop."""

    def write(large):
        return jax.lax.scan(lambda large, i: (large.at[i].add(1.0), None), large, jnp.arange(9))[0]

    def tick(large, i):
        new = jax.lax.cond(i % 3 == 0, write, lambda large: large, large)
        return (jnp.roll(new, 1, 0) @ large[:8] if is_read_later else new), None

    return x + jax.lax.scan(tick, jnp.broadcast_to(x[0, 0], (400, 8)), jnp.arange(9))[0][0]


@pytest.mark.parametrize(("is_read_later", "arrays"), [(False, 1), (True, 3)])  # the control: the old array is needed
def test_what_a_conditional_changes_is_held_once(is_read_later, arrays):
    x = jnp.ones((16, 8), jnp.float32)
    peak = peak_bytes(region(partial(changed, is_read_later))(x))
    assert arrays * 400 * 8 * 4 <= peak <= (arrays + 0.2) * 400 * 8 * 4


def test_the_results_of_later_loops_are_held_before_them():
    """XLA fills the array in which a loop collects slices before the program's first loop."""
    w = jnp.ones((8, 8), jnp.float32)
    wide = jnp.ones((8, 1000), jnp.float32)

    def busy(y):
        return jax.lax.scan(lambda y, _: (jnp.sin(y @ wide) @ wide.T, None), y, None, length=9)[0]

    def collected(y):
        return jax.lax.scan(lambda y, _: (y @ w, y), y, None, length=10)[1].sum(0)

    x = jnp.ones((16, 8), jnp.float32)
    alone, before, after = (
        peak_bytes(region(fn)(x)) for fn in (busy, lambda y: busy(collected(y)), lambda y: collected(busy(y)))
    )
    assert alone > 8 * 1000 * 4
    assert after - alone == 10 * 256
    assert before - alone <= 256  # the control: these are read before the other loop


@pytest.mark.parametrize(("platform", "has_kernel"), [("gpu", True), ("cpu", False)])
def test_a_step_is_traced_for_the_platform_of_its_machine(platform, has_kernel):
    """Attention is a kernel of cuDNN on GPUs only."""
    changes = {"seq_len": 256, "documents_in_row": "joined"}
    run = RUN.model_copy(
        update={"data": RUN.data.model_copy(update=changes), "precision": Precision(compute="bfloat16")}
    )
    layout = Layout((("data", 8),), remat="none")
    prepared = searching._prepared(run, layout, platform)
    primitives = {visit.primitive for visit in walk(prepared.countable_step)}
    assert ("dot_product_attention_fwd_wrapper" in primitives) == has_kernel


def test_stages_that_do_not_divide_the_layers_are_planned():
    """Seven layers on four stages: the longest stage has as much to compute as with eight layers."""
    flops = {}
    for num_layers in (4, 7, 8):
        run = RUN.model_copy(update={"model": RUN.model.model_copy(update={"num_layers": num_layers})})
        wanted = {"sizes": (("pipe", 4),), "schedule": "1f1b", "num_microbatches": 4, "remat": "none"}
        (layout,) = (one for one in layouts(run, 4, 4) if wanted.items() <= vars(one).items())
        assert layout.applied(run).model.pad_layers_to_multiple == (4 if num_layers == 7 else 1)
        flops[num_layers] = searching.trace(run, layout, MACHINE).work.computes.flops
    assert flops[4] < flops[7] == flops[8]


@cache
def works(num_layouts=16):
    """Layout -> the work of its traced step, for a sample of all layouts of eight devices, with each overlap."""
    every = [layout for layout in layouts(RUN, 8, 8) if layout.remat == "none"]
    few_microbatches = [layout for layout in every if layout.num_microbatches in (1, 4)]
    sample = random.Random(0).sample(few_microbatches, num_layouts) if num_layouts else every
    sample = sample + [replace(layout, overlap="bidirectional") for layout in sample if layout.can_overlap]
    prepared = {layout: searching._prepared(RUN, layout, "gpu") for layout in sample}
    return {layout: work for layout, one in prepared.items() if one and (work := work_of(one))}


@cache
def probes():
    return searching.probe(RUN, list(works()), "gpu")


def counted(work):
    """Bytes that are sent, and the number of collectives."""
    return float(work.sent_bytes), float(sum(one.times for one in [*work.beside, *work.waits]))


def disagreements(probes):
    """The sampled layouts of which the rough estimate sends less or more than the trace, or idles longer or shorter."""
    roughly = {layout: (probes.work(layout), work) for layout, work in works().items() if layout.overlap == "none"}
    return [
        layout
        for layout, (rough, work) in roughly.items()
        if counted(rough) != pytest.approx(counted(work), rel=0.12) or rough.idle != pytest.approx(work.idle)
    ]


@pytest.mark.slow
def test_the_rough_estimate_sends_about_as_much_in_as_many_collectives_as_the_trace():
    assert disagreements(probes()) == []


def without_others():
    """Without the parameters outside of layers, whose gradients stages sum too."""
    return replace(probes(), num_arrays=(probes().num_arrays[0], 0))


def without_activations():
    return replace(probes(), divided=dict.fromkeys(probes().divided, Divided()))


def without_messages():
    return replace(probes(), ends=Ends(probes().ends.flops))


@pytest.mark.slow
@pytest.mark.parametrize("broken", [without_others, without_activations, without_messages])
def test_control_a_rough_estimate_that_lacks_collectives_disagrees(broken):
    assert disagreements(broken())


def test_overlap_sends_about_as_much_beside_products_as_is_estimated_without_a_trace():
    pairs = [(work, works()[replace(one, overlap="none")]) for one, work in works().items() if one.overlap != "none"]
    assert len(pairs) > 1
    for traced, without in pairs:
        estimated = without.overlapping()
        assert float(estimated.sent_bytes) == pytest.approx(float(traced.sent_bytes), rel=0.05)
        waits = [sum(float(one.times * one.sent_bytes) for one in work.waits) for work in (traced, without)]
        assert waits[0] < 0.15 * waits[1], "those of the embedding and of the loss"


def test_stages_are_on_hosts_of_their_own_where_that_is_faster():
    """Gradients are reduced inside a host then, and only the messages of the pipeline are sent across."""
    (layout, work), *_ = (one for one in works().items() if one[0].sizes == (("data", 4), ("pipe", 2)))
    across = searching.placed(layout, work, MACHINE)
    assert across.layout.dcn == (("pipe", 2),)
    assert across.estimate.total_s < work.on(MACHINE).total_s
    assert across.layout.applied(RUN).mesh == MeshLayout(data=4, dcn=AxisSizes(pipe=2))
    alike = replace(MACHINE, links=Links(MACHINE.links.inside, MACHINE.links.inside))
    for ranked in (layout, across.layout):  # in whichever way it was ranked, both are estimated
        assert not searching.placed(ranked, work, alike).layout.dcn


def machines():
    """A hundred machines of eight devices, in hosts of two, four or eight."""
    draw = random.Random(1)
    for _ in range(100):
        inside = Link(10 ** draw.uniform(8, 11), 10 ** draw.uniform(-6, -4))
        across = Link(inside.bytes_per_s / draw.uniform(1, 20), inside.latency_s * draw.uniform(1, 10))
        per_host = draw.choice([2, 4, 8])
        flops = 10 ** draw.uniform(9, 12)
        yield StatedMachine("random", 8, per_host, flops, 1e12, Links(inside, across), overlaps=draw.random() < 0.5)


def chosen_over_best(monkeypatch, every, probes):
    """The time of the layout that the search chooses over that of the best of all, on each machine."""
    monkeypatch.setattr(searching, "probe", lambda run, everything, platform: probes)

    def trace(run, layout, machine, probes):
        work = every.get(replace(layout, dcn=()))
        return work and searching.placed(layout, work, machine)

    monkeypatch.setattr(searching, "trace", trace)
    everything = [layout for layout in every if layout.overlap == "none"]
    ratios = []
    for machine in machines():
        found = searching.search(RUN, machine, 1e12, everything)
        may = [one for one in every.items() if machine.overlaps or one[0].overlap == "none"]
        best = min(searching.placed(*one, machine).estimate.total_s for one in may)
        ratios.append(found.ranked[0].estimate.total_s / best)
    assert len(every) > searching.TRACED, "otherwise every layout is traced"
    return ratios


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_search_finds_the_best_of_all_layouts(monkeypatch, whole):
    """The optimum of its own estimate on 90 of 100 machines, and never worse than 1.05."""
    ratios = chosen_over_best(monkeypatch, works(None) if whole else works(), probes())
    assert sum(ratio < 1.001 for ratio in ratios) >= 90
    assert max(ratios) <= 1.05


def test_control_a_search_by_a_worse_rough_estimate_finds_fewer(monkeypatch):
    ratios = chosen_over_best(monkeypatch, works(), without_activations())
    assert sum(ratio < 1.001 for ratio in ratios) < 90


def without_latency(work, machine):
    links = Links(replace(machine.links.inside, latency_s=0.0), replace(machine.links.across, latency_s=0.0))
    return work.on(replace(machine, links=links))


def without_bubble(work, machine):
    return replace(work, idle=1.0).on(machine)


@pytest.mark.parametrize("blind", [without_latency, without_bubble])
def test_control_an_estimate_that_overlooks_a_term_chooses_worse(blind):
    """The layout that seems the fastest takes more than 1.05 of the fastest on at least ten of 100 machines."""
    ratios = []
    for machine in machines():
        true = {layout: work.on(machine).total_s for layout, work in works().items()}
        seems = {layout: blind(work, machine).total_s for layout, work in works().items()}
        ratios.append(true[min(seems, key=seems.__getitem__)] / min(true.values()))
    assert sum(ratio > 1.05 for ratio in ratios) >= 10


ONE = ["mesh.data=4", "num_microbatches=1", "model.remat=none"]


@pytest.fixture(scope="module")
def planned():
    return meshpar.plan(RUN, "h100:1x4", fix=["num_microbatches=1", "model.remat=none", "mesh.pipe=1"])


def test_the_terms_add_up_and_the_first_is_the_fastest(planned):
    times = [one.estimate.total_s for one in planned.ranked]
    assert times == pytest.approx(sorted(times), rel=1e-2)
    for one in planned.ranked:
        assert sum(one.estimate.terms.values()) == pytest.approx(one.estimate.total_s)
        assert one.layout.size("pipe") == 1


def test_the_config_of_a_plan_is_the_run_in_the_best_layout(planned, tmp_path):
    path = tmp_path / "planned.yaml"
    path.write_text(planned.yaml())
    assert meshpar.load(path) == planned.best
    text = path.read_text()
    assert text.startswith("# Planned for h100:1x4. Estimated from the trace")
    assert f"# The next layout, {planned.ranked[1].layout}, loses by: " in text
    assert planned.best.model_copy(update={"mesh": RUN.mesh, "rules": RUN.rules, "model": RUN.model}) == RUN


def test_the_command_writes_the_config(command, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(to_yaml(RUN))
    words = ["--target", "h100:1x4", *(word for one in ONE for word in ("--fix", one)), "--global-batch", "32"]
    said = command("plan", config, *words, "--write", tmp_path / "planned.yaml")
    assert said.code == 0
    assert "h100:1x4: 4 devices; 1 layouts, 1 of them traced" in said.out
    written = meshpar.load(tmp_path / "planned.yaml")
    assert (written.mesh.data, written.data.batch_size) == (4, 32)
    refused = command("plan", config, "data.batch_size=8", *words)
    assert refused.code == 2
    assert "--global-batch 32: data.batch_size is given, too; keep one of the two" in refused.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fix": ["mesh.tenso=2"]}, "--fix mesh.tenso=2\n    not a key of a layout\n    did you mean mesh.tensor?"),
        ({"fix": ["mesh.data=2", "mesh.data=4"]}, "mesh.data is fixed to 2, too"),
        (
            {"fix": ["mesh.data=3", "mesh.pipe=8"]},  # of several values that no layout has, all
            """h100:1x4: no layout has what is fixed:
  --fix mesh.data=3
    no layout of 4 devices has it: sizes must divide 4 devices and a batch of 16 rows of 64 tokens
    nearest: mesh.data=2 or mesh.data=4
  --fix mesh.pipe=8
    no layout of 4 devices has it: sizes must divide 4 devices and a batch of 16 rows of 64 tokens; stages have \
layers, of which there are 4
    nearest: mesh.pipe=4""",
        ),
        (
            {"fix": ["model.remat=none", "mesh.pipe=1", "parallel.pipeline.kind=1f1b"]},
            "--fix mesh.pipe=1\n    no layout of 4 devices has it with parallel.pipeline.kind=1f1b: sizes must divide",
        ),
        ({"fix": ["model.remat=ful"]}, "did you mean model.remat=full?"),
        ({"fix": ["mesh.expert=2"]}, "nearest: mesh.expert=1"),
        (
            {"fix": ["tensor=2"], "price": "2.5", "at_most": "200GiB", "tokens": -1.0},
            """the plan cannot be made:
  --tokens -1
    costs are those of a positive number of tokens
    as in --tokens 15e12
  --price 2.5
    has no currency
    write that of a device and hour, as in --price '2.5 USD'
  --at-most 200GiB
    a device of h100:1x4 has 74.51 GiB
    give less, or leave it out
  --fix tensor=2
    not a key of a layout
    did you mean mesh.tensor?""",
        ),
        ({"price": "2 USD"}, "--price 2 USD\n    it is of no number of tokens\n    add --tokens"),
        (
            {"fix": ["parallel.tensor.overlap=both"]},
            "--fix parallel.tensor.overlap=both\n    not an overlap\n    none, ring, bidirectional",
        ),
        (
            {"fix": ["mesh.pipe=2", "parallel.tensor.overlap=ring"]},
            "--fix parallel.tensor.overlap=ring\n    no layout of 4 devices has it with mesh.pipe=2\n"
            "    possible: none",
        ),
        ({"at_most": "much"}, "--at-most much\n    'much' is not a number of bytes; valid: 1000, 40MiB"),
        ({"fix": ONE, "at_most": "1KiB"}, "h100:1x4: no layout holds at most 1.00 KiB; the closest holds"),
    ],
)
def test_what_cannot_be_planned_is_an_error(options, message):
    with pytest.raises(ConfigError) as error:
        meshpar.plan(RUN, "h100:1x4", **options)
    assert message in str(error.value)


@pytest.mark.slow
def test_a_layout_that_the_model_cannot_have_is_refused_by_its_dims():
    with pytest.raises(ConfigError, match="none of 1 layouts fits this run") as error:
        meshpar.plan(RUN, "h100:1x8", fix=["mesh.tensor=8", "model.remat=none", "num_microbatches=1"])
    assert "kv_heads = 4 is not divisible by tensor = 8" in str(error.value)
    assert "either mesh.tensor=4, or rules.kv_heads=[]" in str(error.value)


def test_a_machine_whose_links_are_unknown_is_an_error():
    with pytest.raises(MeshError, match="--target tpu7x:2x2x1: the links of TPU7x are not known; those are: TPU v4"):
        meshpar.plan(RUN, "tpu7x:2x2x1")


def test_of_layouts_that_take_the_same_time_the_one_that_holds_less_is_first():
    one = Estimate({"products": 1.0}, beside_s=0.1, states_bytes=20, step_bytes=5)
    less = replace(one, terms={"products": 1.0001}, states_bytes=10)
    faster = replace(one, terms={"products": 0.9}, states_bytes=40)
    assert sorted([one, less, faster], key=lambda estimate: estimate.order) == [faster, less, one]
