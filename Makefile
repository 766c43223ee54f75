# Everything from a fresh machine: `make test`, `make demo`, `make lint`, ... Each installs .venv first, if missing or stale.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TORCH ?= 2.11.0
# What uses other libraries' own functions most.
OLDEST := tests/patching/test_patch.py tests/end_to_end/test_bits.py tests/end_to_end/test_kept.py \
	tests/integrations/test_from_pretrained.py tests/integrations/test_lora.py
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install test test-oldest test-torch kernels matrix quick demo mutants evidence docs lint clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

install: $(INSTALLED) ## Create .venv with the tested versions of everything

test: $(INSTALLED) ## Run the tests; ARGS="-k glue" picks some
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal $(ARGS)
	$(if $(ARGS),,$(MAKE) kernels)

test-oldest: ## Run a part of the tests with the oldest versions, in an environment of its own, .venv-oldest
	test -x .venv-oldest/bin/pip || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --disable-pip-version-check -c constraints-oldest.txt torch
	.venv-oldest/bin/python -m pip install --disable-pip-version-check -c constraints-oldest.txt -e . pytest
	.venv-oldest/bin/python -m pytest --one-case $(OLDEST) $(ARGS)

test-torch: ## Run what PyTorch's version decides with TORCH=2.11.0, in an environment of its own, .venv-torch
	$(PYTHON) scripts/test_torch.py $(TORCH) $(ARGS)

kernels: $(INSTALLED) ## Run the tests of the vendored Triton kernels, and of ops fused by them, in Triton's interpreter
	cd hf_memsave/_vendor/memsave_kernels && TRITON_INTERPRET=1 "$(CURDIR)/$(BIN)/python" -m pytest -m "not long" -n logical --maxprocesses 8
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n logical --maxprocesses 8 -k "not on_a_gpu" tests/ops/fused

matrix: $(INSTALLED) ## Run what `make test` leaves out: more combinations of settings and budgets
	$(BIN)/python -m pytest -n logical --maxprocesses 8 -m matrix $(ARGS)

quick: $(INSTALLED) ## Run one case of two tests of every file, none of the long ones: with the install four minutes
	$(BIN)/python -m pytest -m "not long and not matrix" --one-case --of-a-file 2 -n logical --maxprocesses 8 --dist worksteal $(ARGS)

demo: $(INSTALLED) ## Fine-tune two small models, stock and patched, with the install three minutes
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

# Torch comes first and alone: the build it picks (CPU or CUDA) decides what the rest resolves to. DeepSpeed's build wants
# to see it, and wheel.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is Python %d.%d, but constraints.txt pins versions for Python 3.11 or newer. Set PYTHON=, as in: make PYTHON=python3.11" % sys.version_info[:2])'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch wheel
	$(if $(filter Linux,$(shell uname -s)),$(PIP_INSTALL) --no-build-isolation deepspeed)
	$(PIP_INSTALL) -e '.[test]'
	@touch $@
