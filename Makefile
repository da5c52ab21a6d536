# make train: the main job. make test: everything that CI runs.
PYTHON ?= python3
VENV := .venv

.PHONY: train test check docs clean

train: $(VENV)/installed
	$(VENV)/bin/meshpar train configs/quickstart.yaml

test: $(VENV)/installed-dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash scripts/check.sh
	$(VENV)/bin/pytest -q -m "not slow"

check: $(VENV)/installed-dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash scripts/check.sh

docs: $(VENV)/installed-dev
	$(VENV)/bin/pip install -q -e ".[docs]"
	$(VENV)/bin/mkdocs build --strict

$(VENV)/bin/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { \
	  echo "meshpar needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(VENV)/bin/pip install -q -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/bin/python pyproject.toml
	$(VENV)/bin/pip install -q -e ".[dev]"
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist site *.egg-info
