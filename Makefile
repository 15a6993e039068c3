PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := cpu,formats,onnx,parquet,web,hub

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-cluster test-lowest fuzz soak coverage screenshots lab lint clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV), once: a few minutes, two gigabytes."
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS),dev]'
	@touch $@

# The kernel for GPUs is tested in Triton's interpreter. Torch's builds for GPUs bring their own version; some systems have none.
KERNELS := $(VENV)/.kernels
$(KERNELS): $(STAMP)
	@$(BIN)/python -c 'import triton' 2> /dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check triton==3.9.0 \
	  || echo "Triton cannot be installed here: the tests of its kernel are skipped."
	@touch $@

demo: $(STAMP) ## the whole path on synthetic ECGs, without a GPU; ends with a report (5 minutes)
	$(BIN)/ecgmatch demo --to demo

lint: $(STAMP) ## ruff and mypy --strict (1 minute)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two workers with one computing thread each: the machines that this must pass on have two cores.
test: lint $(KERNELS) ## lint, types and all tests that need no system packages (10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(KERNELS) ## the tests that take longest: kills, faults, every method on four ranks, the commands of README and docs (11 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --timeout=600 -m slow

test-cluster: $(STAMP) ## the tests that need a real Slurm (Debian packages, root; 15 minutes)
	SLURM_LAB_GPUS=2 slurm/lab/with-slurm $(BIN)/python -m pytest -m cluster --timeout=900 tests/cluster

FUZZ ?= 4000
fuzz: $(STAMP) ## FUZZ mutations of each of 30 formats: no traceback, no hang, no memory (an hour; docs/reliability.md)
	FUZZ=$(FUZZ) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --timeout=0 tests/fuzz tests/data/test_index.py

KILLS ?= 1000
soak: $(STAMP) ## KILLS kills of runs of two ranks, each compared with one that nobody touched (hours; again: goes on)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.cluster.soak $(KILLS) soak

ROOMS ?= tests
coverage: $(STAMP) ## lines that the tests of ROOMS run, also in their subprocesses
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -p no:cacheprovider $(ROOMS)
	$(BIN)/python -m coverage combine --quiet --append
	$(BIN)/python -m coverage report --skip-covered --sort cover

# What the lowest versions of pyproject.toml must run: every format, table, page and a training.
LOWEST_TESTS := tests/test_config.py tests/test_metrics.py tests/test_cli.py tests/data/test_splits.py tests/data/test_formats.py \
  tests/data/test_label_files.py tests/files tests/predict/test_command.py tests/export tests/report/test_tables.py tests/test_train.py
test-lowest: ## the lowest versions that pyproject.toml allows, in an environment of their own (.venv-lowest)
	@test -x .venv-lowest/bin/pip || $(PYTHON) -m venv .venv-lowest
	$(PYTHON) tools/lowest.py $(EXTRAS) > .venv-lowest/lowest.txt
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-lowest/lowest.txt --editable '.[$(EXTRAS),dev]'
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -m 'not cluster and not gpu' $(LOWEST_TESTS)

SCREENSHOTS ?= screenshots
screenshots: demo ## the terminal, the report and the pages as pictures, as a desktop and as a phone (Chromium)
	$(BIN)/python -m tools.screenshots demo $(SCREENSHOTS)

lab: $(STAMP) ## a small sweep on a real Slurm of two nodes on this machine, with a pre-emption and a power cut
	PATH=$(CURDIR)/$(BIN):$$PATH slurm/lab/with-slurm slurm/lab/show lab-demo

clean: ## remove what demo, lab and tests left
	rm -rf demo screenshots lab-demo soak runs dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.*
