"""Writes the generated pages of the reference into `docs/reference`. A test compares them.

PYTHONPATH=scripts python -m reference
"""

from reference.pages import FOLDER, PAGES

for name, text in PAGES.items():
    (FOLDER / name).write_text(text())
