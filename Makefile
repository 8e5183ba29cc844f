# `make train` and `make test` do all their own set-up. On a Linux machine without a GPU, choose the CPU build of torch:
#   make train PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two workers, each with ranks of its own; the tests of a file stay together, because they share what they have trained.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: train test test-all attack check format clean

train: $(STAMP)
	$(BIN)/python train.py $(ARGS)

test: $(STAMP)
	$(PYTEST) -m "not full and not attack" $(ARGS)

# Every command on hostile folders of every kind: SECURITY.md. Minutes.
attack: $(STAMP)
	$(BIN)/python -m pytest -m attack tests/trust $(ARGS)

# Everything, with the kernels that `make test` skips because Triton is a gigabyte.
test-all: $(VENV)/.triton
	$(PYTEST) -m "not attack" $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The stamp is the last thing written: an interrupted installation is repeated.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Sidestream needs Python >= 3.11; set PYTHON=..."'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) "torch~=2.13.0"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) --editable ".[dev]"
	touch $(STAMP)

$(VENV)/.triton: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) --editable ".[dev,triton]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache

.PHONY: readme
readme: $(STAMP)
	$(BIN)/python tools/configuration_page.py
	$(BIN)/python tools/render_readme.py $(ARGS)

# Published MoE layers for scripts/bench_layer.py. torchtitan asks for more than its MoE layer imports.
.PHONY: peers
peers: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) --editable ".[dev,peers]"
	$(BIN)/python -m pip install --quiet --no-deps torchtitan==0.3.0 spmd-types==0.2.3 tyro docstring-parser triton

# Kills and stops runs at random moments and counts what becomes of them; in pieces: ARGS="--runs 20 --seed 3 --out chaos/3".
.PHONY: chaos
chaos: $(STAMP)
	$(BIN)/python tools/chaos.py $(ARGS)

# Plants the faults of tests/faults/*.toml one after another, in a copy, and sees that the tests notice. Half an hour;
# in pieces: ARGS="--only routing model".
.PHONY: faults
faults: $(STAMP)
	$(BIN)/python tools/plant_faults.py $(ARGS)
