# The verbs of this repository; "make help" lists them. pip is all that is needed.
# PYTHON picks the interpreter, VENV the virtual environment: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
# What a machine may lack, or what takes minutes, is left out of "make test".
FAST := not slow and not gpu and not network and not browser

.DEFAULT_GOAL := help
.PHONY: help demo install install-dev test test-slow lint format types check bench bench-stream clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: install ## install, then draw a smiling cat with sunglasses into out/
	@mkdir -p out
	$(BIN)/ciar generate "a smiling cat with sunglasses" --seed 7 --out out/demo.png --heatmap out/demo-heat.png --force

install: $(VENV)/.installed ## create the virtual environment and install ciar into it

install-dev: $(VENV)/.installed-dev ## the same with everything that tests and training need

test: install-dev ## the tests that take seconds
	$(BIN)/python -m pytest -m "$(FAST)"

test-slow: install-dev ## the tests that take minutes
	$(BIN)/python -m pytest -m "slow and not gpu and not network and not browser"

lint: install-dev ## formatting and lint, as CI checks them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: install-dev ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: install-dev ## mypy, strict
	$(BIN)/mypy

check: lint types test ## all of lint, types and test

bench: install-dev ## speed on this machine: a table, then one JSON line
	$(BIN)/ciar bench

bench-stream: install-dev ## time to image over slow networks: a table, a document and a plot in out/
	$(BIN)/ciar bench-stream

clean: ## remove the virtual environment and what was made by tools
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ciar needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# Installed in place, so that what runs is always the source that is here.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[dev,train]"
	@touch $@ $(VENV)/.installed
