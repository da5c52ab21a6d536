"""Typed, frozen config models, YAML and `key=value` overrides; knows no component.

A config file is data: a mapping, with at most one `extends: other.yaml` beside its keys. All that is wrong in it,
or on the command line, is reported at once, by dotted path and by file and line.
"""

from meshpar.config.files import read_text
from meshpar.config.flat import changed, flatten, flatten_json
from meshpar.config.json_schema import schema
from meshpar.config.loading import build, load
from meshpar.config.model import Config, Count, Positive, Seed, Target
from meshpar.config.yaml_text import to_yaml

__all__ = [
    "Config", "Count", "Positive", "Seed", "Target", "build", "changed", "flatten", "flatten_json", "load", "read_text",
    "schema", "to_yaml",
]  # fmt: skip
