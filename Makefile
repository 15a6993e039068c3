# make demo          the whole path on synthetic ECGs, on a machine without GPU; ends with a report
# make test          lint, types and all tests that need no system packages
# make lab           a small sweep on a real Slurm of two nodes on this machine, with a pre-emption and a power cut
# make test-cluster  the tests that need a real Slurm (Debian packages, root)
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo lab test test-cluster lint clean
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/ecgmatch demo --to demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two workers with one computing thread each: the machines that this must pass on have two cores.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lab: $(STAMP)
	PATH=$(CURDIR)/$(BIN):$$PATH slurm/lab/with-slurm slurm/lab/show lab-demo

test-cluster: $(STAMP)
	SLURM_LAB_GPUS=2 slurm/lab/with-slurm $(BIN)/python -m pytest -m cluster --timeout=900 tests/cluster

clean:
	rm -rf demo lab-demo runs dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
