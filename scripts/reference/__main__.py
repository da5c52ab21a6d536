"""Writes the generated pages of the reference into `docs/reference`, and the map of the rooms into CONTRIBUTING.md. A
test compares them.

PYTHONPATH=scripts python -m reference
"""

from reference import rooms
from reference.pages import FOLDER, PAGES

for name, text in PAGES.items():
    (FOLDER / name).write_text(text())
rooms.PAGE.write_text(rooms.written(rooms.PAGE.read_text()))
