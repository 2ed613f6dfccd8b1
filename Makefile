# Each Python gets a virtual environment of its own with the locked requirements of that Python:
#   make demo                      install, then run the demonstration
#   make test                      lint, types, import contracts and a seeded sample of the tests
#   make test PYTHON=python3.12    the same on the newest JAX (3.11 ends at JAX 0.10.2)
#   make check                     the whole matrix; resumes from LEDGER where it was cut off
#   make lint | notebook | lock | lock-ray | ray | clean

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:
.ONESHELL:

# A version manager's python3.X may exist and refuse to start, so a candidate counts only if it runs.
PYENV_ROOT ?= $(HOME)/.pyenv
supported = import sys; sys.exit(sys.version_info < (3, 11))
runs = $(shell "$(1)" -c '$(supported)' >/dev/null 2>&1 && echo "$(1)")
PYTHON ?= python3.11 python3.12 python3.13 python3 python
candidates := $(foreach name,$(PYTHON),$(name) $(wildcard $(PYENV_ROOT)/versions/$(name:python%=%).*/bin/python))
INTERPRETER := $(firstword $(foreach name,$(candidates),$(call runs,$(name))))
ifeq ($(INTERPRETER),)
$(error none of "$(PYTHON)" runs as Python 3.11 or newer: set PYTHON=/path/to/python3)
endif

VERSION := $(shell "$(INTERPRETER)" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
TAG := py$(subst .,,$(VERSION))
NEWEST_LOCK := requirements/py312.txt
LOCK := $(or $(wildcard requirements/$(TAG).txt),$(NEWEST_LOCK))
RAY_LOCK := $(or $(wildcard requirements/ray-$(TAG).txt),requirements/ray-py312.txt)
VENV := .venv-$(VERSION)
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
RAY_STAMP := $(VENV)/ray.stamp
LEDGER ?= build/check-$(TAG).jsonl
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
comma := ,
# A fresh environment in $$folder with what pip is asked for; gone when the recipe ends.
define resolve
folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT
"$(INTERPRETER)" -m venv "$$folder/venv"
"$$folder/venv/bin/python" -m pip install --quiet $(1)
endef
# Two workers: one test compiles while the other runs. The closing line comes from the controller.
# What shares one Ray stays in one of them.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

.PHONY: demo test check lint notebook lock lock-ray ray clean

demo: $(STAMP)
	$(BIN)/autopar demo

test: lint $(RAY_STAMP)
	$(PYTEST) $(ARGS)

check: lint $(RAY_STAMP)
	$(PYTEST) --full --ledger $(LEDGER) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

notebook: $(STAMP)
	shopt -s nullglob
	for script in notebooks/*.py; do
	  $(BIN)/jupytext --quiet --to ipynb "$$script"
	  $(BIN)/python -m nbconvert --to notebook --execute --inplace "$${script%.py}.ipynb"
	done

$(STAMP): $(LOCK) pyproject.toml
	"$(INTERPRETER)" -m venv --clear $(VENV)
	$(PIP_INSTALL) --requirement $(LOCK)
	$(PIP_INSTALL) --no-build-isolation --no-deps --editable .
	touch $@

ray: $(RAY_STAMP)

$(RAY_STAMP): $(STAMP) $(RAY_LOCK)
	$(PIP_INSTALL) --requirement $(RAY_LOCK)
	touch $@

# Resolves pyproject.toml afresh for this Python and pins everything it needs, nothing else.
# The lock of Ray adds to the other one, so that a test run without a cluster installs quickly.
FREEZE = "$$folder/venv/bin/python" -m pip freeze --all --exclude pip --exclude autopar

lock:
	$(call resolve,--editable ".[dev]")
	$(FREEZE) > "$$folder/lock"; cp "$$folder/lock" requirements/$(TAG).txt

lock-ray:
	$(call resolve,--constraint $(LOCK) --editable ".[dev$(comma)ray]")
	{ echo "--requirement $(notdir $(LOCK))"; $(FREEZE) | grep -vxFf $(LOCK); } > "$$folder/lock"
	cp "$$folder/lock" requirements/ray-$(TAG).txt

clean:
	rm -rf .venv-[0-9]* build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
