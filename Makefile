# Two commands need no more than Python: `make demo` and `make test`.
# Both make .venv when it is missing and install into it when pyproject.toml has changed since.
#
#   PYTHON=python3.12     the interpreter that makes .venv
#   PIP_FLAGS=...         e.g. --extra-index-url https://download.pytorch.org/whl/cpu for the small torch wheel
#   PYTEST_FLAGS=...      in place of one process per core
#   TFX_APPS=required     fail, not skip, where a compiler, Node or a browser for the apps is missing

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
PYTEST_FLAGS ?= -n auto --dist loadfile
BIN := $(VENV)/bin
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS)
DEMO := build/demo-model

.PHONY: demo test thorough zoo apps lint types unit format clean

demo: $(VENV)/.installed-export
	mkdir -p $(dir $(DEMO))
	$(BIN)/tfx export --d-model 768 --layers 12 --out $(DEMO) --force
	$(BIN)/tfx verify $(DEMO)
	$(BIN)/tfx bench $(DEMO)

test: lint types unit

# More of what `make test` has one of: other layouts, other tokenizers, benchmarks from end to end. CI runs it.
thorough: $(VENV)/.installed-dev apps
	$(PYTEST) -m thorough

# Every encoder by every exporter for every target: about 10 minutes on two cores.
zoo: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/coverage.py --no-peers --jobs 2

# What the apps in other languages are built and checked with; it says what it cannot have.
apps: $(VENV)/.installed-dev
	tests/apps/install.sh $(BIN)/python

lint: $(VENV)/.installed-dev apps
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/apps/lint.py

# The link is how the type checker finds package tfx, which is this folder whatever its name.
types: $(VENV)/.installed-dev
	mkdir -p build/types && ln -sfn ../.. build/types/tfx
	$(BIN)/basedpyright

unit: $(VENV)/.installed-dev apps
	$(PYTEST) -m "not thorough"

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell find runtime/apps -name '*.[ch]' -o -name '*.[ch]pp')

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "tfx needs Python 3.10 or newer; found " + sys.version.split()[0] + ". Say which: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# Both installs are editable, so that neither puts a stale copy in front of the other.
# What dev needs holds what export needs: after `make test`, `make demo` installs nothing.
$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_FLAGS) --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(VENV)/.installed-export $@

$(VENV)/.installed-export: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_FLAGS) --quiet --disable-pip-version-check --editable '.[export]'
	touch $@
