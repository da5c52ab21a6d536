# make train: the main job, with ARGS="num_steps=50" a shorter one. make test: everything that CI runs, on two cores; a file stays on one, for it shares programs.
PYTHON ?= python3
VENV := .venv
INSTALL := $(VENV)/bin/pip install -q --no-compile
# pip compiles on one core. The files of another Python that some packages hold are no error.
COMPILE := $(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true

.PHONY: train test check matrix reference pictures docs clean

train: $(VENV)/installed
	$(VENV)/bin/meshpar train configs/quickstart.yaml $(ARGS)

test: check
	$(VENV)/bin/pytest -q -n 2 --dist loadfile -m "not slow"

check: $(VENV)/installed-dev
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash scripts/check.sh

# A sample of the tests on each Python, with the oldest and the newest JAX. A Python that is not on the PATH: by its path.
PYTHONS ?= python3.11 python3.13

matrix:
	bash scripts/matrix.sh $(PYTHONS)

reference: $(VENV)/installed
	PYTHONPATH=scripts $(VENV)/bin/python -m reference

# The table of docs/guides/which-layout.md, and the pictures that the README and the site open with.
pictures: $(VENV)/installed
	PYTHONPATH=scripts $(VENV)/bin/python scripts/compare_layouts.py --write

docs: $(VENV)/installed-docs
	$(VENV)/bin/mkdocs build --strict

# The stamps say what is installed: nothing is installed twice, unless pyproject.toml changes.
$(VENV)/installed: $(VENV)/bin/pip pyproject.toml
	$(INSTALL) -e .
	$(COMPILE)
	touch $@

# The tests compare with PyTorch on the CPU. Its own index has it without CUDA, in 0.2 GB instead of 4; where that cannot
# be reached, pip takes what it finds: one that is there already is kept.
TORCH ?= https://download.pytorch.org/whl/cpu

$(VENV)/torch: $(VENV)/bin/pip
	-$(INSTALL) --retries 0 --no-deps --index-url $(TORCH) "torch==2.13.*"
	touch $@

# It requires an Orbax that is older than ours, and imports none.
$(VENV)/jax2onnx: $(VENV)/bin/pip
	$(INSTALL) --no-deps jax2onnx==0.17.1
	touch $@

$(VENV)/installed-dev: $(VENV)/torch $(VENV)/jax2onnx

$(VENV)/installed-%: $(VENV)/bin/pip pyproject.toml
	$(INSTALL) -e ".[$*]"
	$(COMPILE)
	touch $@ $(VENV)/installed

# pip is what a venv gets last: where it is, the venv is whole.
$(VENV)/bin/pip:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { \
	  echo "meshpar needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist site *.egg-info
