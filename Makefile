# Every target first creates .venv with the tested versions in requirements.lock. It is created again
# when pyproject.toml or requirements.lock is newer.
#
#   make demo PYTHON=python3.12       choose the interpreter
#   make test ARGS="-k resume -x"     pass arguments to pytest
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test    PyTorch without CUDA
#   PIP_FIND_LINKS=FOLDER make test   PyTorch from a folder of wheels

.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	"$$p" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
BIN := .venv/bin
READY := .venv/.ready
NEWEST := .venv-newest
ARGS ?=
# Build tools, also at the versions in the lock. They are installed first.
BUILDERS := pip hatchling editables setuptools
# The tests that depend most on other packages: loading, training and resume, generation, serving.
NEWEST_TESTS := tests/cli/test_quiet.py tests/models/loading tests/models/generation \
	tests/training/test_resume.py tests/training/test_trainer.py tests/serving/test_app.py
PIP_INSTALL := install --quiet --disable-pip-version-check

.PHONY: help demo docs test test-slow test-kernels test-newest newest format check lint shape bench lock versions clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile

$(READY): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later with venv was not found. Set it: make PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (once; torch is the large part) ..."
	@$(BIN)/python -m pip $(PIP_INSTALL) --constraint requirements.lock $(BUILDERS)
	@$(BIN)/pip $(PIP_INSTALL) --constraint requirements.lock --no-build-isolation --editable '.[dev]'
	@touch $@

demo: $(READY)  ## prepare, train, evaluate and generate with synthetic recipes
	@$(BIN)/toque demo $(ARGS)

test: $(READY)  ## run the tests, except slow ones
	@$(BIN)/python -m pytest -q -n 2 --durations=40 $(ARGS)

test-slow: $(READY)  ## run the slow tests
	@$(BIN)/python -m pytest -q -m "slow and not gpu" $(ARGS)

build/triton: requirements.lock $(READY)
	@$(BIN)/pip $(PIP_INSTALL) --constraint requirements.lock --no-deps --upgrade --target $@ triton
	@touch $@

# A CPU build of torch has no Triton, so Triton is installed in a separate folder.
test-kernels: build/triton  ## compile the attention kernels for five GPUs without a GPU; TOQUE_KERNELS=all for all
	@PYTHONPATH=build/triton $(BIN)/python -m pytest -q -m slow tests/fake_cuda/test_kernels_that_fit.py $(ARGS)

$(NEWEST)/.ready: pyproject.toml
	@$(PYTHON) -m venv --clear $(NEWEST)
	@$(NEWEST)/bin/python -m pip $(PIP_INSTALL) --upgrade pip  # the bundled pip resolves for minutes
	@$(NEWEST)/bin/pip $(PIP_INSTALL) --editable '.[dev]'
	@touch $@

newest: $(NEWEST)/.ready  # create an environment with the newest allowed versions

test-newest: newest  ## test loading, training, generation and serving with the newest allowed versions
	@$(NEWEST)/bin/python -m pytest -q -n 2 $(NEWEST_TESTS) $(ARGS)

versions:  # print the installed versions
	@for python in $(BIN)/python $(NEWEST)/bin/python; do [ ! -x $$python ] || \
	{ $$python --version; $$python -m pip list --format=freeze --exclude toque | paste -sd ' '; }; done

lock: $(READY)  ## write requirements.lock with the newest versions, except torch
	@$(BIN)/pip $(PIP_INSTALL) uv
	@sed -n '/^#/p' requirements.lock >requirements.lock.new
	@printf '%s\n' $(BUILDERS) | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras \
	--no-header --no-annotate --upgrade --constraint <(echo torch==2.13.0) pyproject.toml - >>requirements.lock.new
	@mv requirements.lock.new requirements.lock

format: $(READY)  ## format the code and fix lint errors
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

shape:  ## report syntax nodes, density and long files; never fails
	@$(PYTHON) tools/shape.py

lint: $(READY)  ## check format, lint and types
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/python tools/prose.py

check: lint test  ## lint and test

docs: $(READY)  ## build the documentation into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "Open build/site/index.html"

bench: $(READY)  ## run the speed benchmarks (about 25 minutes); each prints a JSON record
	@$(BIN)/pip $(PIP_INSTALL) --constraint requirements.lock --editable '.[bench]'
	@bad=; for file in bench/speed/*.py; do $(BIN)/python "$$file" || bad="$$bad $$file"; done; \
	[ -z "$$bad" ] || { echo "Void or failed:$$bad" >&2; exit 1; }

clean:  ## remove .venv and caches, but not runs/ and stores/
	rm -rf .venv $(NEWEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
