# Commands for a fresh machine: each sets up what it needs in .venv and is quick the second time.
#   make demo            the simulator: 16 instances with and without a shared KV pool (no vLLM needed, under 3 minutes)
#   make demo-connector  two real vLLM engines (CPU) on a real Mooncake store, and two without
#   make test            every test, with the real vLLM (CPU) and the real Mooncake where they can be installed
#   make check           the fast loop: format, lint, types, import arrows and all tests that need neither
#   make clean           remove .venv and everything built
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := check
.PHONY: demo demo-connector test check clean

demo: $(VENV)/.sim
	@$(BIN)/kvsim demo

demo-connector: $(VENV)/.dev
	@$(MAKE) --no-print-directory $(VENV)/.engine || echo "make: the engine could not be installed" >&2
	@$(BIN)/python -m connector.testbed.demo

test: $(VENV)/.dev
	@$(MAKE) --no-print-directory $(VENV)/.engine || echo "make: no engine here; its tests are skipped and counted" >&2
	@.ci/install-browser || echo "make: no browser here; its tests are skipped and counted" >&2
	@$(BIN)/python -m pytest --hypothesis-profile=ci -q -n 2 -m "not engine and not store"
	@$(BIN)/python -m pytest --hypothesis-profile=ci -q -m "engine or store"

check: $(VENV)/.dev
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python -m pytest -q -n 2 -m "not engine and not store and not slow"

clean:
	rm -rf $(VENV) build dist out .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- stamps: one for each set of packages; a changed pyproject.toml installs again ------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV) || { .ci/apt-install python3-venv && $(PYTHON) -m venv --clear $(VENV); }

$(VENV)/.sim: pyproject.toml | $(BIN)/python
	@$(PIP) install -q -e '.[sim]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@$(PIP) install -q -e '.[sim,dev]'
	@touch $@ $(VENV)/.sim

$(VENV)/.engine: .ci/install-engine $(VENV)/.dev
	@.ci/install-engine $(BIN)/python
	@touch $@
