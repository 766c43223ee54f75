# Everything from a fresh machine: `make test`, `make demo`, `make lint`, ... Each installs .venv first, if missing or stale.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
USED := $(VENV)/.used
INSTALLED := $(VENV)/.installed
TORCH ?= 2.11.0
# What uses other libraries' own functions most.
OLDEST := tests/patching/test_patch.py tests/end_to_end/test_bits.py tests/end_to_end/test_kept.py \
	tests/integrations/test_from_pretrained.py tests/integrations/test_lora.py
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal
# Modules are compiled as they are imported: most never are, and pip would take half of its time for that.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install test test-all test-cpus test-oldest test-torch kernels matrix demo mutants evidence docs lint clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

install: $(INSTALLED) ## Create .venv with the tested versions of everything

test: $(INSTALLED) ## Run every test that is not long, with three of its cases: six minutes; ARGS="-k glue" picks others
	$(PYTEST) $(or $(ARGS),--part first)

test-all: $(INSTALLED) kernels ## Run the rest: long tests, all other cases, and the kernels
	$(PYTEST) --part rest --durations=30 $(ARGS)

test-cpus: $(INSTALLED) ## Run what compares bits as on processors that can do less, and with 1, 2 and 4 threads
	$(BIN)/python scripts/test_cpus.py $(ARGS)

test-oldest: ## Run a part of the tests with the oldest versions, in an environment of its own, .venv-oldest
	test -x .venv-oldest/bin/pip || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --disable-pip-version-check -c constraints-oldest.txt torch
	.venv-oldest/bin/python -m pip install --disable-pip-version-check -c constraints-oldest.txt -e . pytest
	.venv-oldest/bin/python -m pytest --one-case $(OLDEST) $(ARGS)

test-torch: ## Run what PyTorch's version decides with TORCH=2.11.0, in an environment of its own, .venv-torch
	$(PYTHON) scripts/test_torch.py $(TORCH) $(ARGS)

kernels: $(INSTALLED) ## Run the tests of the vendored Triton kernels, and of ops fused by them, in Triton's interpreter
	cd hf_memsave/_vendor/memsave_kernels && TRITON_INTERPRET=1 "$(CURDIR)/$(BIN)/python" -m pytest -m "not long" -n logical --maxprocesses 8
	TRITON_INTERPRET=1 $(PYTEST) -m "not matrix" -k "not on_a_gpu" tests/ops/fused tests/integrations/test_beside_kernels.py

matrix: $(INSTALLED) ## Run what `make test-all` leaves out: more combinations of settings and budgets
	$(PYTEST) -m matrix $(ARGS)

demo: $(USED) ## Fine-tune two small models, stock and patched: with the install of what that needs two minutes
	$(BIN)/memsave demo $(ARGS)

mutants: $(INSTALLED) ## Plant the faults of tests/mutants.yaml, one at a time: each must make a test fail
	$(BIN)/python tests/mutants.py --jobs 2 --out scripts/results/mutants.md $(ARGS)

evidence: $(INSTALLED) ## Make every table that needs no GPU again, and compare; ARGS="--data-root DIR", "--only NAME"
	$(BIN)/python scripts/evidence.py $(ARGS)

docs: $(INSTALLED) ## Render README and docs/ as a site, build/site
	$(BIN)/mkdocs build

lint: $(INSTALLED) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check hf_memsave tests scripts
	$(BIN)/mypy

clean: ## Remove .venv and caches
	rm -rf $(VENV) .venv-oldest .venv-torch build *.egg-info .pytest_cache .ruff_cache .mypy_cache

# Torch comes first and alone: the build it picks (CPU or CUDA) decides what the rest resolves to.
$(USED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is Python %d.%d, but constraints.txt pins versions for Python 3.11 or newer. Set PYTHON=, as in: make PYTHON=python3.11" % sys.version_info[:2])'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e '.[plot]'
	@touch $@

# DeepSpeed's build wants to see torch, and wheel.
$(INSTALLED): $(USED)
	$(PIP_INSTALL) wheel
	$(if $(filter Linux,$(shell uname -s)),$(PIP_INSTALL) --no-build-isolation deepspeed)
	$(PIP_INSTALL) -e '.[test]'
	@touch $@
