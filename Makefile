# Every target makes what it needs first, once: a virtual environment, torch, this package.
#
#   make demo        a training run that loses ranks and comes back (less than a minute)
#   make test        the tests
#   make test-slow   those that take minutes: many kills in a row, the fault matrix
#   make test-exhaustive  the rest of the fault matrix: every fault on each of eight ranks
#   make check       linters, types, house rules, docs
#   make bench       against torchrun and NVIDIA's resiliency extension, same machine, same script
#   make docs        the documentation as a site, in build/site/
#   make clean       remove all of that again
#
# PYTHON=python3.12 picks an interpreter, TORCH='torch==2.13.0+cpu' another build (pip's syntax).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PYTEST_FLAGS ?=
PYTEST := $(BIN)/python -m pytest $(PYTEST_FLAGS)
# With flags that select tests (--last-failed, -k NAME) one of several runs may find none: pytest's exit code 5.
OR_NONE = || { code=$$?; [ $$code = 5 ] && [ -n "$(PYTEST_FLAGS)" ]; }

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-exhaustive check bench docs clean

help:
	@sed -n 's/^#  //p' Makefile

setup: $(VENV)/.ready

# The newest Python that runs, is at least 3.11 and can make a virtual environment.
$(VENV)/.python:
	@python=""; \
	for candidate in $${PYTHON:-python3.14 python3.13 python3.12 python3.11 python3}; do \
	    if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	    then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "closeranks needs Python 3.11 or newer with its venv module, and found none." >&2; \
	    echo "Install it (Debian, Ubuntu: apt-get install python3 python3-venv), or name one:" >&2; \
	    echo "make PYTHON=/path/to/python3.12" >&2; \
	    exit 1; \
	fi; \
	echo "making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV)
	@touch $@

# Pinned: the hooks are tested against this version, and a bare "torch" would take whatever is newest.
$(VENV)/.torch: $(VENV)/.python
	@echo "installing $(TORCH)"
	@$(PIP) install '$(TORCH)' 'numpy>=1.26'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "installing closeranks"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.ready: $(VENV)/.installed
	@echo "installing what tests and checks need"
	@$(PIP) install --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/closeranks demo

# Tests that start training processes measure time and kill things: one after the other, on a quiet machine.
# The rest shares the cores.
test: setup
	$(PYTEST) -m 'not slow and not torch' -n 2 $(OR_NONE)
	$(PYTEST) -m 'not slow and torch' $(OR_NONE)

test-slow: setup
	$(PYTEST) -m 'slow and not exhaustive and not torch' -n 2 $(OR_NONE)
	$(PYTEST) -m 'slow and not exhaustive and torch' $(OR_NONE)

test-exhaustive: setup
	$(PYTEST) -m exhaustive

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(PYTEST) tests/test_tidy.py
	$(BIN)/python scripts/check_docs.py

$(VENV)/.bench: $(VENV)/.ready
	@$(PIP) install nvidia-resiliency-ext==0.4.1
	@touch $@

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/launch.py

$(VENV)/.docs: $(VENV)/.ready
	@$(PIP) install 'mkdocs==1.6.*'
	@touch $@

docs: $(VENV)/.docs
	$(BIN)/python scripts/check_docs.py
	$(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

clean:
	rm -rf $(VENV) build dist closeranks-runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
