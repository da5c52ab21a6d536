"""The verbs from the command line to the files they write, on eight devices in this process."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.metadata import version
from xml.etree import ElementTree

import numpy as np
import pytest

from meshpar.inspection.program.hlo import collectives_of
from meshpar.inspection.report.page import page
from meshpar.inspection.report.picture import Picture
from meshpar.mesh.layout import MeshLayout
from meshpar.sharding.resolve import Placement, resolve
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.tree import human_bytes
from tests.command import CONFIG as TWO_STEPS

CONFIG = TWO_STEPS + "log_every: 1\nrun_dir: run\n"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def meshpar(command, monkeypatch, tmp_path):
    """Runs a verb on CONFIG, and returns its output."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)

    def call(verb: str, *arguments: str) -> str:
        result = command(verb, "config.yaml", *arguments)
        assert result.code == 0
        return result.out

    return call


def train_steps(out: str) -> list[int]:
    return [r["step"] for r in map(json.loads, out.splitlines()) if r["kind"] == "train"]


def test_train_writes_its_program_and_a_trace_and_resumes(meshpar, tmp_path):
    assert train_steps(meshpar("train", "--json", "--dump-hlo", "step.txt")) == [1, 2]
    found = collectives_of((tmp_path / "step.txt").read_text(), MeshLayout(data=2, fsdp=2, tensor=2).build())
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= {c.kind for c in found}

    assert train_steps(meshpar("train", "num_steps=4", "--json", "--profile", "trace")) == [3, 4]
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


def test_inspect_trains_nothing_and_its_json_has_the_same_total(meshpar, tmp_path):
    plain = json.loads(meshpar("inspect", "--json"))
    total = f"sends {human_bytes(plain['sent_bytes'])}"
    assert total in meshpar("inspect").splitlines()
    assert plain["mesh"]["tensor"] == 2
    assert not (tmp_path / "run").exists()


def test_inspect_writes_the_page_of_its_json(meshpar, tmp_path):
    plain = json.loads(meshpar("inspect", "--json", "--html", "step.html"))
    written = (tmp_path / "step.html").read_text(encoding="utf-8")
    body, _, foot = written.partition("<footer")
    assert body.split() == page(plain).partition("</main>")[0].split()
    for told in (
        f"inspect config.yaml --json --html step.html - meshpar {version('meshpar')}",
        f"{datetime.now(UTC):%Y-%m}",
        "num_layers: ",
    ):
        assert told in foot


def test_inspect_compares_a_config_with_a_saved_inspection(meshpar, tmp_path):
    (tmp_path / "kept.json").write_text(meshpar("inspect", "--json"))
    assert meshpar("inspect", "--diff", "kept.json") == "no difference\n"
    difference = json.loads(meshpar("inspect", "model.num_layers=4", "--json", "--diff", "kept.json"))
    gather = next(
        collective
        for collective in difference["collectives"]
        if collective["what"] == ["state.params.blocks.mlp.up.kernel"]
    )
    assert (gather["change"], gather["times"]) == ("less often", {"before": 8, "after": 4})
    fsdp = difference["sent_bytes_per_axis"]["fsdp"]
    assert fsdp["before"] > fsdp["after"]
    assert difference["flops"]["before"] > difference["flops"]["after"]


def test_inspect_compares_configs_on_meshes_of_different_sizes(meshpar):
    lines = meshpar("inspect", "mesh.data=1", "--diff", "config.yaml").splitlines()
    assert "mesh: fsdp=2, tensor=2 -> data=2, fsdp=2, tensor=2" in lines
    news = [line for line in lines if line.startswith("  new")]
    assert any("all_reduce  data " in line and "0x -> 1x" in line and "state.params." in line for line in news)
    back = meshpar("inspect", "--diff", "config.yaml", "mesh.data=1").splitlines()
    assert "mesh: data=2, fsdp=2, tensor=2 -> fsdp=2, tensor=2" in back


def test_explain_draws_each_array_that_matches(meshpar, tmp_path):
    meshpar("explain", "blocks.attn.*.kernel", "--svg", "arrays.svg")
    drawn = ElementTree.parse(tmp_path / "arrays.svg").getroot()
    titles = [text.text for text in drawn.iter(f"{SVG}text") if text.get("font-weight") == "bold"]
    assert [title.split()[0] for title in titles] == [f"blocks.attn.{name}.kernel" for name in ("k", "o", "q", "v")]
    assert len(list(drawn.iter(f"{SVG}rect"))) == 4 * 4 + 1  # fsdp x tensor, for each, and the paper


def test_a_cell_of_the_picture_names_the_devices_that_jax_puts_there():
    mesh = MeshLayout(data=2, fsdp=2, tensor=2).build()
    spec = ArraySpec((4, 4), np.dtype("float32"), ("embed", "mlp"))
    placement: Placement = resolve({"w": spec}, AxisRules(preset=("fsdp", "megatron")), mesh)["w"]
    numbers = {device: i for i, device in enumerate(mesh.devices.flat)}
    for device, (rows, columns) in placement.sharding.devices_indices_map((4, 4)).items():
        assert numbers[device] in Picture("w", placement).cells[rows.start // 2, columns.start // 2]


def test_an_axis_that_the_mesh_does_not_have_is_reported_by_every_check(command):
    """With no preset, the config's own checks ask for the axes of each dim before the rules are checked."""
    result = command("explain", "configs/quickstart.yaml", "rules={preset: [], embed: [gpipe]}")
    assert result.code == 2
    assert "rules.embed\n    the mesh has no axis 'gpipe'" in result.err
