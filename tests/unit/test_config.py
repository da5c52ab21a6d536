"""Config files and overrides: merging, kinds, shorthands and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pydantic
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from meshpar.config import Config, build, flatten, load, schema, to_yaml
from meshpar.errors import ConfigError, control_character

pytestmark = pytest.mark.matrix


class Circle(Config):
    kind: Literal["circle"] = "circle"
    radius: float = 1.0
    """From the middle to the edge."""
    border: float | None = None


class Square(Config):
    kind: Literal["square"] = "square"
    side: Annotated[int, pydantic.Field(gt=0)] = 1
    tags: tuple[str, ...] = ()
    border: float | None = None


class Pen(Config):
    shorthand: ClassVar = "colour"
    colour: str = "black"
    width: float = 1.0


class Drawing(Config):
    shape: Annotated[Circle | Square, pydantic.Field(discriminator="kind")]
    pen: Pen = Pen()
    scale: float = 1.0
    copies: int = 1
    title: str | None = None
    filled: bool = False


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "drawing.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


texts = st.text(max_size=8).filter(lambda text: not control_character(text))
CIRCLE = "shape: {kind: circle}\n"
drawings = st.builds(
    Drawing,
    shape=st.builds(Circle, radius=st.floats(allow_nan=False, allow_infinity=False))
    | st.builds(Square, side=st.integers(1, 10**9), tags=st.lists(texts, max_size=3).map(tuple)),
    pen=st.builds(Pen, colour=texts),
    scale=st.floats(allow_nan=False, allow_infinity=False),
    copies=st.integers(-(2**60), 2**60),
    title=st.none() | texts,
    filled=st.booleans(),
)


@given(drawings)
@example(Drawing(shape=Circle(radius=1e-5), pen=Pen(colour="0E0"), title="2026-11-21"))
def test_a_config_comes_back_from_its_yaml(tmp_path_factory, drawing):
    path = tmp_path_factory.mktemp("configs") / "drawing.yaml"
    path.write_text(to_yaml(drawing))
    assert load(Drawing, path) == drawing


@pytest.mark.parametrize("written", ["1e-3", "0.001", "1.0e-3", ".001", "10E-4"])
def test_a_number_is_a_number_however_it_is_written(write, written):
    assert load(Drawing, write(f"{CIRCLE}scale: {written}\n")).scale == 0.001
    assert load(Drawing, write(CIRCLE), [f"scale={written}"]).scale == 0.001


def test_types_are_strict_but_an_integer_is_a_number_and_a_list_a_tuple(write):
    assert load(Drawing, write("shape: {kind: square, tags: [a, b]}\nscale: 2\n")).shape.tags == ("a", "b")
    for wrong in ("copies: '3'", "copies: true", "copies: 1.0", "filled: 1", "filled: 'yes'", "title: 3"):
        with pytest.raises(ConfigError, match="expected"):
            load(Drawing, write(f"{CIRCLE}{wrong}\n"))


def test_a_file_is_merged_over_the_one_that_it_extends(write):
    write("shape: {kind: square, side: 3, tags: [a]}\nscale: 2.0\n", "base.yaml")
    drawing = load(Drawing, write("extends: base.yaml\nshape: {tags: [b]}\n"))
    assert (drawing.shape, drawing.scale) == (Square(side=3, tags=("b",)), 2.0)


SQUARE = "shape: {kind: square, side: 3, border: 2.0}\n"
LOST = """\
    kind circle does not have side, set for kind square
    shape.side=null to drop it, or shape={kind: circle, ...} to start from its defaults"""


def test_another_kind_keeps_shared_keys_and_names_the_others(write):
    write(SQUARE, "base.yaml")
    circle = Circle(border=2.0)
    with pytest.raises(ConfigError) as refused:
        load(Drawing, write("extends: base.yaml\nshape: {kind: circle}\n"))
    assert str(refused.value).endswith(f"drawing.yaml:2)\n{LOST}")
    assert load(Drawing, write("extends: base.yaml\nshape: {kind: circle, side: null}\n")).shape == circle
    with pytest.raises(ConfigError) as refused:
        load(Drawing, write("extends: base.yaml\n"), ["shape.kind=circle"])
    assert str(refused.value).endswith(f"shape.kind (command line)\n{LOST}")
    for overrides in (["shape.kind=circle", "shape.side=null"], ["shape.side=null", "shape.kind=circle"]):
        assert load(Drawing, write(SQUARE), overrides).shape == circle
    overrides = ["shape.radius=2", "shape.side=null", "shape.kind=circle", "shape.border=null"]
    assert load(Drawing, write(SQUARE), overrides).shape == Circle(radius=2.0)


def test_null_drops_no_key_that_no_kind_knows(write):
    with pytest.raises(ConfigError, match="unknown key"):
        load(Drawing, write(SQUARE), ["shape.kind=circle", "shape.side=null", "shape.edge=null"])


def test_an_override_with_a_mapping_replaces_it_and_one_with_a_key_sets_the_key(write):
    path = write(f"{CIRCLE}pen: {{colour: red, width: 2}}\n")
    assert load(Drawing, path, ["pen={width: 3}"]).pen == Pen(width=3.0)
    assert load(Drawing, path, ["pen.width=3"]).pen == Pen(colour="red", width=3.0)
    assert load(Drawing, path, ["pen={width: 3}", "pen.colour=blue"]).pen == Pen(colour="blue", width=3.0)
    assert load(Drawing, write(SQUARE), ["shape={kind: circle}"]).shape == Circle()
    with pytest.raises(ConfigError, match=r"pen\.widht \(command line\)"):
        load(Drawing, write(f"{CIRCLE}pen: {{widht: 2}}\n"), ["pen={widht: 3}"])


def test_a_stored_config_takes_another_kind_with_its_own_defaults():
    kept = Drawing(shape=Square(border=2.0)).model_dump(mode="json")
    assert build(Drawing, kept, "kept", ["shape.kind=circle"]).shape == Circle(border=2.0)
    with pytest.raises(ConfigError, match="does not have side"):
        build(Drawing, Drawing(shape=Square(side=2)).model_dump(mode="json"), "kept", ["shape.kind=circle"])


def test_a_shorthand_is_expanded_before_it_is_merged(write):
    assert load(Drawing, write(f"{CIRCLE}pen: red\n"), ["pen.width=2"]).pen == Pen(colour="red", width=2.0)
    assert load(Drawing, write(f"{CIRCLE}pen: {{width: 2}}\n"), ["pen=red"]).pen == Pen(colour="red", width=2.0)


def test_a_whole_shorthand_replaces_the_lower_mapping(write, monkeypatch):
    monkeypatch.setattr(Pen, "shorthand_is_whole", True)
    assert load(Drawing, write(f"{CIRCLE}pen: {{width: 2}}\n"), ["pen=red"]).pen == Pen(colour="red")
    assert load(Drawing, write(f"{CIRCLE}pen: red\n"), ["pen.width=2"]).pen == Pen(colour="red", width=2.0)


@pytest.mark.parametrize("parent", ["/etc/passwd", "../up.yaml", "a/../../up.yaml", "[a.yaml]"])
def test_extends_stays_within_the_folder(write, parent):
    with pytest.raises(ConfigError, match="not a path inside this file's folder"):
        load(Drawing, write(f"extends: {parent}\n{CIRCLE}"))


def test_files_that_extend_each_other_are_an_error(write):
    write(f"extends: drawing.yaml\n{CIRCLE}", "other.yaml")
    with pytest.raises(ConfigError, match="extends itself"):
        load(Drawing, write("extends: other.yaml\n"))


def test_yaml_makes_no_objects(write):
    with pytest.raises(ConfigError, match="holds only plain data"):
        load(Drawing, write("shape: !!python/object/apply:os.system [ls]\n"))


def test_all_problems_are_reported_at_once_with_file_and_line(write):
    path = write("shape: {kind: circle, radios: 1}\nscale: big\ncopy: 2\n")
    with pytest.raises(ConfigError) as refused:
        load(Drawing, path, ["filled=maybe"])
    assert (
        str(refused.value)
        == f"""\
4 problems in {path}:
  shape.radios ({path}:1)
    unknown key
    did you mean shape.radius?
  scale ({path}:2)
    expected a number, got 'big'
  filled (command line)
    expected true or false, got 'maybe'
  copy ({path}:3)
    unknown key
    did you mean copies?"""
    )


def test_a_missing_key_or_kind_is_named(write):
    with pytest.raises(ConfigError) as refused:
        load(Drawing, write("scale: 1\n"))
    assert "shape\n    required, but missing" in str(refused.value)
    with pytest.raises(ConfigError, match="has no kind\n    kind: circle or square"):
        load(Drawing, write("shape: {radius: 2}\n"))


def test_flatten_gives_dotted_keys():
    flat = flatten(Drawing(shape=Square()))
    assert flat["shape.side"] == 1
    assert set(flat) == {
        "shape.kind", "shape.side", "shape.tags", "shape.border", "pen.colour", "pen.width", "scale", "copies", "title",
        "filled",
    }  # fmt: skip


def test_the_schema_describes_fields_with_the_text_below_them():
    described = schema(Drawing)
    assert described["$defs"]["Circle"]["properties"]["radius"]["description"] == "From the middle to the edge."
    assert "extends" in described["properties"]


def test_the_yaml_is_plain_data():
    circle = yaml.safe_load(to_yaml(Drawing(shape=Circle())))["shape"]
    assert circle == {"kind": "circle", "radius": 1.0, "border": None}
