# Every target makes .venv first when it is absent or older than pyproject.toml.
# pip's own settings are honoured: PIP_FIND_LINKS=FOLDER takes a CPU build of torch from a folder.
# make demo PYTHON=python3.12     another interpreter
# make test ARGS="-k resume -x"   arguments for pytest

.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	"$$p" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
BIN := .venv/bin
READY := .venv/.ready
ARGS ?=

.PHONY: help demo docs test test-slow format check bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later with venv was found; name one: make PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (once; torch is the large part) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(READY)  ## the whole job on the embedded cookbook: prepare, train, evaluate, generate
	@$(BIN)/toque demo $(ARGS)

test: $(READY)  ## the tests, without the slow ones
	@$(BIN)/python -m pytest -q -n 2 $(ARGS)

test-slow: $(READY)  ## the slow tests
	@$(BIN)/python -m pytest -q -m "slow and not gpu" $(ARGS)

format: $(READY)  ## put the code in its format
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

check: $(READY)  ## what CI runs: format, lint, types, tests
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(MAKE) --no-print-directory test

docs: $(READY)  ## the documentation site, into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "Open build/site/index.html"

bench: $(READY)  ## the benchmarks of speed, about 25 minutes; each prints one JSON record
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@bad=; for file in bench/speed/*.py; do $(BIN)/python "$$file" || bad="$$bad $$file"; done; \
	[ -z "$$bad" ] || { echo "Void or failed:$$bad" >&2; exit 1; }

clean:  ## remove .venv and caches; runs/ and stores/ stay
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
