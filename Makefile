# The commands people and CI share. Everything lives in .venv; delete it to start over.
PYTHON ?= $(shell command -v python3.11 >/dev/null 2>&1 && python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
COMPILED := $(VENV)/.compiled
INSTALLED := $(VENV)/.installed
# compat: a script beside the clone must find the package, not the clone's folder of the same name
PIP = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat

.PHONY: demo test test-versions lint types unit format gpu bench docs clean help

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# processes that run tests; each takes a file at a time, and waits for others nearly half of the time
WORKERS ?= 4
# share of the demo's rows on the device; 0 keeps the tables whole
CACHE ?= 0.015

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hotbed needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) -e .
	@touch $@

# Python compiles what is imported, when it is: compiling all that pip installs takes half a minute. pip works on one core, so
# two of them unpack half of the pinned packages each; the third has little left to do, or all if one of them failed.
$(READY): pyproject.toml constraints.txt | $(BIN)/pip
	@for half in 1 0; do $(PIP) --no-compile --no-deps $$(awk "/==/ && NR % 2 == $$half" constraints.txt) & done; wait
	$(PIP) --no-compile -e '.[dev]'
	@command -v npm >/dev/null && npm install --silent --no-save --no-audit --no-fund --prefix $(VENV)/s3rver s3rver@3.7.1 \
		|| echo 'no npm: the tests of object stores are skipped'
	@touch $(INSTALLED) $@

demo: $(INSTALLED)  ## train the default model on the embedded click log; prints the AUC, writes the report page
	$(BIN)/hotbed train --cache $(CACHE) --out runs/demo --overwrite

test: $(READY)  ## everything CI runs; mypy takes one core for a minute, beside the tests
	@$(MAKE) --no-print-directory --jobs=2 lint types unit

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

# 25 s on one core, beside mypy. Processes that begin at the same time would all compile what tests import: 15 s each.
$(COMPILED): $(READY)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -qq > $@.log || { cat $@.log; exit 1; }
	@touch $@

unit: $(COMPILED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

format: $(READY)  ## rewrite the sources in house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gpu:  ## the tests that need a CUDA device, with the python3 that has one
	PYTHONPATH=. python3 -m pytest -m gpu

PYTHONS ?= python3.11 python3.12 python3.13 python3.14
TORCHES ?= 2.11.0 2.15.0
QUICK ?= tests/tables/test_module.py tests/cache/test_cache.py tests/optim tests/laws/test_same_bits.py tests/cli/test_main.py

test-versions:  ## quick tests with the wheel under every Python here and several torch; downloads them into .versions
	@for python in $(PYTHONS); do $$python -c '' 2>/dev/null || { echo "$$python is not here: left out"; continue; }; \
	for torch in $(TORCHES); do place=.versions/$$python-$$torch; echo "$$python, torch $$torch"; \
	$$python -m venv $$place && $$place/bin/pip install --quiet --disable-pip-version-check torch==$$torch . pytest hypothesis \
	&& (mkdir -p $$place/run && cp -r tests pyproject.toml $$place/run && cd $$place/run \
	&& ../bin/python -m pytest -q -p no:cacheprovider $(QUICK)) || exit 1; done; done

bench: $(READY)  ## the CPU tables of README.md, on this machine
	$(BIN)/python -m benchmarks.run

docs: $(READY)  ## the documentation as a site, docs/_build/index.html; warnings are errors
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build .versions
