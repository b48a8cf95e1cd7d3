# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project

PYTHON ?= python3.11
VENV ?= .venv
PYTEST_ARGS ?=
BENCH ?= build/bench

# vLLM takes seconds to import; without its compiled bytecode on disk, many.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env demo test slow bench lint types docs ledger wheel clean

help: ## Show the targets.
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1	\2/p' $(MAKEFILE_LIST) | expand -t 10

env: ## Build the CPU environment in .venv.
	@$(PYTHON) tools/cpu_env.py $(VENV) --extra test --extra dev --extra docs

demo: env ## Load a checkpoint, stock beside overlay, and serve one over HTTP.
	@$(VENV)/bin/python tools/demo_kda_load.py
	@$(VENV)/bin/python tools/demo_serve.py

test: env ## Run the tests that take no more than seconds each.
	@$(VENV)/bin/python -m pytest -m "not slow and not network" $(PYTEST_ARGS)

slow: env ## Run the others: engines, servers, full sizes, downloads.
	@$(VENV)/bin/python -m pytest -m "slow or network" $(PYTEST_ARGS)

bench: env ## Run the CPU benchmarks: tables, JSON and plots in build/bench.
	@$(PYTHON) tools/cpu_env.py $(VENV) --extra test --extra dev --extra docs --extra plot
	@$(VENV)/bin/python benchmarks/convert.py --threads 1 --json $(BENCH)/convert-cpu.json
	@$(VENV)/bin/python benchmarks/convert.py --threads 1 --experts 2 \
		--shapes tp1 tp2 tp4 tp8 tp16 tp32 ep8 --json $(BENCH)/convert-sizes.json
	@$(VENV)/bin/python benchmarks/offline_convert.py --json $(BENCH)/offline-convert.json
	@$(VENV)/bin/python benchmarks/load.py --json $(BENCH)/load.json
	@$(VENV)/bin/python benchmarks/load.py --headers --json $(BENCH)/load-headers.json
	@$(VENV)/bin/python benchmarks/kda_cpu.py --json $(BENCH)/kda-cpu.json
	@$(VENV)/bin/python benchmarks/serve_cpu.py --json $(BENCH)/serve-cpu.json
	@$(VENV)/bin/python benchmarks/plot.py $(BENCH) $(BENCH)

lint: env ## Check style, format and the directions of imports.
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/python tools/lint_imports.py

types: env ## Check types.
	@$(VENV)/bin/mypy

docs: env ## Build the docs site in build/site.
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet

ledger: env ## Write docs/ledger.md anew.
	@$(VENV)/bin/python -m vllm_overlay.ledger > docs/ledger.md

wheel: env ## Build the wheel in dist/.
	@$(VENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## Remove the environment and everything built.
	rm -rf $(VENV) build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
