# Every target makes .venv first when it is absent or older than pyproject.toml and requirements.lock,
# with the versions that the lock names, so that a clone of any day has those that were tested.
# pip's own settings are honoured: PIP_FIND_LINKS=FOLDER takes a CPU build of torch from a folder.
# make demo PYTHON=python3.12     another interpreter
# make test ARGS="-k resume -x"   arguments for pytest

.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	"$$p" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
BIN := .venv/bin
READY := .venv/.ready
NEWEST := .venv-newest
ARGS ?=
# What installs and builds packages, ours among them; installed first, so that the lock holds it, too.
BUILDERS := pip hatchling editables setuptools
# What leans most on other packages: loading, one run and its resumption, generation, serving.
NEWEST_TESTS := tests/cli/test_quiet.py tests/models/loading tests/models/generation \
	tests/training/test_resume.py tests/training/test_trainer.py tests/serving/test_app.py
PIP_INSTALL := install --quiet --disable-pip-version-check

.PHONY: help demo docs test test-slow test-kernels test-newest newest format check lint shape bench lock versions clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile

$(READY): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later with venv was found; name one: make PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (once; torch is the large part) ..."
	@$(BIN)/python -m pip $(PIP_INSTALL) --constraint requirements.lock $(BUILDERS)
	@$(BIN)/pip $(PIP_INSTALL) --constraint requirements.lock --no-build-isolation --editable '.[dev]'
	@touch $@

demo: $(READY)  ## the whole job on the embedded cookbook: prepare, train, evaluate, generate
	@$(BIN)/toque demo $(ARGS)

test: $(READY)  ## the tests, without the slow ones
	@$(BIN)/python -m pytest -q -n 2 $(ARGS)

test-slow: $(READY)  ## the slow tests
	@$(BIN)/python -m pytest -q -m "slow and not gpu" $(ARGS)

build/triton: requirements.lock $(READY)
	@$(BIN)/pip $(PIP_INSTALL) --constraint requirements.lock --no-deps --upgrade --target $@ triton
	@touch $@

# Beside a CPU build of torch, which brings none, and out of its environment.
test-kernels: build/triton  ## attention's kernels compiled for cards that are not here; TOQUE_KERNELS=all for each
	@PYTHONPATH=build/triton $(BIN)/python -m pytest -q -m slow tests/fake_cuda/test_kernels_that_fit.py $(ARGS)

$(NEWEST)/.ready: pyproject.toml
	@$(PYTHON) -m venv --clear $(NEWEST)
	@$(NEWEST)/bin/python -m pip $(PIP_INSTALL) --upgrade pip  # the one that Python brings searches for minutes
	@$(NEWEST)/bin/pip $(PIP_INSTALL) --editable '.[dev]'
	@touch $@

newest: $(NEWEST)/.ready  # an environment with the newest versions that pyproject.toml allows

test-newest: newest  ## loading, training, generation and serving with the newest versions
	@$(NEWEST)/bin/python -m pytest -q -n 2 $(NEWEST_TESTS) $(ARGS)

versions:  # what the environments hold
	@for python in $(BIN)/python $(NEWEST)/bin/python; do [ ! -x $$python ] || \
	{ $$python --version; $$python -m pip list --format=freeze --exclude toque | paste -sd ' '; }; done

lock: $(READY)  ## requirements.lock with the newest versions; torch as its first lines say
	@$(BIN)/pip $(PIP_INSTALL) uv
	@sed -n '/^#/p' requirements.lock >requirements.lock.new
	@printf '%s\n' $(BUILDERS) | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras \
	--no-header --no-annotate --upgrade --constraint <(echo torch==2.13.0) pyproject.toml - >>requirements.lock.new
	@mv requirements.lock.new requirements.lock

format: $(READY)  ## put the code in its format
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

shape:  ## syntax nodes, density, long files; a report that never fails
	@$(PYTHON) tools/shape.py

lint: $(READY)
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/python tools/prose.py

check: lint test  ## format, lint, types, tests; CI runs `make test-newest` besides

docs: $(READY)  ## the documentation site, into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "Open build/site/index.html"

bench: $(READY)  ## the benchmarks of speed, about 25 minutes; each prints one JSON record
	@$(BIN)/pip $(PIP_INSTALL) --constraint requirements.lock --editable '.[bench]'
	@bad=; for file in bench/speed/*.py; do $(BIN)/python "$$file" || bad="$$bad $$file"; done; \
	[ -z "$$bad" ] || { echo "Void or failed:$$bad" >&2; exit 1; }

clean:  ## remove .venv and caches; runs/ and stores/ stay
	rm -rf .venv $(NEWEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
